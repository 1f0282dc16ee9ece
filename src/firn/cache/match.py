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

    def by_tier(self, is_below: Callable[[Record], bool]) -> dict[str, int]:
        """Tokens by where they come from. Blocks of which nothing is read are in the last state."""
        read, below = set(self.records), 0
        for segment in self.segments:
            own = [r for r in segment.node.records.values() if r in read]
            if any(map(is_below, own or self.records[-1:])):
                below += segment.n_tokens
        found = {"memory": self.n_tokens - below, "ssd": below}
        return {name: n for name, n in found.items() if n}


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
    stock = _Stock.of(path, needs, have)
    for p, tail in _candidates(root, path, best, values, limit, needs):
        if _before(p, unbroken) != p:
            continue
        records = stock.records(p, tail)
        if records is not None:
            whole = p >= len(values) - 1
            why = "" if whole else _reason(p, n_shared, limit, needs)
            yield Match(p, stock.segments(p, tail), records, n_shared, why)
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


@dataclass(frozen=True, slots=True)
class _Stock:
    """What can be had of the path, found out once: a long path has hundreds of resume points.

    pages: of the first blocks, up to the first that is missing.
    unbroken_from: for i blocks, the first from which on all their windows can be had.
    """

    needs: Needs
    have: Have
    path: Sequence[Node]
    whole: tuple[Segment, ...]
    pages: tuple[Record, ...]
    windows: tuple[Record | None, ...]
    unbroken_from: tuple[int, ...]

    @classmethod
    def of(cls, path: Sequence[Node], needs: Needs, have: Have) -> _Stock:
        def of_part(part: Part) -> Iterator[Record | None]:
            found = (node.records.get(part) for node in path)
            return (r if r is not None and have(r) else None for r in found)

        pages: list[Record] = []
        if needs.pages:
            for record in of_part(Part.PAGES):
                if record is None:
                    break
                pages.append(record)
        windows = tuple(of_part(Part.WINDOW)) if needs.window else ()
        unbroken_from = [0]
        for i, window in enumerate(windows):
            unbroken_from.append(unbroken_from[-1] if window is not None else i + 1)
        whole = tuple(Segment(n, len(n.values)) for n in path)
        return cls(needs, have, path, whole, tuple(pages), windows, tuple(unbroken_from))

    def segments(self, p: int, tail: Node | None) -> tuple[Segment, ...]:
        """The whole blocks before p, then the node that covers the rest."""
        if tail is None:
            return self.whole[: self._n_whole(p)]
        return (*self.whole[: self._n_whole(tail.start)], Segment(tail, p - tail.start))

    def records(self, p: int, tail: Node | None) -> tuple[Record, ...] | None:
        """What a resume at p reads; None if some of it cannot be had."""
        n = self._n_whole(p if tail is None else tail.start)
        last = tail or (self.path[n - 1] if n else None)
        if (
            last is None
            or (tail is None and last.end != p)
            or len(self.pages) < n * self.needs.pages
        ):
            return None
        found = list(self.pages[:n])
        if self.needs.window:
            first = max(p - self.needs.window, 0) // len(self.path[0].values) if n else 0
            if self.unbroken_from[n] > first:
                return None
            found += [w for w in self.windows[first:n] if w is not None]
        wanted = self.needs.by_block if tail is not None else ()
        for part in (*wanted, *((Part.STATE,) if self.needs.state else ())):
            record = last.records.get(part)
            if record is None or not self.have(record):
                return None
            found.append(record)
        return tuple(found)

    def _n_whole(self, end: int) -> int:
        """How many blocks of the path lie before this position."""
        return min(end // len(self.path[0].values), len(self.path)) if self.path else 0


def _reason(p: int, n_shared: int, limit: int, needs: Needs) -> str:
    if n_shared == 0:
        return "cold"
    if p < limit:
        if needs.state:
            return "no state checkpoint"
        return "off the grid" if needs.grid > 1 else "evicted"
    return f"diverged at token {n_shared}"
