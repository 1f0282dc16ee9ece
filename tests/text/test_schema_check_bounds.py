"""Any client may send a schema, and checks run on the thread that reads all tokens: none is slow,
none raises."""

from __future__ import annotations

from typing import Any

import pytest

from firn.core.events import ChoiceFinished, ToolCallDelta, ToolCallStarted
from firn.core.values import Tool
from firn.text.call_check import CallCheck
from firn.text.schema_check import violations

SLOW = "(?:x|xx)+y"
VICTIM = "x" * 40

HOSTILE: dict[str, tuple[Any, Any]] = {
    "patterns of members": (
        {VICTIM + str(i): 1 for i in range(50)},
        {"patternProperties": {f"{SLOW}{i}": {} for i in range(500)}},
    ),
    "patterns beside others": (
        {VICTIM + str(i): 1 for i in range(50)},
        {
            "additionalProperties": False,
            "patternProperties": {f"{SLOW}{i}": {} for i in range(500)},
        },
    ),
    "patterns of items": ([VICTIM] * 2000, {"items": {"pattern": SLOW}}),
    "a list of values": (["a"] * 5000, {"items": {"enum": list(range(20_000))}}),
    "a pattern that takes long to read": ("a", {"pattern": "(" * 20_000 + "a" + ")" * 20_000}),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_schema_is_given_up_in_time(name: str) -> None:
    """Each of these would take minutes at least."""
    value, schema = HOSTILE[name]
    assert isinstance(violations(value, schema), list)


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": 5, "additionalProperties": False},
        {"additionalProperties": False, "patternProperties": 5},
        {"patternProperties": {"a": 1}, "properties": []},
        {"dependentRequired": {"a": [[]]}},
        {"required": [{}]},
        {"enum": 5, "pattern": {}, "propertyNames": 1, "items": 3, "contains": 4, "$ref": []},
    ],
)
def test_malformed_keywords_raise_nothing(schema: Any) -> None:
    for value in ({"a": 1}, [1], "a", 1, None):
        assert isinstance(violations(value, schema), list)


def test_all_calls_of_a_reply_share_one_time_limit() -> None:
    check = CallCheck([Tool("f", "", {"properties": {"a": {"pattern": SLOW}}}, param="tools[0]")])
    events: list[Any] = []
    for i in range(2000):
        events += [ToolCallStarted(0, i, str(i), "f"), ToolCallDelta(0, i, f'{{"a": "{VICTIM}"}}')]
    check.see(events)
    assert check.see([ChoiceFinished(0, "tool_calls")]) == []


def test_arguments_of_endless_brackets_are_not_checked() -> None:
    check = CallCheck([Tool("f", "", {"not": {}}, param="tools[0]")])
    check.see([ToolCallStarted(0, 0, "a", "f"), ToolCallDelta(0, 0, "[" * 100_000)])
    assert check.see([ChoiceFinished(0, "length")]) == []
