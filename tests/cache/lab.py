"""The prefix cache over layers of plain tokens: what was restored can be read, and must be right.

A `LabLayer` is the cache of a model without a model. It has pages, a window, a state, or any mixture of
them, and each part holds its own tokens; a row whose parts disagree, or lack something, turns to
garbage. On top of `HashRunner` that makes every wrong block a wrong answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import mlx.core as mx
import numpy as np

from firn.cache.codecs import ALL_TOKENS, Arrays, Buffers
from firn.cache.layout import Layout
from firn.cache.parts import Needs, Part
from firn.cache.planning.estimates import Estimates
from firn.cache.prefix import CacheSettings, PrefixCache
from firn.cache.tree import InRow, Node, PartTotals, Record, Tree
from firn.core.keys import Key, child_key
from firn.core.ports import At, Restored, RowView
from firn.core.prefill_speed import PrefillSpeed
from firn.core.values import Job, KeyTokens, Prompt
from tests.clocks import SetClock
from tests.hash_engine import HashEngine
from tests.hash_runner import GARBAGE, Faults, HashGroup, HashLayer, HashRow, HashRunner


def _nothing(where: str) -> None:
    pass


@dataclass(frozen=True)
class Shape:
    """What the model's layers are. `fault` is called by every cut and fill, and may raise."""

    pages: bool = True
    window: int = 0
    state: bool = False
    state_nbytes: int = 64
    in_rows: bool = False
    fault: Callable[[str], None] = _nothing

    @property
    def parts(self) -> tuple[Part, ...]:
        kinds = ((Part.PAGES, self.pages), (Part.WINDOW, self.window), (Part.STATE, self.state))
        return tuple(part for part, wanted in kinds if wanted)

    def layout(self) -> Layout:
        codecs = tuple(LabCodec(part, self) for part in self.parts)
        text = f"lab {self.pages} {self.window} {self.state}"
        return Layout(codecs, text, self.window, self.window)


DENSE = Shape()
WINDOWED = Shape(window=6)
HYBRID = Shape(state=True)
RECURRENT = Shape(pages=False, state=True)
ALL_KINDS = Shape(window=6, state=True)
IN_ROWS = Shape(in_rows=True)
WINDOW_AND_STATE = Shape(pages=False, window=6, state=True)
SHAPES = {
    "dense": DENSE,
    "windowed": WINDOWED,
    "narrow window": Shape(window=3),
    "wide window": Shape(window=40),
    "hybrid": HYBRID,
    "recurrent": RECURRENT,
    "all kinds": ALL_KINDS,
    "window and state": WINDOW_AND_STATE,
    "dense in rows": IN_ROWS,
    "windowed in rows": Shape(window=6, in_rows=True),
    "hybrid in rows": Shape(state=True, in_rows=True),
}


@dataclass(eq=False)
class LabLayer(HashLayer):
    """`rows` is what the model computes with; `filled` what each part was restored to."""

    shape: Shape = DENSE
    grouped: bool = False
    filled: dict[Part, list[int]] = field(default_factory=dict)

    @property
    def caches(self) -> tuple[View, ...]:
        return tuple(View(self) for _ in self.shape.parts)

    def fill(self, part: Part, tokens: list[int], n_tokens: int) -> None:
        self.filled[part] = tokens
        whole = self.filled.get(Part.PAGES, self.filled.get(Part.STATE))
        agree = set(self.filled) == set(self.shape.parts) and whole is not None
        for part, tokens in self.filled.items():
            if part is Part.WINDOW:
                n_held = len(tokens)
                agree = agree and n_held >= min(self.shape.window, n_tokens)
                agree = agree and whole is not None and whole[n_tokens - n_held :] == tokens
            else:
                agree = agree and tokens == whole and len(tokens) == n_tokens
        self.rows[0] = list(whole) if agree and whole is not None else [GARBAGE] * n_tokens


@dataclass(eq=False)
class View:
    """One part of a LabLayer, as the codecs see it."""

    layer: LabLayer


