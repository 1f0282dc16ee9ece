"""Values checked against schemas: the same verdicts as the jsonschema library's."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from firn.core.events import ChoiceFinished, ToolCallDelta, ToolCallStarted
from firn.core.values import Tool
from firn.text.call_check import CallCheck
from firn.text.schema_check import violations

SCHEMAS: list[dict[str, Any]] = [
    {"type": "string", "pattern": "^(?!x)a+$"},
    {"type": ["integer", "null"], "minimum": 1, "exclusiveMaximum": 4, "multipleOf": 2},
    {"enum": [1, "a", None, {"b": [True]}]},
    {"const": {"a": 1}},
    {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}}},
    {"properties": {"a": {}}, "additionalProperties": False},
    {"properties": {"a": {}}, "additionalProperties": {"type": "string"}},
    {"patternProperties": {"^a": {"type": "integer"}}, "additionalProperties": False},
    {"propertyNames": {"maxLength": 1}},
    {"dependentRequired": {"a": ["b"]}},
    {"dependentSchemas": {"a": {"required": ["b"]}}},
    {"minProperties": 1, "maxProperties": 1},
    {"items": {"type": "integer"}, "minItems": 1, "maxItems": 2, "uniqueItems": True},
    {"prefixItems": [{"type": "integer"}], "items": {"type": "string"}},
    {"contains": {"const": 1}, "minContains": 1, "maxContains": 1},
    {"contains": {"const": 1}, "minContains": 2.0},
    {"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 1}]},
    {"oneOf": [{"type": "integer"}, {"minimum": 2}]},
    {"allOf": [{"type": "integer"}, {"maximum": 2}]},
    {"not": {"type": "string"}},
    {"if": {"type": "integer"}, "then": {"minimum": 1}, "else": {"type": "string"}},
    {"$ref": "#/$defs/tree", "$defs": {"tree": {"items": {"$ref": "#/$defs/tree"}, "maxItems": 1}}},
    {"anyOf": [True, False]},
    {"items": False},
    {"minLength": 1, "maxLength": 2},
]
PLENTY_S = 60.0
"""Python may collect garbage in the middle of a check, which takes long in a large process."""
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-1, 4)
    | st.sampled_from(["", "a", "aa", "xa", "abc", 2.0]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["a", "b", "ab"]), inner, max_size=3)
    ),
    max_leaves=6,
)


VALIDATORS = [jsonschema.Draft202012Validator(schema) for schema in SCHEMAS]


@settings(max_examples=120, deadline=None)
@given(value=VALUES)
def test_faults_agree_with_jsonschema(value: Any) -> None:
    """Each value against every schema: drawing one takes longer than checking it."""
    for schema, known in zip(SCHEMAS, VALIDATORS, strict=True):
        assert (not violations(value, schema, time_s=PLENTY_S)) == known.is_valid(value), schema


SOME_VALUES: list[Any] = [
    None, True, False, -1, 0, 1, 2, 2.0, 3, 4, 1.5, "", "a", "aa", "xa", "abc",
    [], [1], [1, 1], [1, 1.0], [1, 2], [1, "a"], ["a"], [True, 1], [[]], [[], []], [[[]]], [1, 2, 3],
    {}, {"a": 1}, {"a": "a"}, {"b": 1}, {"a": 1, "b": 1}, {"a": 1, "b": "x"}, {"ab": 1}, {"ab": "a"},
    {"b": [True]}, {"a": True}, {"a": 1.0},
]  # fmt: skip


@pytest.mark.parametrize("schema", SCHEMAS, ids=lambda s: next(iter(s)))
def test_faults_agree_with_jsonschema_on_values_of_every_kind(schema: dict[str, Any]) -> None:
    known = jsonschema.Draft202012Validator(schema)
    verdicts = [known.is_valid(value) for value in SOME_VALUES]
    assert [not violations(value, schema, time_s=PLENTY_S) for value in SOME_VALUES] == verdicts
    assert len(set(verdicts)) == 2 or schema == {"anyOf": [True, False]}


def test_the_places_of_faults_are_named() -> None:
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string", "pattern": "b"}, "c": {"not": {}}},
        "required": ["d"],
    }
    places = violations({"a": "x", "c": 1}, schema, time_s=PLENTY_S)
    assert set(places) == {"#/properties/a/pattern", "#/properties/c/not", "#/required"}


@pytest.mark.parametrize(
    ("items", "is_unique"),
    [
        ([0, -0.0], False),
        ([1e300, int(1e300)], False),
        ([[1], [1.0]], False),
        ([{"a": 1, "b": 2}, {"b": 2.0, "a": 1}], False),
        ([1, True, "1", 1.5, [1], [True], {"a": 1}, {"a": True}], True),
    ],
)
def test_items_are_unique_if_no_two_are_equal_in_json(items: list[Any], is_unique: bool) -> None:
    assert (violations(items, {"uniqueItems": True}, time_s=PLENTY_S) == []) == is_unique


@pytest.mark.parametrize("limit", ["minContains", "maxContains"])
@pytest.mark.parametrize("malformed", ["2", None, 1.5, True, [], {}])
def test_a_malformed_number_of_matching_items_requires_nothing(limit: str, malformed: Any) -> None:
    schema = {"contains": {"const": 1}, limit: malformed}
    assert violations([1, 1], schema, time_s=PLENTY_S) == []
    assert violations([2], schema, time_s=PLENTY_S) == ["#/contains"], "which still requires one"


@settings(max_examples=200, deadline=None)
@given(schema=VALUES, value=VALUES)
@example(schema={"a": [None], "b": 1}, value={"a": 1})
@example(schema=[True], value=None)
def test_no_schema_raises(schema: Any, value: Any) -> None:
    assert isinstance(violations(value, schema), list)


def test_hostile_schemas_are_given_up() -> None:
    assert isinstance(violations("x" * 5000, {"pattern": "(x+x+)+y"}), list)
    wide = {"anyOf": [{"$ref": "#"}] * 50}
    assert violations(1, wide) == []
    endless = {"allOf": [{"$ref": "#"}, {"$ref": "#"}]}
    assert violations(1, endless) == []
    assert violations(1, {"pattern": 5, "minimum": "x", "required": 3, "enum": 1}) == []
    assert violations("x", {"$ref": "https://example.com/schema"}) == []


# --- calls ---------------------------------------------------------------------------------


def test_calls_are_checked_when_the_reply_ends() -> None:
    tool = Tool("look", "", {"properties": {"at": {"not": {"const": "sun"}}}}, param="tools[3]")
    check = CallCheck([tool])
    assert check.see([ToolCallStarted(0, 0, "a", "look"), ToolCallDelta(0, 0, '{"at": ')]) == []
    assert check.see([ToolCallDelta(0, 0, '"sun"}'), ToolCallStarted(0, 1, "b", "else")]) == []
    assert check.see([ToolCallDelta(0, 1, "{}"), ChoiceFinished(0, "tool_calls")]) == [
        "tools[3]: a call of look violates #/properties/at/not"
    ]
    cut = CallCheck([tool])
    events = [ToolCallStarted(0, 0, "a", "look"), ToolCallDelta(0, 0, '{"at": "su')]
    assert cut.see([*events, ChoiceFinished(0, "length")]) == []
