"""A JSON schema without what no grammar can enforce: leaves out as little as possible, and names it.

First the keywords that llguidance does not have, and its unsupported expressions, formats and
unions; then, one after the other, what else it refuses. Anyone may send a schema, so the search is
bounded.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import Any

from firn.models.grammar.schema_faults import (
    UNSATISFIABLE,
    FaultOf,
    is_endless,
    locate,
    places,
    resolve,
)
from firn.models.grammar.source import fault_of

UNENFORCED = frozenset(
    {"not", "if", "uniqueItems", "contains", "propertyNames", "dependentRequired", "dependentSchemas",
     "dependencies", "unevaluatedItems", "unevaluatedProperties", "$dynamicRef", "$recursiveRef"}
)  # fmt: skip
SILENT = frozenset(
    {"then", "else", "minContains", "maxContains", "$dynamicAnchor", "$recursiveAnchor"}
)
"""Not enforced either; they mean nothing without one of the others."""
SHAPE = ("type", "properties", "items", "required", "enum", "const", "$ref", "anyOf", "allOf")
"""Keywords that constrain a value the most; they are left out last."""
MAX_CUTS = 64
ANYTHING: Mapping[str, Any] = {"type": "object"}


class OutOfTime(Exception):
    """The search took too long."""


def relax(schema: Any, *, until: float, clock: Callable[[], float] = time.thread_time) -> Relaxed:
    """until: on the clock. A schema that takes longer is not enforced at all."""
    known: dict[str, str] = {}

    def schema_fault(part: Any) -> str:
        if clock() > until:
            raise OutOfTime
        text = json.dumps(part)
        if text not in known:
            known[text] = fault_of({"json_schema": part})
        return known[text]

    if is_endless(schema):
        return ANYTHING, [], ["#"]
    try:
        if not schema_fault(schema):
            return schema, [], []
        return _Relaxing(schema, schema_fault).result()
    except OutOfTime:
        return ANYTHING, ["#"], []


Relaxed = tuple[Any, list[str], list[str]]
"""The schema; pointers to what cannot be enforced; pointers to what is malformed or contradictory."""


class _Relaxing:
    """Owner: one call of `relax`. Changes a copy of the schema in place."""

    def __init__(self, schema: Any, schema_fault: FaultOf) -> None:
        self._root = json.loads(json.dumps(schema))
        self._schema_fault = schema_fault
        self._left_out: list[str] = []
        self._faulty: list[str] = []

    @property
    def _shared(self) -> dict[str, Any]:
        return {k: self._root[k] for k in ("$defs", "definitions") if k in self._root}

    def result(self) -> Relaxed:
        nodes = list(places(self._root))
        for pointer, node in nodes:
            self._without_unenforced(pointer, node)
        for pointer, node in reversed(nodes):  # inner unions first
            self._without_one_of(pointer, node)
        for _ in range(MAX_CUTS):
            fault = self._schema_fault(self._root)
            if not fault:
                return self._root, sorted(self._left_out), self._faulty
            self._cut(*locate(self._root, fault, self._schema_fault))
        return ANYTHING, self._left_out, [*self._faulty, "#"]

    def _cut(self, pointer: str, fault: str) -> None:
        """Remove the keyword that has the fault, or else all of the part at `pointer`."""
        part = resolve(f"#{pointer}", self._root)
        if not isinstance(part, dict):
            self._root = ANYTHING
            self._faulty.append("#")
            return
        keyword = self._guilty(part, fault)
        if keyword is None:
            part.clear()
            self._faulty.append(f"#{pointer}")
            return
        alone = {**self._shared, keyword: part.pop(keyword)}
        is_faulty = fault.startswith(UNSATISFIABLE) or bool(self._schema_fault(alone))
        (self._faulty if is_faulty else self._left_out).append(f"#{pointer}/{keyword}")

    def _guilty(self, part: dict[str, Any], fault: str) -> str | None:
        """The keyword without which the part has no fault, or else another one."""
        best = None
        for keyword in sorted(part, key=lambda k: (k in SHAPE, k in self._shared, k)):
            rest = {k: v for k, v in part.items() if k != keyword}
            remaining = self._schema_fault({**self._shared, **rest})
            if not remaining:
                return keyword
            if remaining != fault and best is None:
                best = keyword
        return best

    def _without_unenforced(self, pointer: str, node: dict[str, Any]) -> None:
        dropped = {k: node.pop(k) for k in list(node) if k in UNENFORCED | SILENT}
        for keyword in UNENFORCED & dropped.keys():
            if not _asks_nothing(keyword, dropped):
                self._left_out.append(f"#{pointer}/{keyword}")
        if self._is_refused(node, "format"):  # validators may ignore formats that they do not know
            del node["format"]
        if self._is_refused(node, "pattern"):
            self._leave_out(pointer, node, "pattern")
        if isinstance(node.get("patternProperties"), dict):
            names = {"patternProperties": dict.fromkeys(node["patternProperties"], True)}
            if self._schema_fault({"type": "object", **names}):
                self._leave_out(pointer, node, "patternProperties")
                if node.get("additionalProperties", True) is not True:
                    self._leave_out(pointer, node, "additionalProperties")

    def _is_refused(self, node: dict[str, Any], keyword: str) -> bool:
        given = node.get(keyword)
        return isinstance(given, str) and bool(
            self._schema_fault({"type": "string", keyword: given})
        )

    def _without_one_of(self, pointer: str, node: dict[str, Any]) -> None:
        """Any of the options, if they are not known to exclude each other."""
        options = node.get("oneOf")
        if not isinstance(options, list) or not options:
            return
        if self._schema_fault({**self._shared, "oneOf": options}):
            self._leave_out(pointer, node, "oneOf")
            if "anyOf" not in node:
                node["anyOf"] = options
            elif isinstance(node.setdefault("allOf", []), list):
                node["allOf"].append({"anyOf": options})

    def _leave_out(self, pointer: str, node: dict[str, Any], keyword: str) -> None:
        del node[keyword]
        self._left_out.append(f"#{pointer}/{keyword}")


def _asks_nothing(keyword: str, given: Mapping[str, Any]) -> bool:
    """Whether every value has what this keyword asks for. given: the keywords of its place."""
    match keyword:
        case "uniqueItems" | "not":
            return given[keyword] is False
        case "if":
            return not {"then", "else"} & given.keys()
        case "contains":
            return False
        case _:
            return given[keyword] is True or given[keyword] == {}