@dataclass(frozen=True)
class LabCodec:
    part: Part
    shape: Shape
    single: str = ""

    @property
    def buffers(self) -> Buffers | None:
        return LabBuffers() if self.shape.in_rows and self.part is Part.PAGES else None

    def describe(self, layer: Any) -> str | None:
        return f"lab {self.part.value}"

    def reach(self, layer: Any) -> int:
        return {Part.PAGES: ALL_TOKENS, Part.WINDOW: self.shape.window, Part.STATE: 0}[self.part]

    def cut(self, view: View, at: At, start: int, end: int) -> Arrays:
        self.shape.fault("cut")
        tokens = view.layer.rows[at.index]
        assert len(tokens) >= at.n_tokens, "the row holds less than it says"
        if self.part is Part.STATE:
            assert end == len(tokens) == at.n_tokens, "a state is where the row is"
            padding = mx.array(np.zeros(self.shape.state_nbytes, dtype=np.uint8))
            return mx.array([tokens], dtype=mx.int32), padding, None
        if (
            self.part is Part.WINDOW
            and view.layer.grouped
            and at.n_tokens - start > self.shape.window
        ):
            raise AssertionError("the ring has overwritten these tokens")
        # Made by numpy: MLX would compute it on another thread, which takes far longer.
        array = np.array(tokens[start:end], dtype=np.int32).reshape(1, 1, -1, 1)
        both = (array, array + 1) if self.part is Part.PAGES else (array,)
        return tuple(map(mx.array, both))

    def fill(self, view: View, pieces: Sequence[Arrays], n_tokens: int) -> None:
        self.shape.fault("fill")
        firsts = [piece[0] for piece in pieces]
        mx.eval(firsts)  # together: one by one, waiting takes longer than the copies
        tokens: list[int] = []
        for first in firsts:
            assert first is not None
            tokens += np.array(first).ravel().tolist()
        view.layer.fill(self.part, tokens, n_tokens)

    def fixed_nbytes(self, layer: Any) -> int:
        return 0

    def token_nbytes(self, layer: Any) -> int:
        return 0


class LabBuffers:
    """A taken row is an array of its tokens, with room for two more."""

    def is_lone(self, view: View) -> bool:
        return len(view.layer.rows) == 1

    def take(self, view: View) -> Arrays:
        tokens = [*view.layer.rows[0], GARBAGE, GARBAGE]
        array = np.array(tokens, dtype=np.int32).reshape(1, 1, -1, 1)
        return mx.array(array), mx.array(array + 1)

    def first_column(self, view: View, at: At) -> int:
        return 0

    def give(self, view: View, arrays: Arrays, n_tokens: int) -> None:
        keys = arrays[0]
        assert keys is not None
        view.layer.fill(Part.PAGES, np.array(keys).ravel().tolist()[:n_tokens], n_tokens)


# --- rows and engines ----------------------------------------------------------------------


@dataclass(eq=False)
class LabRow:
    """A lone row, for tests that drive the cache without an engine."""

    layer: LabLayer
    n_tokens: int = 0
    is_live: bool = True

    def view(self) -> RowView:
        return RowView([self.layer], At(0, self.n_tokens))

    @property
    def tokens(self) -> list[int]:
        return self.layer.rows[0]

    def consume(self, tokens: Sequence[int]) -> None:
        self.tokens.extend(int(t) for t in tokens)
        self.n_tokens += len(tokens)


class LabRunner(HashRunner):
    """HashRunner on LabLayers; counts the prompt tokens it computes."""

    def __init__(self, shape: Shape, faults: Faults | None = None, **options: Any) -> None:
        super().__init__(faults, **options)
        self.shape = shape

    @property
    def n_prefilled(self) -> int:
        return sum(end - start for start, end in self.prefills)

    def start(self, restored: Restored | None) -> HashRow:
        self.faults.start(restored)
        layer = LabLayer([[]], self.shape)
        if restored is None:
            return HashRow(layer)
        restored.fill([layer])
        return HashRow(layer, restored.n_tokens)

    def choices(self, row: HashRow, job: Any, indices: Sequence[int]) -> list[HashRow]:
        rows = super().choices(row, job, indices)
        for other in rows[1:]:
            other.layer = LabLayer([list(row.tokens)], self.shape)
        return rows

    def _room_for(self, row: HashRow) -> HashGroup:
        n_groups = len(self._groups)
        group = super()._room_for(row)
        if len(self._groups) > n_groups:
            group.layer = LabLayer([], self.shape, grouped=True)
        return group


