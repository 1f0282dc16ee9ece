"""How deep the compiler would recurse into a JSON schema: a stack overflow kills the whole server.

Pure. An upper bound, in linear time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from firn.models.schema_faults import resolve

MAX_DEPTH = 800
"""In levels. A stack of 8 MiB holds about 1700 of the costliest kind."""
TOO_DEEP = f"its references lead more than {MAX_DEPTH} levels deep"

_ROOT = "#"
_IDS = ("$id", "id")


def is_too_deep(schema: Any) -> bool:
    return isinstance(schema, dict) and _Depth(schema).bound() > MAX_DEPTH


class _Depth:
    """Owner: one call of `is_too_deep`. Places are the root and the targets of references."""

    def __init__(self, root: dict[str, Any]) -> None:
        self._places: dict[str, Any] = {_ROOT: root}
        self._height: dict[str, int] = {}
        self._leads: dict[str, set[str]] = {}
        refs, n_bases = _refs(root)
        self._n_unknown = 0
        for ref in refs:
            is_pointer = ref == _ROOT or ref.startswith("#/")
            target = resolve(ref, root) if is_pointer else None
            if isinstance(target, dict | list):
                self._places[ref] = target
            # A reference by anchor or id, or in a schema whose parts have ids, may lead anywhere.
            if n_bases or not isinstance(target, dict | list):
                self._n_unknown += 1

    def bound(self) -> int:
        by_id = {id(place): ref for ref, place in self._places.items()}
        canonical = {ref: by_id[id(place)] for ref, place in self._places.items()}
        for ref in set(canonical.values()):
            self._measure(ref, by_id, canonical)
        if self._n_unknown:
            highest = max(self._height.values())
            return sum(self._height.values()) + self._n_unknown * highest
        return self._longest(canonical[_ROOT])

    def _measure(self, start: str, by_id: dict[int, str], canonical: dict[str, str]) -> None:
        """Record how many levels the place has before other places begin, and which those are."""
        leads: set[str] = set()
        height, left = 1, [(self._places[start], 1)]
        while left:
            node, depth = left.pop()
            height = max(height, depth)
            if isinstance(node, dict) and isinstance(node.get("$ref"), str):
                ref = canonical.get(node["$ref"])
                if ref is not None:
                    leads.add(ref)
            for child in node.values() if isinstance(node, dict) else node:
                if not isinstance(child, dict | list):
                    continue
                place = by_id.get(id(child))
                if place is None:
                    left.append((child, depth + isinstance(child, dict)))
                else:
                    leads.add(place)
        self._height[start], self._leads[start] = height, leads

    def _longest(self, root: str) -> int:
        """The longest path from the root, in levels; one through a cycle may pass all of it."""
        longest: dict[str, int] = {}
        for cycle in self._cycles(root):
            exits = {lead for place in cycle for lead in self._leads[place]} - set(cycle)
            below = max((longest[place] for place in exits), default=0)
            total = sum(self._height[place] for place in cycle) + below
            longest.update(dict.fromkeys(cycle, total))
        return longest[root]

    def _cycles(self, root: str) -> Iterator[list[str]]:
        """Tarjan's strongly connected components; each comes after those that it leads to."""
        index: dict[str, int] = {root: 0}
        low = {root: 0}
        stack, on_stack = [root], {root}
        path = [(root, iter(self._leads[root]))]
        while path:
            place, leads = path[-1]
            lead = next(leads, None)
            if lead is not None and lead not in index:
                index[lead] = low[lead] = len(index)
                stack.append(lead)
                on_stack.add(lead)
                path.append((lead, iter(self._leads[lead])))
            elif lead is not None:
                if lead in on_stack:
                    low[place] = min(low[place], index[lead])
            else:
                path.pop()
                if path:
                    low[path[-1][0]] = min(low[path[-1][0]], low[place])
                if low[place] == index[place]:
                    cycle = [stack.pop()]
                    while cycle[-1] != place:
                        cycle.append(stack.pop())
                    on_stack -= set(cycle)
                    yield cycle


def _refs(schema: dict[str, Any]) -> tuple[set[str], int]:
    """All references, and how many parts have an id: references inside those are relative to it."""
    refs: set[str] = set()
    n_bases = 0
    left: list[Any] = [schema]
    while left:
        node = left.pop()
        if isinstance(node, dict):
            if isinstance(node.get("$ref"), str):
                refs.add(node["$ref"])
            n_bases += node is not schema and any(isinstance(node.get(k), str) for k in _IDS)
            left += node.values()
        elif isinstance(node, list):
            left += node
    return refs, n_bases
