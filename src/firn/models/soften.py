"""A JSON schema without what cannot be enforced: as little as possible is taken out, and named.

Each cut asks the compiler many times, so the search has an end: schemas come from anybody.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from firn.core.values import SoftenedSchema
from firn.models.schema_faults import FaultOf, is_endless, locate, resolve

MAX_CUTS = 64
ANYTHING: Mapping[str, Any] = {"type": "object"}
SHAPE = ("type", "properties", "items", "required", "enum", "const", "$ref", "anyOf", "allOf")
"""What says most about a value is taken out last."""
SILENT = frozenset({"format"})
"""An annotation to those who do not know it."""
_SHARED = ("$defs", "definitions")


class OutOfTime(Exception):
    """The search was given up."""


def soften(
    schema: Mapping[str, Any],
    fault_of: FaultOf,
    *,
    time_s: float,
    clock: Callable[[], float] = time.thread_time,
) -> SoftenedSchema:
    """`fault_of` says what is wrong with a schema, "" if nothing. Raises OutOfTime."""
    until = clock() + time_s

    def look(part: Any) -> str:
        if clock() > until:
            raise OutOfTime
        return fault_of(part)

    if is_endless(schema):
        return SoftenedSchema(ANYTHING, ("#",))
    current: Any = schema
    left_out: list[str] = []
    for _ in range(MAX_CUTS):
        fault = look(current)
        if not fault:
            return SoftenedSchema(current, tuple(left_out))
        pointer, fault = locate(current, fault, look)
        current, keyword = _without_fault(current, pointer, fault, look)
        if keyword not in SILENT:
            left_out.append(f"#{pointer}/{keyword}" if keyword else f"#{pointer}")
    return SoftenedSchema(ANYTHING, ("#",))


def _without_fault(root: Any, pointer: str, fault: str, fault_of: FaultOf) -> tuple[Any, str]:
    """The schema less one keyword of the part at `pointer`, or less all of that part; which one."""
    part = resolve(f"#{pointer}", root)
    if not isinstance(part, dict):
        return ANYTHING, ""
    shared = {k: root[k] for k in _SHARED if k in root}
    found: tuple[Any, str] = ({}, "")
    for keyword in sorted(part, key=lambda k: (k in SHAPE, k in _SHARED, k)):
        trial = {k: v for k, v in part.items() if k != keyword}
        if keyword == "oneOf" and "anyOf" not in part:
            trial["anyOf"] = part["oneOf"]
        now = fault_of({**shared, **trial})
        if not now:
            found = (trial, keyword)
            break
        if now != fault and not found[1]:
            found = (trial, keyword)
    return _replaced(root, pointer.split("/")[1:], found[0]), found[1]


def _replaced(node: Any, path: list[str], value: Any) -> Any:
    """A copy of the schema with another part at this path."""
    if not path:
        return value
    step = path[0].replace("~1", "/").replace("~0", "~")
    if isinstance(node, list):
        i = int(step)
        return [*node[:i], _replaced(node[i], path[1:], value), *node[i + 1 :]]
    return {**node, step: _replaced(node[step], path[1:], value)}