def tree(
    shape: Shape,
    *,
    block: int = 8,
    limit_nbytes: int = 1 << 40,
    exact_chunk: int = 0,
    weighs_hits: bool = False,
    clock: Callable[[], float] = lambda: 0.0,
    wall: Callable[[], float] = time.time,
    fingerprint: bytes = b"lab",
) -> PrefixCache:
    settings = CacheSettings(
        limit_nbytes=limit_nbytes,
        block=block,
        exact_chunk=exact_chunk,
        weighs_hits=weighs_hits,
    )
    made = PrefixCache(
        shape.layout(),
        settings,
        fingerprint=fingerprint,
        dtype="tokens",
        clock=SetClock(clock, wall),
    )
    made.records.estimates = Steady()
    return made


class SteadySpeed(PrefillSpeed):
    """Every token costs the same, however long the machine takes: eviction is deterministic."""

    def observe(self, start: int, end: int, seconds: float) -> None:
        pass


class Steady(Estimates):
    def __init__(self) -> None:
        super().__init__(prefill=SteadySpeed())


class LabEngine(HashEngine):
    """The real engine and the real cache over a LabRunner. Use as a context manager."""

    def __init__(
        self,
        shape: Shape,
        faults: Faults | None = None,
        *,
        cache: PrefixCache | None = None,
        group_rows: int = 1 << 30,
        chunk: int = 16,
        **options: Any,
    ) -> None:
        self._made = LabRunner(shape, faults, group_rows=group_rows)
        self.tree = cache if cache is not None else tree(shape)
        aligned = self.tree.settings.exact_chunk > 0
        super().__init__(faults, cache=self.tree, chunk=chunk, aligned=aligned, **options)

    @property
    def runner(self) -> LabRunner:
        return self._made

    @runner.setter
    def runner(self, _: HashRunner) -> None:
        """Ignore the runner that the base class makes: ours knows the layers."""

    def job(
        self,
        prompt: Sequence[int],
        n_reply: int = 8,
        *,
        boundaries: Sequence[int] = (),
        **more: Any,
    ) -> Job:
        job = super().job(prompt, n_reply, **more)
        return replace(job, prompt=replace(job.prompt, boundaries=tuple(boundaries)))

    def check(self) -> None:
        """The tree is in order and nobody holds on to anything."""
        self.between_steps(lambda: check_tree(self.tree))
        assert self.between_steps(lambda: n_leases(self.tree)) == 0
        assert self.leftovers() == {}


def prompt_of(ids: Sequence[int], boundaries: Sequence[int] = ()) -> Prompt:
    return Prompt(np.array(ids, dtype=np.int64), boundaries=tuple(boundaries))


# --- what must always hold -----------------------------------------------------------------


def nodes_of(tree: Tree) -> Iterator[Node]:
    """All nodes but roots."""
    for root in tree.roots():
        yield from (node for node in tree.subtree(root) if node is not root)


def records_of(tree: PrefixCache) -> list[Record]:
    return [r for n in nodes_of(tree.records.tree) for r in n.records.values()]


def n_leases(tree: PrefixCache) -> int:
    inner = tree.records.tree
    leased = sum(root.n_leases for root in inner.roots())
    return leased + sum(r.n_leases for r in records_of(tree))


def check_tree(tree: PrefixCache, *, whole: bool = True) -> None:
    """Every chain is whole, nothing is left over, and the books are right.

    whole: nothing below memory has been lost, so no chain has a hole.
    """
    for root in tree.records.tree.roots():
        used = len(root.children) or root.n_leases or root.cleared_at > 0
        assert used, "an empty root was left behind"
        _check_branch(root)
    for node in nodes_of(tree.records.tree):
        _check_node(node, tree, whole=whole)
    check_books(tree)


