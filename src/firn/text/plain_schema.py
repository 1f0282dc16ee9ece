"""Tools for templates that read only the plainest JSON schemas. Pure.

Templates loop over the properties of a schema and look up types in tables of their own. Some fail on
an object without properties, on a list of types, or on a parameter that has no type or description.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from firn.core.values import Tool

_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "boolean": bool,
    "integer": int,
    "number": float,
    "string": str,
    "array": (list, tuple),
    "object": Mapping,
}
"""The types of JSON but null, with their values in Python. bool comes first: it is an int, too."""


def with_plain_schema(tool: Tool) -> Tool:
    """The tool with a schema in which every level has the members that templates look for."""
    return replace(tool, parameters=_plain({"type": "object", **tool.parameters}))


def _plain(schema: Any) -> dict[str, Any]:
    known = schema if isinstance(schema, Mapping) else {}  # true takes anything
    kind = _kind(known)
    plain = {**known, "type": kind, "description": str(known.get("description") or "")}
    if kind == "object":
        inner = known.get("properties")
        properties = inner if isinstance(inner, Mapping) else {}
        plain["properties"] = {name: _plain(schema) for name, schema in properties.items()}
        plain["additionalProperties"] = _plain(known.get("additionalProperties"))
    if kind == "array":
        items = known.get("items")
        plain["items"] = _plain(items[0] if isinstance(items, list) and items else items)
    return plain


def _kind(schema: Mapping[str, Any]) -> str:
    """One of `_TYPES`: what the schema says, the first of several, or what its members suggest."""
    said = schema.get("type")
    for kind in said if isinstance(said, list) else [said]:
        if isinstance(kind, str) and kind in _TYPES:
            return kind
    for branches in ("anyOf", "oneOf", "allOf"):
        listed = schema.get(branches)
        for branch in listed if isinstance(listed, list) else []:
            if isinstance(branch, Mapping) and branch.get("type") in _TYPES:
                return str(branch["type"])
    if "properties" in schema:
        return "object"
    if "items" in schema:
        return "array"
    values = schema.get("enum")
    value = values[0] if isinstance(values, list) and values else schema.get("const", "")
    return next((kind for kind, types in _TYPES.items() if isinstance(value, types)), "string")
