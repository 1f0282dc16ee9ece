"""Where a prompt can resume: a pure function of the tree, the prompt and what the model needs.

    |--- path: whole blocks that match ---|-- partial --|
    0                                  path_end      n_shared      n_prompt
                     resume point p, somewhere in [0, min(n_shared, n_prompt - 1)]

`n_shared` is how many tokens the prompt shares with anything stored. At a resume point p every layer can
continue: pages cover [0, p), windows cover [p - reach, p), a state is exactly at p.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from firn.cache.parts import Needs, Part
from firn.cache.tree import Node, PackedTokens, Record, Root, Tree

MAX_SIBLINGS = 64
"""Children of one node that are considered: those that share most with the prompt."""
MEMORY = "memory"

Available = Callable[[Record], bool]
"""Whether a resume may use a record: because memory has it, or because a tier does."""
Ranges = Sequence[tuple[int, int]]
"""Half-open ranges of positions."""


def is_obtainable(record: Record) -> bool:
    """Whether memory or a tier has it: the `Available` that includes loading."""
    return record.obtainable


def has_parts(node: Node, parts: Iterable[Part], available: Available) -> bool:
    """Whether a resume may use the node's records of all these parts."""
    records = (node.records.get(part) for part in parts)
    return all(r is not None and available(r) for r in records)


@dataclass(frozen=True, slots=True)
class Segment:
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

    def origins(self, origin: Callable[[Record], str]) -> Counter[str]:
        """Tokens by the origin of their records.

        Blocks of which no record is read are contained in the last state.
        """
        read, n_tokens = set(self.records), Counter[str]()
        for segment in self.segments:
            own = [r for r in segment.node.records.values() if r in read]
            places = {origin(r) for r in own or self.records[-1:]}
            place = next(iter(places)) if len(places) == 1 else next(iter(places - {MEMORY}))
            n_tokens[place] += segment.n_tokens
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
        n_more = next((n for _, n in last.children.closest(tokens, last.end)), 0)
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


def resume_points(walk: Walk, needs: Needs, available: Available) -> Iterator[Match]:
    """Every resume point, the last one first; the empty match comes at the end."""
    path = _PathRecords.of(walk, needs, available)
    for p, tail in _candidates(walk, path):
        if p > 0 and walk.before(p) == p and p % needs.grid == 0:
            records = path.records(p, tail)
            if records is not None:
                yield Match(p, path.segments(p, tail), records)
    yield NOTHING


def _candidates(walk: Walk, path: _PathRecords) -> Iterator[tuple[int, Node | None]]:
    """Positions to check, the last first, each with the node that covers its partial block."""
    if path.needs.state:
        yield from _state_positions(walk)
        return
    limit = walk.limit
    for i in range(path.n_blocks, -1, -1):
        node = walk.node(i)
        if path.needs.grid == 1 and node.end < limit:
            sibling = path.closest(i)
            if sibling is not None:
                p = walk.before(min(node.end + sibling[1], limit))
                if p > node.end:
                    yield p, sibling[0]
        if 0 < node.end <= limit:
            p = walk.before(node.end)
            if p == node.end:
                yield p, None
            elif p > node.start and path.needs.grid == 1:
                yield p, node
        elif node.start < limit < node.end and path.needs.grid == 1:
            yield limit, node


def _state_positions(walk: Walk) -> Iterator[tuple[int, Node | None]]:
    """Every state on the way: at the ends of whole blocks, and in tails that the prompt contains."""
    limit = walk.limit
    for i in range(len(walk.path), -1, -1):
        node = walk.node(i)
        goes_on = i < len(walk.path)
        if len(node.children) > goes_on:
            end = min(node.end + walk.block - goes_on, limit)
            for tail in node.children.prefixes(walk.tokens, node.end, end):
                if Part.STATE in tail.records:
                    yield tail.end, tail
        if i and node.end <= limit and Part.STATE in node.records:
            yield node.end, None


@dataclass(frozen=True, slots=True)
class _PathRecords:
    """The available records of a path, collected once: a long path may have hundreds of resume points.

    n_blocks: how many blocks of the path come before the first without available pages.
    windows_from: for each number of blocks, the first block from which on all have a window.
    """

    walk: Walk
    needs: Needs
    available: Available
    n_blocks: int
    pages: tuple[Record, ...]
    windows: tuple[Record | None, ...]
    windows_from: tuple[int, ...]

    @classmethod
    def of(cls, walk: Walk, needs: Needs, available: Available) -> _PathRecords:
        def of_part(part: Part) -> Iterator[Record | None]:
            records = (node.records.get(part) for node in walk.path)
            return (r if r is not None and available(r) else None for r in records)

        pages: list[Record] = []
        if needs.pages:
            for record in of_part(Part.PAGES):
                if record is None:
                    break
                pages.append(record)
        windows = tuple(of_part(Part.WINDOW)) if needs.window else ()
        windows_from = [0]
        for i, window in enumerate(windows):
            windows_from.append(windows_from[-1] if window is not None else i + 1)
        n_blocks = len(pages) if needs.pages else len(walk.path)
        return cls(walk, needs, available, n_blocks, tuple(pages), windows, tuple(windows_from))

    def closest(self, n_blocks: int) -> tuple[Node, int] | None:
        """The available child after this many blocks that shares most tokens, and how many.

        None where the path itself continues from there.
        """
        path, node = self.walk.path, self.walk.node(n_blocks)
        goes_on = n_blocks < len(path)
        if len(node.children) == goes_on or (goes_on and self._has_block(path[n_blocks])):
            return None
        children = node.children.closest(self.walk.tokens, node.end)
        return next((c for c in islice(children, MAX_SIBLINGS) if self._has_block(c[0])), None)

    def _has_block(self, node: Node) -> bool:
        return has_parts(node, self.needs.by_block, self.available)

    def segments(self, p: int, tail: Node | None) -> tuple[Segment, ...]:
        """The whole blocks before p, then the node that covers the rest."""
        n = self._n_whole(p, tail)
        whole = tuple(Segment(node, self.walk.block) for node in self.walk.path[:n])
        return whole if tail is None else (*whole, Segment(tail, p - tail.start))

    def records(self, p: int, tail: Node | None) -> tuple[Record, ...] | None:
        """What a resume at p reads; None if some of it is not available."""
        n = self._n_whole(p, tail)
        if n > self.n_blocks:
            return None
        records = list(self.pages[:n])
        if self.needs.window:
            first = max(p - self.needs.window, 0) // self.walk.block
            if self.windows_from[n] > first:
                return None
            records += [w for w in self.windows[first:n] if w is not None]
        last = tail if tail is not None else self.walk.node(n)
        wanted = self.needs.by_block if tail is not None else ()
        for part in (*wanted, *((Part.STATE,) if self.needs.state else ())):
            record = last.records.get(part)
            if record is None or not self.available(record):
                return None
            records.append(record)
        return tuple(records)

    def _n_whole(self, p: int, tail: Node | None) -> int:
        return (p if tail is None else tail.start) // self.walk.block
