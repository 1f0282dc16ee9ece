"""Where a prompt can resume: a pure function of the tree, the prompt and what the model needs.

    |--- path: whole blocks that match ---|-- partial --|
    0                                  path_end      n_shared      n_prompt
                     resume point p, somewhere in [0, min(n_shared, n_prompt - 1)]

`n_shared` is how many tokens the prompt shares with anything stored. At a resume point p every layer can
continue: pages cover [0, p), windows cover [p - reach, p), a state is exactly at p.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple, Protocol

from firn.cache.parts import Needs, Part
from firn.cache.tree import Node, Record, Root, Tree
from firn.core.values import PackedTokens

MAX_SIBLINGS = 64
"""Children of one node that are considered: those that share most with the prompt."""
MEMORY = "memory"

Ranges = Sequence[tuple[int, int]]
"""Half-open ranges of positions."""


class Available(Protocol):
    """What a resume may use. A cursor is: it uses what memory has, or was loaded for it."""

    def has(self, record: Record) -> bool: ...


class Anywhere:
    """What memory or a tier has may be used: it can be loaded."""

    def has(self, record: Record) -> bool:
        return record.obtainable


ANYWHERE = Anywhere()


def has_parts(node: Node, parts: Iterable[Part], available: Available) -> bool:
    """Whether a resume may use the node's records of all these parts."""
    records = (node.records.get(part) for part in parts)
    return all(r is not None and available.has(r) for r in records)


class Segment(NamedTuple):
    """Tokens [0, n_tokens) of a node."""

    node: Node
    n_tokens: int


@dataclass(frozen=True, slots=True)
class Match:
    """A resume point. The empty match is one: no tokens, no segments, no records."""

    n_tokens: int
    segments: tuple[Segment, ...] = ()
    records: tuple[Record, ...] = ()
    """Every record that a resume here reads."""

    @property
    def state(self) -> Record | None:
        return next((r for r in self.records if r.part is Part.STATE), None)

    def nbytes_of(self, records: Collection[Record]) -> int:
        """How many of their bytes fill a row: the last block may be shared only in part."""
        nbytes = sum(r.nbytes for r in records)
        last = self.segments[-1] if self.segments else None
        if last is None or last.n_tokens == last.node.n_tokens:
            return nbytes
        partial = [r for r in records if r.node is last.node and r.part is not Part.STATE]
        left_out = 1 - last.n_tokens / last.node.n_tokens
        return nbytes - int(left_out * sum(r.nbytes for r in partial))

    def after(self, start: int) -> Match:
        """The tokens from `start` on; may begin inside a block."""
        segments, at = [], 0
        for segment in self.segments:
            end = at + segment.n_tokens
            if end > start:
                segments.append(Segment(segment.node, end - max(at, start)))
            at = end
        return Match(self.n_tokens - start, tuple(segments), self.records)

    def tokens_by(self, origins: Mapping[Record, str]) -> Counter[str]:
        """Tokens by the origin of their records, all of which must have one.

        Blocks of which no record is read are contained in the last state.
        """
        places: dict[Node, str] = {}
        for record in self.records:
            if places.get(record.node, MEMORY) == MEMORY:
                places[record.node] = origins[record]
        contained = places[self.records[-1].node] if self.records else MEMORY
        n_tokens = Counter[str]()
        for node, n in self.segments:
            n_tokens[places.get(node, contained)] += n
        return n_tokens


NOTHING = Match(0)


@dataclass(frozen=True, slots=True)
class Walk:
    """A prompt's path down the tree, as far as the tree knows it."""

    root: Root
    tokens: PackedTokens
    path: Sequence[Node]
    n_shared: int
    block: int
    unbroken: Ranges = ()

    @classmethod
    def of(cls, tree: Tree, root: Root, tokens: PackedTokens, *, unbroken: Ranges = ()) -> Walk:
        path = tree.walk(root, tokens)
        last = path[-1] if path else root
        children = last.children.closest(tokens, last.end, last.end + tree.block)
        n_more = next((n for _, n in children), 0)
        return cls(root, tokens, path, last.end + n_more, tree.block, unbroken)

    @property
    def limit(self) -> int:
        """The last position where this prompt could resume: its last token makes the logits."""
        return self.before(min(self.n_shared, len(self.tokens) - 1))

    def before(self, position: int) -> int:
        """The position itself, or the start of the unbroken range that it would cut."""
        cut = (start for start, end in self.unbroken if start < position < end)
        return next(cut, position)

    def node(self, n_blocks: int) -> Node:
        """The node at the end of this many blocks."""
        return self.path[n_blocks - 1] if n_blocks else self.root


def resume_points(walk: Walk, needs: Needs, available: Available) -> Iterator[ResumePoint]:
    """Every resume point, the last one first; the empty one comes at the end."""
    return ResumePoints.of(walk, needs, available).up_to(len(walk.tokens))


def last_match(walk: Walk, needs: Needs, available: Available) -> Match:
    """The last resume point, with all that a resume there reads."""
    return next(resume_points(walk, needs, available)).match()


