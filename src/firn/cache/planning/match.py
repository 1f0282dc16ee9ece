"""Where a prompt can resume: a pure function of the tree, the prompt and the model's needs.

    |--- path: whole blocks that match ---|-- partial --|
    0                                  path_end      n_shared      n_prompt
                     resume point p, somewhere in [0, min(n_shared, n_prompt - 1)]

`n_shared` is how far the prompt agrees with anything stored. At a resume point p every layer can go on:
pages cover [0, p), windows cover [p - reach, p), a state lies exactly at p.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from firn.cache.parts import Needs, Part
from firn.cache.tree import Node, PackedTokens, Record, Root, Tree

MAX_SIBLINGS = 64
"""Children of one node that are looked at: those that share most with the prompt."""

Have = Callable[[Record], bool]
"""Whether a record can be had: in memory now, or in memory after a load."""
Ranges = Sequence[tuple[int, int]]
"""Half-open ranges of positions."""


@dataclass(frozen=True, slots=True)
class Segment:
    """Tokens [0, n_tokens) of a node, to be restored."""

    node: Node
    n_tokens: int


@dataclass(frozen=True, slots=True)
class Match:
    """A resume point. An empty match is one: no tokens, no segments, no records."""

    n_tokens: int
    segments: tuple[Segment, ...] = ()
    records: tuple[Record, ...] = ()
    """Every record that a resume here reads."""

    @property
    def state(self) -> Record | None:
        return next((r for r in self.records if r.part is Part.STATE), None)

    def origins(self, origin: Callable[[Record], str]) -> Counter[str]:
        """Tokens by where they come from. Blocks of which nothing is read are in the last state."""
        read, found = set(self.records), Counter[str]()
        for segment in self.segments:
            own = [r for r in segment.node.records.values() if r in read]
            places = {origin(r) for r in own or self.records[-1:]}
            place = next(iter(places)) if len(places) == 1 else next(iter(places - {MEMORY}))
            found[place] += segment.n_tokens
        return found


MEMORY = "memory"
NOTHING = Match(0)


@dataclass(frozen=True, slots=True)
class Walk:
    """A prompt's way down the tree, as far as it goes."""

    root: Root
    tokens: PackedTokens
    path: Sequence[Node]
    n_shared: int
    block: int
    unbroken: Ranges = ()

    @property
    def limit(self) -> int:
        """The last position where this prompt could resume: its last token makes the logits."""
        return self.before(min(self.n_shared, len(self.tokens) - 1))

    def before(self, position: int) -> int:
        """The position itself, or the start of the unbroken range that it would cut."""
        cut = (start for start, end in self.unbroken if start < position < end)
        return next(cut, position)

    def node(self, n_blocks: int) -> Node:
        """The end of the first blocks."""
        return self.path[n_blocks - 1] if n_blocks else self.root


def walk(tree: Tree, root: Root, tokens: PackedTokens, *, unbroken: Ranges = ()) -> Walk:
    path = tree.walk(root, tokens)
    last = path[-1] if path else root
    n_more = next((n for _, n in last.children.closest(tokens, last.end)), 0)
    return Walk(root, tokens, path, last.end + n_more, tree.block, unbroken)


def points(way: Walk, needs: Needs, have: Have) -> Iterator[Match]:
    """Every resume point, last first; the empty match comes last."""
    stock = _Stock.of(way, needs, have)
    for p, tail in _candidates(way, stock):
        if p > 0 and way.before(p) == p and p % needs.grid == 0:
            records = stock.records(p, tail)
            if records is not None:
                yield Match(p, stock.segments(p, tail), records)
    yield NOTHING


