"""A JSON schema without what cannot be enforced: leaves out as little as possible, and names it.

Each cut calls the compiler many times, and anyone may send a schema, so the search is bounded.
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
"""Keywords that constrain a value the most; they are left out last."""
SILENT = frozenset({"format"})
"""Left out without being named: a JSON Schema validator may ignore formats it does not know."""
_SHARED = ("$defs", "definitions")


class OutOfTime(Exception):
    """The search took too long."""


def soften(
    schema: Mapping[str, Any],
    fault_of: FaultOf,
    *,
    time_s: float,
    clock: Callable[[], float] = time.thread_time,
) -> SoftenedSchema:
    """`fault_of` returns what is wrong with a schema, "" if nothing. Raises OutOfTime."""
    until = clock() + time_s

    def timed_fault_of(part: Any) -> str:
        if clock() > until:
            raise OutOfTime
        return fault_of(part)

    if is_endless(schema):
        return SoftenedSchema(ANYTHING, ("#",))
    current: Any = schema
    left_out: list[str] = []
    for _ in range(MAX_CUTS):
        fault = timed_fault_of(current)
        if not fault:
            return SoftenedSchema(current, tuple(left_out))
        pointer, fault = locate(current, fault, timed_fault_of)
        current, keyword = _without_fault(current, pointer, fault, timed_fault_of)
        if keyword not in SILENT:
            left_out.append(f"#{pointer}/{keyword}" if keyword else f"#{pointer}")
    return SoftenedSchema(ANYTHING, ("#",))


def _without_fault(root: Any, pointer: str, fault: str, fault_of: FaultOf) -> tuple[Any, str]:
    """The schema without one keyword of the part at `pointer`, and that keyword; or, if no keyword
    helps, without the whole part, and ""."""
    part = resolve(f"#{pointer}", root)
    if not isinstance(part, dict):
        return ANYTHING, ""
    shared = {k: root[k] for k in _SHARED if k in root}
    best: tuple[Any, str] = ({}, "")
    for keyword in sorted(part, key=lambda k: (k in SHAPE, k in _SHARED, k)):
        trial = {k: v for k, v in part.items() if k != keyword}
        if keyword == "oneOf" and "anyOf" not in part:
            trial["anyOf"] = part["oneOf"]
        remaining = fault_of({**shared, **trial})
        if not remaining:
            best = (trial, keyword)
            break
        if remaining != fault and not best[1]:
            best = (trial, keyword)
    return _replaced(root, pointer.split("/")[1:], best[0]), best[1]


def _replaced(node: Any, path: list[str], value: Any) -> Any:
    """A copy of the schema with another part at this path."""
    if not path:
        return value
    step = path[0].replace("~1", "/").replace("~0", "~")
    if isinstance(node, list):
        i = int(step)
        return [*node[:i], _replaced(node[i], path[1:], value), *node[i + 1 :]]
    return {**node, step: _replaced(node[step], path[1:], value)}
