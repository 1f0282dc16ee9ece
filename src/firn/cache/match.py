"""Where a prompt can resume: a pure function of the tree, the prompt and the model's needs.

    |--- path: whole blocks that match ---|-- partial --|
    0                                  path_end      n_shared      n_prompt
                     resume point p, somewhere in [0, min(n_shared, n_prompt - 1)]

`n_shared` is how far the prompt agrees with anything stored. p is the last position at which every
layer can resume: pages cover [0, p), windows cover [p - reach, p), a state lies exactly at p.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from firn.cache.index import Node, Record
from firn.cache.parts import Needs, Part
from firn.core.keys import Key, KeyTokens


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens [0, n_tokens) of a node, to be restored."""

    node: Node
    n_tokens: int


@dataclass(frozen=True, slots=True)
class Match:
    """An empty match is a match: n_tokens 0, no segments."""

    n_tokens: int
    segments: tuple[Segment, ...]
    state: Record | None
    n_shared: int
    reason: str
    """Why not more: '' when all but the last token is there."""

    @property
    def records(self) -> tuple[Record, ...]:
        """Every record it will read from, but for windows out of reach."""
        found = [r for s in self.segments for p, r in s.node.records.items() if p != Part.STATE]
        return (*found, self.state) if self.state else tuple(found)


def find(root: Node, values: KeyTokens, keys: Sequence[Key], needs: Needs) -> Match:
    """The longest prefix of the prompt that every layer can resume at."""
    path = _walk(root, values, keys)
    branch = path[-1] if path else root
    best, n_best = _closest_child(branch, values)
    n_shared = branch.end + n_best
    limit = min(n_shared, len(values) - 1)
    for p, tail in _candidates(root, path, best, values, limit, needs):
        segments = _segments(path, tail, p)
        if _resumable(segments, p, needs):
            state = _state_at(path, tail, p) if needs.state else None
            why = "" if p >= len(values) - 1 else _reason(p, n_shared, limit, needs, len(values))
            return Match(p, segments, state, n_shared, why)
    return Match(0, (), None, n_shared, _reason(0, n_shared, limit, needs, len(values)))


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
    for node in (root, *path):
        if node.has(Part.STATE) and 0 < node.end <= limit:
            found.append((node.end, None))
        for child in node.children.values():
            if child.has(Part.STATE) and child.end <= limit and child not in path:
                agrees = np.array_equal(child.values, values[child.start : child.end])
                if agrees:
                    found.append((child.end, child))
    return sorted(found, key=lambda c: -c[0])


def _segments(path: Sequence[Node], tail: Node | None, p: int) -> tuple[Segment, ...]:
    """The whole blocks before p, then the node that covers the rest."""
    whole = [Segment(n, len(n.values)) for n in path if n.end <= p and n is not tail]
    if tail is not None:
        whole = [s for s in whole if s.node.end <= tail.start]
        whole.append(Segment(tail, p - tail.start))
    return tuple(whole)


def _resumable(segments: Sequence[Segment], p: int, needs: Needs) -> bool:
    covered = 0
    for s in segments:
        if s.node.start != covered:
            return False
        covered += s.n_tokens
        if needs.pages and not s.node.has(Part.PAGES):
            return False
        in_reach = needs.window and covered > p - needs.window
        if in_reach and not s.node.has(Part.WINDOW):
            return False
    return covered == p or not (needs.pages or needs.window)


def _state_at(path: Sequence[Node], tail: Node | None, p: int) -> Record | None:
    if tail is not None:
        return tail.records.get(Part.STATE)
    return next((n.records[Part.STATE] for n in path if n.end == p), None)


def _reason(p: int, n_shared: int, limit: int, needs: Needs, n_prompt: int) -> str:
    if n_shared == 0:
        return "cold"
    if p < limit:
        if needs.state:
            return "no state checkpoint"
        return "off the grid" if needs.grid > 1 else "window evicted"
    return f"diverged at token {n_shared}"