def check_books(tree: PrefixCache) -> None:
    """The tree's totals for memory and tiers are the sums of its records."""
    assert tree.integrity.run() == 0
    inner = tree.records.tree
    every = records_of(tree)
    held = [r for r in every if r.arrays is not None and not r.leaving]
    _check_held(tree.records.ledger.memory, held)
    for record in held:
        assert isinstance(record.arrays, InRow) or record.arrays.nbytes == record.nbytes
    for pages in tree.records.rows.every():
        assert (
            set(pages.records) == {r for r in every if r.arrays is pages} or tree.records._cleared
        )
        assert pages.nbytes == sum(r.nbytes for r in pages.records)
        assert pages.end == max((r.node.end for r in pages.records), default=0)
        assert pages.first == min((r.node.start for r in pages.records), default=0)
    _check_rows(tree)
    for tier, counted in enumerate(tree.records.ledger.tiers):
        _check_held(counted, [r for r in every if r.is_stored(tier)])
    leaving = sum(r.nbytes for r in every if r.leaving)
    assert tree.records.ledger.leaving_nbytes == leaving or tree.records._cleared, (
        "what is cleared may be leaving"
    )
    for root in inner.roots():
        own = [r for n in inner.subtree(root) for r in n.records.values()]
        _check_held(root.memory, [r for r in own if r.arrays is not None and not r.leaving])
        with_records = [n for n in inner.subtree(root) if n.records]
        assert root.n_stored_tokens == sum(n.n_tokens for n in with_records)


def _check_rows(tree: PrefixCache) -> None:
    """What rows take beyond their records, counted again."""
    rows, extra = tree.records.rows, 0
    for pages in rows.every():
        if any(tree.records.tree.is_attached(r.node.root) for r in pages.records):
            slab = pages.slab if pages in rows.parked else None
            extra += (slab.nbytes if slab is not None else 0) - pages.nbytes
    assert rows.extra_nbytes == extra


def _check_held(counted: PartTotals, records: Sequence[Record]) -> None:
    for part in Part:
        mine = [r for r in records if r.part is part]
        assert counted.n_records[part] == len(mine)
        assert counted.nbytes[part] == sum(r.nbytes for r in mine)


def _check_node(node: Node, tree: PrefixCache, *, whole: bool) -> None:
    assert node.parent is not None
    assert node in list(node.parent.children)
    assert node.key == child_key(node.parent.key, node.tokens)
    assert 0 < node.n_tokens <= tree.settings.block
    assert node.start % tree.settings.block == 0, "only whole blocks have children"
    assert node.start == node.parent.end
    assert node.root is node.parent.root
    assert node.records or len(node.children) or node.n_leases, "an empty node was left behind"
    assert node.n_leases >= 0
    assert node.parent.parent is None or node.parent.expires_at >= node.expires_at
    _check_branch(node)
    if whole and tree.records.needs.pages and node.records:
        for above in node.path():
            assert Part.PAGES in above.records, "a child whose parent's pages are gone"
    for part, record in node.records.items():
        assert record.part is part
        assert record.node is node
        assert record.obtainable or record.writing, "a record that nobody has"


def _check_branch(node: Node) -> None:
    """A node's leases, pins and last use also count for the nodes above it."""
    assert node.n_leases >= sum(c.n_leases for c in node.children)
    assert node.n_pins >= sum(c.n_pins for c in node.children)
    for child in node.children:
        assert node.used_at >= child.used_at or node.parent is None


def longest(tree: PrefixCache, root: Key, values: KeyTokens) -> int:
    """The longest resumable prefix, by trying every position on every chain of the tree."""
    start = next((r for r in tree.records.tree.roots() if r.key == root), None)
    if start is None:
        return 0
    best = 0
    for node in tree.records.tree.subtree(start):
        chain = list(reversed(list(node.path())))
        agrees = all(np.array_equal(n.tokens, values[n.start : n.end]) for n in chain[:-1])
        if not agrees or not chain:
            continue
        n_same = 0
        for mine, theirs in zip(node.tokens, values[node.start :], strict=False):
            if mine != theirs:
                break
            n_same += 1
        for p in range(node.start + 1, min(node.start + n_same, len(values) - 1) + 1):
            if p > best and _resumes(chain, p, tree.records.needs):
                best = p
    return best


def _resumes(chain: Sequence[Node], p: int, needs: Needs) -> bool:
    if p % needs.grid:
        return False
    if needs.grid > 1 and p != chain[-1].end:
        return False  # exact mode restores whole records only
    if needs.state and not (chain[-1].end == p and _has(chain[-1], Part.STATE)):
        return False
    if needs.pages and not all(_has(n, Part.PAGES) for n in chain):
        return False
    reached = [n for n in chain if n.end > p - needs.window]
    return not needs.window or all(_has(n, Part.WINDOW) for n in reached)


def _has(node: Node, part: Part) -> bool:
    return part in node.records and node.records[part].obtainable
