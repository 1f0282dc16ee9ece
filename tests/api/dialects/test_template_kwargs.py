"""Variables of a chat template: what a request may set, and how much of it."""

from __future__ import annotations

from typing import Any

import pytest

from firn.api.dialects._template_kwargs import (
    MAX_DOCUMENTS_SIZE,
    MAX_NAMES,
    MAX_SIZE,
    template_kwargs,
)
from firn.api.http.fields import Fields
from firn.core.errors import InvalidValue

PARAM = "chat_template_kwargs"


def decoded(**kwargs: Any) -> Any:
    return template_kwargs(Fields({PARAM: kwargs}))


def nested(depth: int) -> Any:
    return [nested(depth - 1)] if depth else 1


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"enable_thinking": False},
        {"thinking": True, "reasoning_effort": "high", "thinking_budget": 512},
        {"add_generation_prompt": False},
        {"date": "2026-11-15", "n": -3, "x": 0.5, "nothing": None},
        {"builtin_tools": ["browser", {"name": "python", "depth": [[1]]}]},
        {"documents": [{"title": "a", "text": "b" * 100_000}]},
        {"deep": nested(8)},
    ],
)
def test_variables_that_templates_use_pass(kwargs: dict[str, Any]) -> None:
    assert decoded(**kwargs) == kwargs


def test_without_variables_there_are_none() -> None:
    assert template_kwargs(Fields({})) == {}
    assert template_kwargs(Fields({PARAM: None})) == {}


@pytest.mark.parametrize(
    "kwargs",
    [
        {"chat_template": "{{ 1 }}"},
        {"chat_template": None},
        {"template": "x"},
        {"conversation": []},
        {"messages": []},
        {"tools": []},
        {"tokenize": True},
        {"tokenizer_kwargs": {}},
        {"padding": "max_length"},
        {"continue_final_message": "content"},
        {"return_tensors": "np"},
        {"bos_token": "<|im_start|>"},
        {"image_token": "x"},
        {"additional_special_tokens": ["x"]},
        {"raise_exception": 1},
        {"range": 1},
        {"": 1},
        {"_private": 1},
        {"__class__": 1},
        {"with space": 1},
        {"naïve": 1},
        {"x" * 65: 1},
        {"n": 2**54},
        {"n": -(10**400)},
        {"x": float("nan")},
        {"x": [float("inf")]},
        {"deep": nested(9)},
        {"documents": "text"},
        {"documents": ["text"]},
        {"documents": [{"text": "x" * MAX_DOCUMENTS_SIZE}]},
        {"text": "x" * MAX_SIZE},
        {"many": [0] * (MAX_SIZE // 4)},
        {"keys": {"k" * 100 + str(i): 0 for i in range(1000)}},
        {f"v{i}": 1 for i in range(MAX_NAMES + 1)},
    ],
)
def test_reserved_and_malformed_variables_are_refused_by_name(kwargs: dict[str, Any]) -> None:
    with pytest.raises(InvalidValue) as caught:
        decoded(**kwargs)
    assert (caught.value.param or "").startswith(PARAM)
    assert len(caught.value.message) < 300


@pytest.mark.parametrize("name", ["chat_template", "template", "chat_template_type"])
def test_a_template_beside_the_variables_is_refused_too(name: str) -> None:
    with pytest.raises(InvalidValue, match="server's") as caught:
        template_kwargs(Fields({name: "{{ 1 }}"}))
    assert caught.value.param == name


@pytest.mark.parametrize("value", [5, "x", [], True])
def test_variables_must_be_an_object(value: Any) -> None:
    with pytest.raises(InvalidValue):
        template_kwargs(Fields({PARAM: value}))
