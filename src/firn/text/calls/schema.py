"""Gives arguments the types of a tool's JSON schema. A string stays a string; nothing here raises."""

from __future__ import annotations

import ast
import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from firn.core.values import Tool

ANY: frozenset[str] = frozenset()
"""The schema does not specify a type."""

_INTEGER = re.compile(r"[+-]?\d+")
_LITERAL_FAULTS = (ValueError, SyntaxError, MemoryError, RecursionError, TypeError)
_MAX_DEPTH = 16


class ToolSchemas:
    """The schemas of one request's tools, by name. Immutable."""

    def __init__(self, tools: Sequence[Tool] = ()) -> None:
        self.tools = tuple(tools)
        self._parameters = {tool.name: tool.parameters for tool in tools}

    def __contains__(self, name: str) -> bool:
        return name in self._parameters

    def keys(self, tool: str) -> Sequence[str]:
        """The names of the declared arguments."""
        schema = self._parameters.get(tool)
        properties = schema.get("properties") if isinstance(schema, Mapping) else None
        return list(properties) if isinstance(properties, Mapping) else []

    def schema(self, tool: str, key: str) -> tuple[Any, Mapping[str, Any]]:
        """(an argument's schema, None if it is not declared; the schema that its references are of)"""
        root = self._parameters.get(tool)
        root = root if isinstance(root, Mapping) else {}
        properties = root.get("properties")
        return (properties.get(key) if isinstance(properties, Mapping) else None), root

    def types(self, tool: str, key: str) -> frozenset[str]:
        """The JSON types that an argument may have; ANY if the schema does not specify any."""
        return types_of(*self.schema(tool, key))

    def coerce(self, tool: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        return {k: coerce(v, self.types(tool, k)) for k, v in arguments.items()}

    def read(self, tool: str, key: str, text: str) -> Any:
        """The value of an argument that is written without quotes."""
        return from_text(text, self.types(tool, key))


def types_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> frozenset[str]:
    """Every type that `type`, `enum`, `const`, a reference or a union allows."""
    if not isinstance(schema, Mapping) or depth > _MAX_DEPTH:
        return ANY
    declared = schema.get("type")
    if isinstance(declared, str):
        return frozenset({declared})
    if isinstance(declared, list):
        return frozenset(t for t in declared if isinstance(t, str))
    if "const" in schema:
        return frozenset({type_of(schema["const"])})
    if isinstance(schema.get("enum"), list):
        return frozenset(map(type_of, schema["enum"]))
    if isinstance(schema.get("$ref"), str):
        return types_of(resolve_reference(schema["$ref"], root), root, depth + 1)
    for union in ("anyOf", "oneOf", "allOf"):
        if isinstance(schema.get(union), list):
            options = [types_of(s, root, depth + 1) for s in schema[union]]
            known = [types for types in options if types]
            if known and (union == "allOf" or len(known) == len(options)):
                return frozenset().union(*known)
    if "properties" in schema:
        return frozenset({"object"})
    return ANY


def resolved(schema: Any, root: Mapping[str, Any]) -> Any:
    """The schema itself, or what its chain of references ends at."""
    for _ in range(_MAX_DEPTH):
        if not isinstance(schema, Mapping) or not isinstance(schema.get("$ref"), str):
            break
        schema = resolve_reference(schema["$ref"], root)
    return schema


def coerce(value: Any, types: frozenset[str]) -> Any:
    """A parsed value, converted to the schema's type if that loses nothing."""
    if not types:
        return value
    if isinstance(value, str):
        return value if "string" in types else from_text(value, types)
    if types == {"string"} and isinstance(value, bool | int | float):
        return json.dumps(value)
    return value


def from_text(text: str, types: frozenset[str]) -> Any:
    """The value of a text that is written without quotes."""
    if types == {"string"}:
        return text
    if not types or "string" in types:  # it may be a string: "007" is one, 7 is not
        value = _strict_json(text)
        if value is _UNREADABLE:
            value = _container(text)
        return value if value is not _UNREADABLE and _fits(value, types) else text
    bare = text.strip()
    for kind in ("null", "boolean", "integer", "number"):
        if kind in types:
            value = _READERS[kind](bare)
            if value is not _UNREADABLE:
                return value
    value = _strict_json(bare)
    if value is _UNREADABLE:
        value = _container(bare)
    return text if value is _UNREADABLE else value


# --- readers: a value, or _UNREADABLE ------------------------------------------------------

_UNREADABLE = object()


def _null(text: str) -> Any:
    return None if text in ("null", "None") else _UNREADABLE


def _boolean(text: str) -> Any:
    return {"true": True, "false": False}.get(text.lower(), _UNREADABLE)


def _integer(text: str) -> Any:
    if _INTEGER.fullmatch(text) and len(text) < 4000:
        return int(text)
    value = _strict_json(text)
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return _UNREADABLE


def _number(text: str) -> Any:
    value = _strict_json(text)
    return value if isinstance(value, int | float) and not isinstance(value, bool) else _UNREADABLE


_READERS = {
    "null": _null,
    "boolean": _boolean,
    "integer": _integer,
    "number": _number,
}


def _container(text: str) -> Any:
    """An object or array that is almost JSON: with raw line breaks, or Python's quotes and words."""
    if text[:1] not in ("{", "["):
        return _UNREADABLE
    try:
        return json.loads(text, strict=False, parse_constant=_refuse, parse_float=_finite)
    except _LITERAL_FAULTS:
        pass
    try:
        value = ast.literal_eval(text)
        json.dumps(value, allow_nan=False)
    except _LITERAL_FAULTS:
        return _UNREADABLE
    return value


def _strict_json(text: str) -> Any:
    try:
        return json.loads(text, parse_constant=_refuse, parse_float=_finite)
    except _LITERAL_FAULTS:
        return _UNREADABLE


def _finite(number: str) -> float:
    """1e999 is JSON, but the infinity that Python makes of it cannot be written as JSON again."""
    value = float(number)
    return value if math.isfinite(value) else _refuse(number)


def _refuse(constant: str) -> NoReturn:
    raise ValueError(constant)


def _fits(value: Any, types: frozenset[str]) -> bool:
    kind = type_of(value)
    return not types or kind in types or (kind == "integer" and "number" in types)


def type_of(value: Any) -> str:
    """The name of this value's type in a JSON schema."""
    if value is None:
        return "null"
    for kind, name in ((bool, "boolean"), (int, "integer"), (float, "number"), (str, "string")):
        if isinstance(value, kind):
            return name
    return "object" if isinstance(value, Mapping) else "array"


def resolve_reference(reference: str, root: Mapping[str, Any]) -> Any:
    """What a reference into the schema points at; None if it points at nothing there."""
    node: Any = root
    for step in reference.removeprefix("#").strip("/").split("/") if reference != "#" else ():
        if isinstance(node, list):
            is_index = step.isdecimal() and len(step) < 10  # int() refuses thousands of digits
            node = node[int(step)] if is_index and int(step) < len(node) else None
        elif isinstance(node, Mapping):
            node = node.get(step.replace("~1", "/").replace("~0", "~"))
        else:
            return None
    return node