def _candidates(way: Walk, stock: _Stock) -> Iterator[tuple[int, Node | None]]:
    """Positions worth checking, last first, each with the node that covers its partial block."""
    if stock.needs.state:
        yield from _state_positions(way)
        return
    limit = way.limit
    for i in range(stock.n_blocks, -1, -1):
        node = way.node(i)
        if stock.needs.grid == 1 and node.end < limit:
            sibling = stock.closest(i)
            if sibling is not None:
                p = way.before(min(node.end + sibling[1], limit))
                if p > node.end:
                    yield p, sibling[0]
        if 0 < node.end <= limit:
            yield node.end, None
        elif node.start < limit < node.end and stock.needs.grid == 1:
            yield limit, node


def _state_positions(way: Walk) -> Iterator[tuple[int, Node | None]]:
    """Every state on the way: at the ends of whole blocks, and in tails that the prompt contains."""
    limit = way.limit
    for i in range(len(way.path), -1, -1):
        node = way.node(i)
        goes_on = i < len(way.path)
        if len(node.children) > goes_on:
            end = min(node.end + way.block - goes_on, limit)
            for tail in node.children.prefixes(way.tokens, node.end, end):
                if Part.STATE in tail.records:
                    yield tail.end, tail
        if i and node.end <= limit and Part.STATE in node.records:
            yield node.end, None


@dataclass(frozen=True, slots=True)
class _Stock:
    """What can be had of the path, found out once: a long path has hundreds of resume points.

    n_blocks: of the path, those before the first whose pages cannot be had.
    unbroken_from: for i blocks, the first from which on all their windows can be had.
    """

    way: Walk
    needs: Needs
    have: Have
    n_blocks: int
    pages: tuple[Record, ...]
    windows: tuple[Record | None, ...]
    unbroken_from: tuple[int, ...]

    @classmethod
    def of(cls, way: Walk, needs: Needs, have: Have) -> _Stock:
        def of_part(part: Part) -> Iterator[Record | None]:
            there = (node.records.get(part) for node in way.path)
            return (r if r is not None and have(r) else None for r in there)

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
        n_blocks = len(pages) if needs.pages else len(way.path)
        return cls(way, needs, have, n_blocks, tuple(pages), windows, tuple(unbroken_from))

    def closest(self, n_blocks: int) -> tuple[Node, int] | None:
        """Which child of the path's n-th block goes furthest with the prompt, of those that can be had.

        None where the path itself goes on from there.
        """
        path, node = self.way.path, self.way.node(n_blocks)
        goes_on = n_blocks < len(path)
        if len(node.children) == goes_on or (goes_on and self.has_block(path[n_blocks])):
            return None
        children = node.children.closest(self.way.tokens, node.end)
        return next((c for c in islice(children, MAX_SIBLINGS) if self.has_block(c[0])), None)

    def has_block(self, node: Node) -> bool:
        there = (node.records.get(part) for part in self.needs.by_block)
        return all(r is not None and self.have(r) for r in there)

    def segments(self, p: int, tail: Node | None) -> tuple[Segment, ...]:
        """The whole blocks before p, then the node that covers the rest."""
        n = (p if tail is None else tail.start) // self.way.block
        whole = tuple(Segment(node, self.way.block) for node in self.way.path[:n])
        return whole if tail is None else (*whole, Segment(tail, p - tail.start))

    def records(self, p: int, tail: Node | None) -> tuple[Record, ...] | None:
        """What a resume at p reads; None if some of it cannot be had."""
        n = (p if tail is None else tail.start) // self.way.block
        if n > self.n_blocks:
            return None
        found = list(self.pages[:n])
        if self.needs.window:
            first = max(p - self.needs.window, 0) // self.way.block
            if self.unbroken_from[n] > first:
                return None
            found += [w for w in self.windows[first:n] if w is not None]
        last = tail if tail is not None else self.way.node(n)
        wanted = self.needs.by_block if tail is not None else ()
        for part in (*wanted, *((Part.STATE,) if self.needs.state else ())):
            record = last.records.get(part)
            if record is None or not self.have(record):
                return None
            found.append(record)
        return tuple(found)
