"""Where a prompt can resume: a pure function of the tree, the prompt and the model's needs.

    |--- path: whole blocks that match ---|-- partial --|
    0                                  path_end      n_shared      n_prompt
                     resume point p, somewhere in [0, min(n_shared, n_prompt - 1)]

`n_shared` is how far the prompt agrees with anything stored. At a resume point p every layer can go on:
pages cover [0, p), windows cover [p - reach, p), a state lies exactly at p.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from firn.cache.index import Node, Record
from firn.cache.parts import Needs, Part
from firn.core.keys import Key, KeyTokens

Have = Callable[[Record], bool]
"""Whether a record can be had: in memory now, or in memory after a load."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens [0, n_tokens) of a node, to be restored."""

    node: Node
    n_tokens: int


@dataclass(frozen=True, slots=True)
class Match:
    """An empty match is a match: n_tokens 0, no segments, no records."""

    n_tokens: int
    segments: tuple[Segment, ...]
    records: tuple[Record, ...]
    """Every record that a resume here reads."""
    n_shared: int
    reason: str
    """Why not more: '' when all but the last token is there."""

    @property
    def state(self) -> Record | None:
        return next((r for r in self.records if r.part is Part.STATE), None)


Ranges = Sequence[tuple[int, int]]
"""Half-open ranges of positions."""


def find(
    root: Node,
    values: KeyTokens,
    keys: Sequence[Key],
    needs: Needs,
    have: Have,
    *,
    unbroken: Ranges = (),
) -> Match:
    """The longest prefix of the prompt that every layer can resume at."""
    return next(options(root, values, keys, needs, have, unbroken=unbroken))


def options(
    root: Node,
    values: KeyTokens,
    keys: Sequence[Key],
    needs: Needs,
    have: Have,
    *,
    unbroken: Ranges = (),
) -> Iterator[Match]:
    """Every resume point, last first; the empty match comes last. None lies inside `unbroken`."""
    path = _walk(root, values, keys)
    branch = path[-1] if path else root
    best, n_best = _closest_child(branch, values)
    n_shared = branch.end + n_best
    limit = _before(min(n_shared, len(values) - 1), unbroken)
    for p, tail in _candidates(root, path, best, values, limit, needs):
        if _before(p, unbroken) != p:
            continue
        segments = _segments(path, tail, p)
        records = _records(segments, p, needs, have)
        if records is not None:
            whole = p >= len(values) - 1
            why = "" if whole else _reason(p, n_shared, limit, needs)
            yield Match(p, segments, records, n_shared, why)
    yield Match(0, (), (), n_shared, _reason(0, n_shared, limit, needs))


def _before(position: int, unbroken: Ranges) -> int:
    """The position itself, or the start of the range that it would cut."""
    return next((start for start, end in unbroken if start < position < end), position)


def _walk(root: Node, values: KeyTokens, keys: Sequence[Key]) -> list[Node]:
    path: list[Node] = []
    node = root
    for key in keys:
        child = node.children.get(key)
        if child is None or not np.array_equal(child.values, values[child.start : child.end]):
            break
        path.append(child)
        node = child
    return path


def _closest_child(node: Node, values: KeyTokens) -> tuple[Node | None, int]:
    """The child that shares most with what follows, and how many tokens that is."""
    rest = values[node.end :]
    best, n_best = None, 0
    for child in node.children.values():
        n = common_prefix(child.values, rest)
        if n > n_best or (n == n_best and n and best and len(child.values) > len(best.values)):
            best, n_best = child, n
    return best, n_best


def common_prefix(a: KeyTokens, b: KeyTokens) -> int:
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if len(differs) else n


def _candidates(
    root: Node,
    path: Sequence[Node],
    best: Node | None,
    values: KeyTokens,
    limit: int,
    needs: Needs,
) -> list[tuple[int, Node | None]]:
    """Positions worth checking, last first, each with the node that covers its partial block."""
    if needs.state:
        return _state_positions(root, path, values, limit)
    found: list[tuple[int, Node | None]] = []
    path_end = path[-1].end if path else 0
    if best is not None and limit > path_end and needs.grid == 1:
        found.append((limit, best))
    for node in reversed(path):
        if node.end <= limit:
            found.append((node.end, None))
        elif node.start < limit and needs.grid == 1:
            found.append((limit, node))
    return [(p, n) for p, n in found if p % needs.grid == 0]


def _state_positions(
    root: Node, path: Sequence[Node], values: KeyTokens, limit: int
) -> list[tuple[int, Node | None]]:
    """Every state on the way: at the ends of whole blocks, and in tails that the prompt contains."""
    found: list[tuple[int, Node | None]] = []
    on_path = set(map(id, path))
    for node in (root, *path):
        if node.has(Part.STATE) and 0 < node.end <= limit:
            found.append((node.end, None))
        for child in node.children.values():
            if child.has(Part.STATE) and child.end <= limit and id(child) not in on_path:
                agrees = np.array_equal(child.values, values[child.start : child.end])
                if agrees:
                    found.append((child.end, child))
    return sorted(found, key=lambda c: -c[0])


def _segments(path: Sequence[Node], tail: Node | None, p: int) -> tuple[Segment, ...]:
    """The whole blocks before p, then the node that covers the rest."""
    end = p if tail is None else tail.start
    whole = [Segment(n, len(n.values)) for n in path if n.end <= end]
    return (*whole, Segment(tail, p - tail.start)) if tail else tuple(whole)


def _records(
    segments: Sequence[Segment], p: int, needs: Needs, have: Have
) -> tuple[Record, ...] | None:
    """What a resume at p reads; None if some of it cannot be had."""
    found: list[Record | None] = []
    covered = 0
    for s in segments:
        covered += s.n_tokens
        if needs.pages:
            found.append(s.node.records.get(Part.PAGES))
        if needs.window and covered > p - needs.window:
            found.append(s.node.records.get(Part.WINDOW))
    if needs.state:
        found.append(segments[-1].node.records.get(Part.STATE))
    if covered != p:
        return None
    records = tuple(r for r in found if r is not None and have(r))
    return records if len(records) == len(found) else None


def _reason(p: int, n_shared: int, limit: int, needs: Needs) -> str:
    if n_shared == 0:
        return "cold"
    if p < limit:
        if needs.state:
            return "no state checkpoint"
        return "off the grid" if needs.grid > 1 else "evicted"
    return f"diverged at token {n_shared}"
