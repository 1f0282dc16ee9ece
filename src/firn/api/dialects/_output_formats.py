"""The form that a reply must have.

All dialects but Ollama's accept the same forms, each in a field of its own. JSON is requested as in
OpenAI's and Anthropic's APIs; regex, choice and lark are extensions. The fields by which other servers
are asked for the same are accepted, too. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from firn.api.http import fields
from firn.api.http.body import parse
from firn.api.http.fields import Fields
from firn.core.errors import InvalidValue
from firn.core.values import Grammar
from firn.text.grammar.json_lark import MAX_CHARS

MAX_CHOICES = 16_384
"""The time to compile them grows with the square of their number."""
KINDS = ("text", "json_object", "json_schema", "regex", "choice", "lark")


def output_format(owner: Fields, member: str, *, schema_in: str = "") -> Grammar | None:
    """The form in this member; None: any text. schema_in: the member that wraps a schema and its
    name, if any."""
    given = owner.get(member)
    if given is None:
        return None
    path = owner.name(member)
    form = fields.members(given, path)
    kind = fields.one_of(form.require("type"), form.name("type"), KINDS)
    match kind:
        case "json_object":
            return Grammar("json_object", param=path)
        case "json_schema":
            return _schema(form, schema_in, path)
        case "regex":
            pattern = fields.string(form.require("regex"), form.name("regex"))
            return Grammar("regex", pattern, param=path)
        case "choice":
            listed = choices(form.require("choices"), form.name("choices"))
            return Grammar("choice", listed, param=path)
        case "lark":
            grammar = lark(form.require("grammar"), form.name("grammar"))
            return Grammar("lark", grammar, param=path)
        case _:
            return None


def wanted_format(body: Fields, own: Grammar | None) -> Grammar | None:
    """The form of the replies: `own`, from the API's own field, or what vLLM, SGLang or llama.cpp call
    it. Raises InvalidValue if there are two."""
    given = [own] if own is not None else []
    for member, read in OTHER_NAMES.items():
        given += _named(body, member, read)
    if body.get("structured_outputs") is not None:
        nested = body.object("structured_outputs")
        for member, read in STRUCTURED_OUTPUTS.items():
            given += _named(nested, member, read)
    if len(given) > 1:
        raise InvalidValue(given[1].param, f"cannot be combined with {given[0].param}")
    return given[0] if given else None


def _named(
    owner: Fields, member: str, read: Callable[[object, str], Grammar | None]
) -> list[Grammar]:
    value, param = owner.get(member), owner.name(member)
    grammar = None if value is None or value == "" else read(value, param)
    return [] if grammar is None else [grammar]


def _json(given: object, param: str) -> Grammar:
    """A schema, or one written as text."""
    if isinstance(given, str):
        try:
            given = parse(given)
        except ValueError as error:
            raise InvalidValue(param, f"is not JSON: {error}") from None
    return Grammar("json_schema", json.dumps(fields.mapping(given, param)), param=param)


def _regex(given: object, param: str) -> Grammar:
    return Grammar("regex", fields.string(given, param), param=param)


def _choice(given: object, param: str) -> Grammar:
    return Grammar("choice", choices(given, param), param=param)


def _lark(given: object, param: str) -> Grammar:
    text = lark(given, param)
    if "::=" in text:
        raise InvalidValue(param, "is in GBNF or EBNF, which firn does not read: write it in Lark")
    return Grammar("lark", text, param=param)


def _any_object(given: object, param: str) -> Grammar | None:
    return Grammar("json_object", param=param) if fields.boolean(given, param) else None


OTHER_NAMES: Mapping[str, Callable[[object, str], Grammar | None]] = {
    "guided_json": _json,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _lark,
    "json_schema": _json,
    "regex": _regex,
    "regex_pattern": _regex,
    "ebnf": _lark,
    "grammar": _lark,
    "grammar_string": _lark,
}
STRUCTURED_OUTPUTS: Mapping[str, Callable[[object, str], Grammar | None]] = {
    "json": _json,
    "json_object": _any_object,
    "regex": _regex,
    "choice": _choice,
    "grammar": _lark,
}


def lark(given: object, param: str) -> str:
    """A grammar that a user has written. Raises InvalidValue."""
    return fields.string(given, param, max_chars=MAX_CHARS)


def _schema(form: Fields, schema_in: str, param: str) -> Grammar:
    if schema_in:
        form.require(schema_in)
        form = form.object(schema_in)
    form.string("name")
    strict = form.boolean("strict", False)  # a schema is always enforced, as far as it can be
    text = json.dumps(fields.mapping(form.require("schema"), form.name("schema")))
    return Grammar("json_schema", text, param, strict=strict)


def choices(given: object, param: str) -> str:
    texts = fields.array(given, param, low=1, high=MAX_CHOICES)
    return json.dumps([fields.string(text, f"{param}[{i}]") for i, text in enumerate(texts)])


def schema_of_format() -> dict[str, Any]:
    """For /openapi.json."""
    return {
        "type": ["object", "null"],
        "description": f"type is one of {', '.join(KINDS)}; see the README.",
    }