@dataclass(frozen=True, slots=True)
class ResumePoint:
    """A position where a prompt can resume. What a resume reads is collected only by `match`."""

    n_tokens: int
    n_whole: int
    """Whole blocks of the path before it."""
    tail: Node | None
    """The node that covers the rest, if it is not at the end of a block."""
    first_window: int
    """The windows of blocks [first_window, n_whole) are read."""
    points: ResumePoints

    def match(self) -> Match:
        if not self.n_tokens:
            return NOTHING
        points, tail = self.points, self.tail
        whole = tuple(Segment(node, points.walk.block) for node in points.walk.path[: self.n_whole])
        rest = () if tail is None else (Segment(tail, self.n_tokens - tail.start),)
        pages = points.pages[: self.n_whole]
        windows = points.windows[self.first_window : self.n_whole]
        records = (*pages, *(w for w in windows if w is not None), *self.tail_records, *self.states)
        return Match(self.n_tokens, whole + rest, records)

    @property
    def tail_records(self) -> tuple[Record, ...]:
        """The pages and the window of the block that is shared only in part."""
        tail, needs = self.tail, self.points.needs
        return () if tail is None else tuple(tail.records[part] for part in needs.by_block)

    @property
    def states(self) -> tuple[Record, ...]:
        if not (self.n_tokens and self.points.needs.state):
            return ()
        last = self.tail if self.tail is not None else self.points.walk.node(self.n_whole)
        return (last.records[Part.STATE],)


@dataclass(frozen=True, slots=True)
class ResumePoints:
    """The available records of a path, collected once: a long path has thousands of resume points,
    and to find one must cost no more than to look at its last block.

    n_blocks: how many blocks of the path come before the first without available pages.
    windows_from: for each number of blocks, the first block from which on all have a window.
    """

    walk: Walk
    needs: Needs
    available: Available
    n_blocks: int
    pages: Sequence[Record]
    windows: Sequence[Record | None]
    windows_from: Sequence[int]

    @classmethod
    def of(cls, walk: Walk, needs: Needs, available: Available) -> ResumePoints:
        def of_part(part: Part) -> Iterator[Record | None]:
            for node in walk.path:
                record = node.records.get(part)
                yield record if record is not None and available.has(record) else None

        pages: list[Record] = []
        if needs.pages:
            for record in of_part(Part.PAGES):
                if record is None:
                    break
                pages.append(record)
        windows = list(of_part(Part.WINDOW)) if needs.window else []
        windows_from = [0]
        for i, window in enumerate(windows):
            windows_from.append(windows_from[-1] if window is not None else i + 1)
        n_blocks = len(pages) if needs.pages else len(walk.path)
        return cls(walk, needs, available, n_blocks, pages, windows, windows_from)

    def up_to(self, position: int) -> Iterator[ResumePoint]:
        """The resume points at or before the position, the last one first."""
        for p, tail in (
            self._state_positions(position) if self.needs.state else self._ends(position)
        ):
            is_allowed = 0 < p <= position and p % self.needs.grid == 0
            if is_allowed and self.walk.before(p) == p:
                point = self._point(p, tail)
                if point is not None:
                    yield point
        yield ResumePoint(0, 0, None, 0, self)

    def _ends(self, position: int) -> Iterator[tuple[int, Node | None]]:
        """Positions to check, the last first, each with the node that covers its partial block."""
        walk, grid, limit = self.walk, self.needs.grid, self.walk.limit
        for i in range(min(self.n_blocks, position // walk.block + 1), -1, -1):
            node = walk.node(i)
            if grid == 1 and node.end < limit:
                sibling = self._closest(i)
                if sibling is not None:
                    p = walk.before(min(node.end + sibling[1], limit))
                    if p > node.end:
                        yield p, sibling[0]
            if 0 < node.end <= limit:
                p = walk.before(node.end)
                if p == node.end:
                    yield p, None
                elif p > node.start and grid == 1:
                    yield p, node
            elif node.start < limit < node.end and grid == 1:
                yield limit, node

    def _state_positions(self, position: int) -> Iterator[tuple[int, Node | None]]:
        """Every state on the way: at the ends of whole blocks, and in tails that the prompt contains."""
        walk, limit = self.walk, self.walk.limit
        for i in range(min(len(walk.path), position // walk.block + 1), -1, -1):
            node = walk.node(i)
            goes_on = i < len(walk.path)
            if len(node.children) > goes_on:
                end = min(node.end + walk.block - goes_on, limit)
                for tail in node.children.prefixes(walk.tokens, node.end, end):
                    if Part.STATE in tail.records:
                        yield tail.end, tail
            if i and node.end <= limit and Part.STATE in node.records:
                yield node.end, None

    def _closest(self, n_blocks: int) -> tuple[Node, int] | None:
        """The available child after this many blocks that shares most tokens, and how many.

        None where the path itself continues from there.
        """
        path, node = self.walk.path, self.walk.node(n_blocks)
        goes_on = n_blocks < len(path)
        if len(node.children) == goes_on or (goes_on and self._has_block(path[n_blocks])):
            return None
        children = node.children.closest(self.walk.tokens, node.end, node.end + self.walk.block)
        return next((c for c in islice(children, MAX_SIBLINGS) if self._has_block(c[0])), None)

    def _has_block(self, node: Node) -> bool:
        return has_parts(node, self.needs.by_block, self.available)

    def _point(self, p: int, tail: Node | None) -> ResumePoint | None:
        """The position as a resume point; None if some of what it reads is not available."""
        walk, needs = self.walk, self.needs
        n_whole = (p if tail is None else tail.start) // walk.block
        first = n_whole
        if needs.window:
            first = max(p - needs.window, 0) // walk.block
            if self.windows_from[n_whole] > first:
                return None
        last = tail if tail is not None else walk.node(n_whole)
        state = (Part.STATE,) if needs.state else ()
        wanted = (*needs.by_block, *state) if tail is not None else state
        if n_whole > self.n_blocks or not has_parts(last, wanted, self.available):
            return None
        return ResumePoint(p, n_whole, tail, first, self)
