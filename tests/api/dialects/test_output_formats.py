"""The same forms in every dialect, each under that API's own name for them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from firn.api.dialects import discover
from firn.core.errors import InvalidValue
from firn.core.values import Grammar, Namespace
from firn.text.grammar.json_lark import MAX_CHARS

HI = [{"role": "user", "content": "hi"}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
Body = dict[str, Any]


def flat(form: Body) -> Body:
    return form


def wrapped(form: Body) -> Body:
    """The chat API's shape: a schema and its name are in a nested object."""
    if form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {k: v for k, v in form.items() if k != "type"}}


PLACES: dict[str, tuple[str, Callable[[Body], Body], Callable[[Body], Body]]] = {
    "response_format": (
        "/v1/chat/completions",
        lambda form: {"messages": HI, "response_format": form},
        wrapped,
    ),
    "text.format": ("/v1/responses", lambda form: {"input": "hi", "text": {"format": form}}, flat),
    "output_config.format": (
        "/v1/messages",
        lambda form: {"messages": HI, "output_config": {"format": form}},
        flat,
    ),
    "output_format": (
        "/v1/messages",
        lambda form: {"messages": HI, "output_format": form},
        flat,
    ),
}


def decoded(param: str, form: Any) -> Grammar | None:
    path, body, _ = PLACES[param]
    dialect = next(d for d in discover() if d.path == path)
    return dialect.decode(body(form), namespace=Namespace("test")).requests[0].grammar


@pytest.mark.parametrize("param", PLACES)
@pytest.mark.parametrize(
    ("form", "kind", "text"),
    [
        ({"type": "json_object"}, "json_object", ""),
        (
            {"type": "json_schema", "name": "n", "strict": True, "schema": SCHEMA},
            "json_schema",
            json.dumps(SCHEMA),
        ),
        ({"type": "json_schema", "name": "n", "schema": {}}, "json_schema", "{}"),
        ({"type": "regex", "regex": "a+"}, "regex", "a+"),
        ({"type": "lark", "grammar": "start: A"}, "lark", "start: A"),
        ({"type": "choice", "choices": ["a", "b"]}, "choice", '["a", "b"]'),
    ],
)
def test_every_form_is_decoded_in_every_dialect(
    param: str, form: Body, kind: Any, text: str
) -> None:
    in_its_shape = PLACES[param][2](form)
    strict = bool(form.get("strict"))
    assert decoded(param, in_its_shape) == Grammar(kind, text, param=param, strict=strict)


@pytest.mark.parametrize("param", PLACES)
@pytest.mark.parametrize("form", [None, {"type": "text"}])
def test_without_a_form_there_is_no_grammar(param: str, form: Any) -> None:
    assert decoded(param, form) is None


@pytest.mark.parametrize("param", PLACES)
@pytest.mark.parametrize(
    ("form", "member"),
    [
        ("json", ""),
        ({}, ".type"),
        ({"type": "xml"}, ".type"),
        ({"type": "regex"}, ".regex"),
        ({"type": "regex", "regex": 5}, ".regex"),
        ({"type": "lark"}, ".grammar"),
        ({"type": "choice", "choices": []}, ".choices"),
        ({"type": "choice", "choices": ["a", 5]}, ".choices[1]"),
        ({"type": "choice", "choices": ["a"] * 16_385}, ".choices"),
        ({"type": "lark", "grammar": "a" * (MAX_CHARS + 1)}, ".grammar"),
    ],
)
def test_errors_name_the_member(param: str, form: Any, member: str) -> None:
    with pytest.raises(InvalidValue) as caught:
        decoded(param, form)
    assert caught.value.param == f"{param}{member}"
