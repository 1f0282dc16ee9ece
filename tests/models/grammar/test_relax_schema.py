"""What llguidance cannot enforce is taken out of a schema, and nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest

from firn.core.values import Grammar
from tests.text.grammar_walks import compiler

LOOK_AHEAD = {"type": "string", "pattern": "^(?!x).*$"}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]] = {
    "nothing": ({"type": "object"}, {"type": "object"}, ()),
    "a pattern, required": (
        {"type": "object", "properties": {"a": LOOK_AHEAD}, "required": ["a"]},
        {"type": "object", "properties": {"a": {"type": "string"}}, "required": ["a"]},
        ("#/properties/a/pattern",),
    ),
    "several": (
        {"type": "object", "not": {}, "dependentRequired": {"a": ["b"]}, "minProperties": 1},
        {"type": "object", "minProperties": 1},
        ("#/dependentRequired", "#/not"),
    ),
    "either as any": (
        {"oneOf": [{"type": "object", "properties": {"a": {}}}, {"type": "object"}]},
        {"anyOf": [{"type": "object", "properties": {"a": {}}}, {"type": "object"}]},
        ("#/oneOf",),
    ),
    "deep, in lists": (
        {"anyOf": [{"type": "array", "items": {"allOf": [{"type": "array", "contains": {}}]}}]},
        {"anyOf": [{"type": "array", "items": {"allOf": [{"type": "array"}]}}]},
        ("#/anyOf/0/items/allOf/0/contains",),
    ),
    "by reference": (
        {"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {"uniqueItems": True}}},
        {"properties": {"a": {"$ref": "#/$defs/x"}}, "$defs": {"x": {}}},
        ("#/$defs/x/uniqueItems",),
    ),
    "odd names": (
        {"properties": {"a/b~c": {"type": "string", "pattern": "(x)\\1"}}},
        {"properties": {"a/b~c": {"type": "string"}}},
        ("#/properties/a~1b~0c/pattern",),
    ),
    "an unknown format is an annotation": (
        {"properties": {"a": {"type": "string", "format": "postcode"}}},
        {"properties": {"a": {"type": "string"}}},
        (),
    ),
    "true for a schema": (
        {"not": True, "contains": True, "if": True, "then": {"const": 1}, "type": "array"},
        {"type": "array"},
        ("#/contains", "#/if", "#/not"),
    ),
    "what asks for nothing is not told": (
        {
            "not": False,
            "if": {},
            "uniqueItems": False,
            "propertyNames": {},
            "type": "array",
            "unevaluatedProperties": True,
            "dependentRequired": {},
        },
        {"type": "array"},
        (),
    ),
    "endless": (
        {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
        {"type": "object"},
        ("#",),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_only_what_cannot_be_enforced_is_left_out(case: str) -> None:
    schema, left, places = CASES[case]
    [relaxed] = compiler("json_tags").relax([schema])
    assert relaxed.schema == left
    assert relaxed.left_out + relaxed.faulty == places


@pytest.mark.parametrize(
    "schema", [{"type": 5}, {"properties": {"a": 5}}, {"required": "a"}, {"$ref": "https://x.y/z"}]
)
def test_what_is_left_can_always_be_enforced(schema: dict[str, Any]) -> None:
    made = compiler("json_tags")
    [relaxed] = made.relax([schema])
    assert relaxed.faulty
    made.compile(Grammar("json_schema", json.dumps(relaxed.schema)))
