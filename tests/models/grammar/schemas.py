"""JSON schemas of all kinds, each with a finite value that a few hundred tokens can hold."""

from __future__ import annotations

from typing import Any

WORD = {"type": "string", "maxLength": 12}
PERSON = {
    "type": "object",
    "properties": {"name": WORD, "age": {"type": "integer", "minimum": 0, "maximum": 130}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def closed(required: list[str] | None = None, **properties: Any) -> dict[str, Any]:
    """An object with these members, all required unless told otherwise, and no others."""
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties) if required is None else required,
        "additionalProperties": False,
    }


def array(items: Any, low: int, high: int) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": low, "maxItems": high}


TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": closed(
            ["value"],
            value={"type": "integer", "minimum": 0, "maximum": 9},
            children=array({"$ref": "#/$defs/node"}, 0, 2),
        )
    },
}
EXPRESSION = {
    "$ref": "#/definitions/expr",
    "definitions": {
        "expr": {
            "anyOf": [
                {"type": "integer", "minimum": 0, "maximum": 99},
                {"$ref": "#/definitions/sum"},
            ]
        },
        "sum": closed(left={"$ref": "#/definitions/expr"}, right={"$ref": "#/definitions/expr"}),
    },
}

SCHEMAS: dict[str, Any] = {
    # --- scalars
    "null": {"type": "null"},
    "boolean": {"type": "boolean"},
    "integer": {"type": "integer", "minimum": -1000, "maximum": 1000},
    "integer from": {"type": "integer", "minimum": 7, "maximum": 70000},
    "integer below": {"type": "integer", "minimum": -99, "exclusiveMaximum": -3},
    "integer between": {"type": "integer", "exclusiveMinimum": 17, "exclusiveMaximum": 19},
    "number": {"type": "number", "minimum": 0, "maximum": 1},
    "number above": {"type": "number", "exclusiveMinimum": -2.5, "maximum": 2.5},
    "multiple": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 700},
    "string": WORD,
    "string lengths": {"type": "string", "minLength": 3, "maxLength": 5},
    "empty string": {"type": "string", "maxLength": 0},
    "pattern": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{3}$"},
    "pattern inside": {"type": "string", "pattern": "b+", "maxLength": 10},
    "pattern and lengths": {"type": "string", "pattern": "^[ab]+$", "minLength": 4, "maxLength": 6},
    "pattern of alternatives": {"type": "string", "pattern": "^(red|green|blue)$"},
    "pattern with slashes": {"type": "string", "pattern": "^/v[0-9]/[a-z]{2,5}/$"},
    "pattern of classes": {"type": "string", "pattern": r"^\d{2}\s\w{2}$"},
    "date": {"type": "string", "format": "date"},
    "time": {"type": "string", "format": "time"},
    "date-time": {"type": "string", "format": "date-time"},
    "uuid": {"type": "string", "format": "uuid"},
    "ipv4": {"type": "string", "format": "ipv4"},
    "email": {"type": "string", "format": "email", "maxLength": 24},
    "enum": {"enum": ["north", "south", "east", "west"]},
    "enum of kinds": {"enum": ["one", 2, 3.5, None, True, ["x"], {"y": 1}]},
    "enum in other scripts": {
        "enum": ["雪", "снег", "neige ❄️", "schnee\n", 'quo"ted', "back\\slash"]
    },
    "enum of hundreds": {"enum": [f"item-{i:04d}" for i in range(600)]},
    "enum of markup": {"enum": ["<tool_call>", "</think>", "<|im_end|> and on"]},
    "const": {"const": "exactly this"},
    "const object": {"const": {"a": [1, 2, {"b": None}]}},
    "typed enum": {"type": "integer", "enum": [1, 2, 3]},
    # --- arrays
    "array": array({"type": "boolean"}, 0, 4),
    "array of three": array({"type": "integer", "minimum": 0, "maximum": 9}, 3, 3),
    "array at least": array(WORD, 2, 4),
    "empty array": array({}, 0, 0),
    "tuple": {
        "type": "array",
        "prefixItems": [{"type": "integer", "minimum": 0, "maximum": 9}, WORD],
        "items": False,
        "minItems": 2,
    },
    "tuple and more": {
        "type": "array",
        "prefixItems": [{"type": "boolean"}],
        "items": {"type": "null"},
        "minItems": 1,
        "maxItems": 3,
    },
    "array of arrays": array(array({"type": "boolean"}, 1, 2), 1, 2),
    # --- objects
    "object": PERSON,
    "optional members": closed([], a={"type": "boolean"}, b={"type": "null"}, c={"const": 1}),
    "some required": closed(["b"], a={"type": "boolean"}, b={"type": "boolean"}),
    "no members": closed(),
    "nested": closed(who=PERSON, where=closed(city=WORD, tags=array(WORD, 0, 2))),
    "deep": closed(a=closed(b=closed(c=closed(d=closed(e={"type": "boolean"}))))),
    "any further members": {
        "type": "object",
        "properties": {"id": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["id"],
        "additionalProperties": {"type": "boolean"},
        "maxProperties": 3,
    },
    "a map": {
        "type": "object",
        "additionalProperties": {"type": "integer", "minimum": 0, "maximum": 9},
        "minProperties": 1,
        "maxProperties": 2,
    },
    "members by pattern": {
        "type": "object",
        "patternProperties": {"^x_[a-z]{1,3}$": {"type": "boolean"}},
        "additionalProperties": False,
        "minProperties": 1,
        "maxProperties": 2,
    },
    "names to escape": closed(**{'a "b"': {"const": 1}, "ü\n": {"const": 2}, "$ref": {"const": 3}}),
    "many members": closed(**{f"field_{i}": {"type": "boolean"} for i in range(12)}),
    # --- unions
    "any of": {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 9}, {"type": "null"}, WORD]},
    "any of objects": {"anyOf": [PERSON, closed(kind={"const": "none"})]},
    "one of": {"oneOf": [{"type": "boolean"}, {"type": "null"}]},
    "one of by kind": {
        "oneOf": [
            closed(
                kind={"const": "circle"}, radius={"type": "integer", "minimum": 1, "maximum": 99}
            ),
            closed(kind={"const": "square"}, side={"type": "integer", "minimum": 1, "maximum": 99}),
        ]
    },
    "all of": {"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 8}]},
    "all of objects": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]},
            {"properties": {"b": {"type": "null"}}, "required": ["b"]},
        ]
    },
    "nullable": closed(note={"type": ["string", "null"], "maxLength": 6}),
    "nullable by union": closed(note={"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]})
    | {"$defs": {"n": {"type": "integer", "minimum": 0, "maximum": 9}}},
    "list of types": {"type": ["boolean", "integer", "null"], "minimum": 0, "maximum": 50},
    "union of arrays": {"anyOf": [array({"type": "boolean"}, 1, 2), array({"type": "null"}, 1, 2)]},
    # --- references
    "reference": closed(who={"$ref": "#/$defs/person"}) | {"$defs": {"person": PERSON}},
    "references to references": {
        "$ref": "#/$defs/a",
        "$defs": {
            "a": closed(b={"$ref": "#/$defs/b"}),
            "b": array({"$ref": "#/$defs/c"}, 1, 2),
            "c": {"enum": ["x", "y"]},
        },
    },
    "reference with siblings": {
        "$ref": "#/$defs/n",
        "maximum": 5,
        "$defs": {"n": {"type": "integer", "minimum": 2}},
    },
    "reference into properties": closed(
        a={"type": "integer", "minimum": 0, "maximum": 9}, b={"$ref": "#/properties/a"}
    ),
    "escaped reference": {
        "$ref": "#/$defs/a~1b~0c",
        "$defs": {"a/b~c": {"enum": ["found"]}},
    },
    "recursion": TREE,
    "recursion through two": EXPRESSION,
    "linked list": {
        "$ref": "#/$defs/link",
        "$defs": {
            "link": closed(
                value={"type": "boolean"},
                next={"anyOf": [{"type": "null"}, {"$ref": "#/$defs/link"}]},
            )
        },
    },
    # --- as people send them
    "annotations": {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Reading",
        "description": "One reading of a sensor.",
        "examples": [{"value": 1}],
        **closed(value={"type": "integer", "default": 4, "minimum": 0, "maximum": 9, "title": "V"}),
    },
    "pydantic": {
        "$defs": {
            "Color": {"enum": ["red", "green"], "title": "Color", "type": "string"},
            "Item": {
                "properties": {
                    "color": {"$ref": "#/$defs/Color"},
                    "price": {"maximum": 100.0, "minimum": 0.0, "title": "Price", "type": "number"},
                    "note": {"anyOf": [WORD, {"type": "null"}], "default": None, "title": "Note"},
                },
                "required": ["color", "price"],
                "title": "Item",
                "type": "object",
                "additionalProperties": False,
            },
        },
        "properties": {
            "items": {
                "items": {"$ref": "#/$defs/Item"},
                "maxItems": 2,
                "title": "Items",
                "type": "array",
            }
        },
        "required": ["items"],
        "title": "Order",
        "type": "object",
        "additionalProperties": False,
    },
    "anything in a box": closed(
        ok={"type": "boolean"}, data={"anyOf": [{"type": "boolean"}, closed()]}
    ),
}
