from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from firn.core.values import Tool
from firn.text.calls.schema import ANY, ToolSchemas, coerce, from_text, types_of


def kinds(*names: str) -> frozenset[str]:
    return frozenset(names)


FROM_TEXT: list[tuple[str, frozenset[str], Any]] = [
    ("007", kinds("string"), "007"),
    ("7", kinds("string"), "7"),
    ("null", kinds("string"), "null"),
    ("true", kinds("string"), "true"),
    (" padded ", kinds("string"), " padded "),
    ('{"a": 1}', kinds("string"), '{"a": 1}'),
    ("7", kinds("integer"), 7),
    ("007", kinds("integer"), 7),
    (" 7\n", kinds("integer"), 7),
    ("7.0", kinds("integer"), 7),
    ("12345678901234567890123", kinds("integer"), 12345678901234567890123),
    ("7.5", kinds("integer"), 7.5),
    ("seven", kinds("integer"), "seven"),
    ("7", kinds("number"), 7),
    ("7.5", kinds("number"), 7.5),
    ("-1e3", kinds("number"), -1000.0),
    ("NaN", kinds("number"), "NaN"),
    ("1e999", kinds("number"), "1e999"),
    ("[1e999]", kinds("array"), "[1e999]"),
    ('{"a": -1e999}', ANY, '{"a": -1e999}'),
    ('{"a": "x\ny", "b": 1e999}', kinds("object"), '{"a": "x\ny", "b": 1e999}'),
    ("true", kinds("boolean"), True),
    ("False", kinds("boolean"), False),
    ("yes", kinds("boolean"), "yes"),
    ("1", kinds("boolean"), 1),
    ("null", kinds("null"), None),
    ("null", kinds("integer", "null"), None),
    ("None", kinds("integer", "null"), None),
    ("null", kinds("string", "null"), None),
    ("none of them", kinds("string", "null"), "none of them"),
    ("7", kinds("string", "integer"), 7),
    ("7", kinds("string", "number"), 7),
    ("007", kinds("string", "integer"), "007"),
    ("7", kinds("string", "null"), "7"),
    ('{"a": [1]}', kinds("object"), {"a": [1]}),
    ("{'a': True}", kinds("object"), {"a": True}),
    ('{"a": "x\ny"}', kinds("object"), {"a": "x\ny"}),
    ("[1, 2", kinds("array"), "[1, 2"),
    ("[1, 2]", kinds("array"), [1, 2]),
    ("hello", ANY, "hello"),
    ("007", ANY, "007"),
    ("7", ANY, 7),
    ("true", ANY, True),
    ('["a"]', ANY, ["a"]),
    ("[" * 5000, kinds("array"), "[" * 5000),
]


@pytest.mark.parametrize(("text", "types", "value"), FROM_TEXT)
def test_a_text_becomes_a_value_of_the_schemas_type(
    text: str, types: frozenset[str], value: Any
) -> None:
    got = from_text(text, types)
    assert got == value
    assert type(got) is type(value)


@given(st.text(), st.frozensets(st.sampled_from(["string", "integer", "object", "null", "odd"])))
@example("NaN", frozenset())
@example("-Infinity", frozenset({"number"}))
@example("[1e999]", frozenset({"array"}))
@example("{'a': {1}}", frozenset({"object"}))
@example("{1: 2}", frozenset({"object"}))
@example("9" * 5000, frozenset({"integer"}))
def test_any_text_gives_a_value_that_is_json(text: str, types: frozenset[str]) -> None:
    json.dumps(from_text(text, types), allow_nan=False)


@given(st.text())
@example("007")
@example("null")
@example(' {"a": 1}\n')
def test_a_string_stays_a_string(text: str) -> None:
    assert from_text(text, kinds("string")) == text
    assert coerce(text, kinds("string")) == text


COERCE: list[tuple[Any, frozenset[str], Any]] = [
    ("5", kinds("integer"), 5),
    ("5", kinds("string"), "5"),
    (5, kinds("string"), "5"),
    (True, kinds("string"), "true"),
    (None, kinds("string"), None),
    ({"a": 1}, kinds("string"), {"a": 1}),
    ("[1]", kinds("array"), [1]),
    (5, kinds("integer"), 5),
    (5, kinds("string", "integer"), 5),
    (True, kinds("string", "boolean"), True),
    ("x", ANY, "x"),
]


@pytest.mark.parametrize(("value", "types", "result"), COERCE)
def test_a_value_of_another_type_is_coerced_if_nothing_is_lost(
    value: Any, types: frozenset[str], result: Any
) -> None:
    got = coerce(value, types)
    assert got == result
    assert type(got) is type(result)


ROOT = {
    "$defs": {
        "size": {"enum": ["s", "m"]},
        "a/b": {"type": "integer"},
        "loop": {"$ref": "#/$defs/loop"},
        "either": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    }
}
TYPES: list[tuple[Any, frozenset[str]]] = [
    ({"type": "string"}, kinds("string")),
    ({"type": ["string", "null"]}, kinds("string", "null")),
    ({"enum": ["a", 1, None, 1.5, True]}, kinds("string", "integer", "null", "number", "boolean")),
    ({"const": [1]}, kinds("array")),
    ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, kinds("string", "integer")),
    ({"anyOf": [{"type": "string"}, {}]}, ANY),
    ({"allOf": [{"type": "string"}, {"minLength": 1}]}, kinds("string")),
    ({"$ref": "#/$defs/size"}, kinds("string")),
    ({"$ref": "#/$defs/a~1b"}, kinds("integer")),
    ({"$ref": "#/$defs/loop"}, ANY),
    ({"$ref": "#/$defs/either/anyOf/1"}, kinds("null")),
    ({"$ref": "#/$defs/either/anyOf/2"}, ANY),
    ({"$ref": "#/$defs/either/anyOf/²"}, ANY),
    ({"$ref": "#/$defs/either/anyOf/" + "9" * 5000}, ANY),
    ({"$ref": "#/nowhere/at/all"}, ANY),
    ({"properties": {}}, kinds("object")),
    ({}, ANY),
    (True, ANY),
    (None, ANY),
]


@pytest.mark.parametrize(("schema", "types"), TYPES)
def test_every_type_that_a_schema_allows_is_known(schema: Any, types: frozenset[str]) -> None:
    assert types_of(schema, ROOT) == types


@pytest.mark.parametrize(
    "parameters", [{}, {"properties": None}, {"properties": {"x": None}}, None]
)
def test_a_tool_with_an_odd_schema_says_nothing(parameters: Any) -> None:
    schemas = ToolSchemas((Tool("f", parameters=parameters),))
    assert schemas.types("f", "x") == ANY
    assert schemas.types("g", "x") == ANY
    assert "f" in schemas
    assert "g" not in schemas
