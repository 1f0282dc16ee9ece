"""The live tier: pages that stay in the row that computed them, instead of being cut out of it.

The tree knows the blocks of a running row, and their content stays in the row. A row that ends is
parked as it is, and the next turn of its conversation continues in its buffers. So memory holds a
conversation's pages only once.

    live     read through the row, wherever it is: alone, or one of a group
    parked   read from its slab: the buffers of a row that has ended, tokens [first, end) and some room

While a view of a buffer exists, the next write to the buffer copies all of it: no view may outlive the
call that made it.

Owner: the engine thread, through `Records`.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from firn.cache.arrays.payload import (
    Cells,
    Payload,
    Views,
    array_copy,
    copies_are_awaited,
    evaluate,
    evaluate_layers,
    gathered,
    gathers,
    stacked,
)
from firn.cache.codecs import TOKEN_AXIS, Arrays, nbytes_of
from firn.cache.layout import Layout
from firn.cache.ledger import Ledger
from firn.cache.parts import Part
from firn.cache.tree import InRow, Node, Record, Tree
from firn.core.errors import TokensNotHeld
from firn.core.ports import LiveRow

LEAST_BLOCKS = 4
"""Shorter rows are cut into records: there are many of them, and their buffers are mostly room."""
WASTED_SHARE = 0.25
"""Parked rows are trimmed, which copies the rest of them, where more than this share and more than
LEAST_BLOCKS blocks are unused. Less is left as room for the next turn."""
SPARE_SHARE = 0.125
"""When memory is needed, parked rows of which more than this share is unused are trimmed before
anything is evicted."""
N_GATHERED = 16
"""Rows of which is looked at whether others hold the same, once memory is needed: those used last."""
GIVEN_SHARE = 0.25
"""A parked row from which records are evicted gives this share at once."""


@dataclass(eq=False, slots=True)
class Slab:
    """The buffers of a parked row's layers that have pages: tokens [first, end)."""

    layers: list[Arrays]
    first: int
    end: int
    nbytes: int = 0
    n_room: int = 0
    """How many tokens fit into the buffers."""

    def __post_init__(self) -> None:
        self._measure()

    def _measure(self) -> None:
        present = (a for arrays in self.layers for a in arrays if a is not None)
        self.n_room = int(next(present).shape[TOKEN_AXIS])
        self.nbytes = sum(map(nbytes_of, self.layers))

    def views(self, start: int, end: int) -> list[Arrays]:
        """Raises TokensNotHeld."""
        if not self.first <= start <= end <= self.end:
            raise TokensNotHeld(start, end, first=self.first, n_tokens=self.end)
        a, b = start - self.first, end - self.first
        return [
            tuple(None if x is None else x[..., a:b, :] for x in arrays) for arrays in self.layers
        ]

    def cut(self, start: int, end: int) -> Payload:
        """Lazy copies. Raises TokensNotHeld."""
        views = self.views(start, end)
        cells = Cells(self.layers, 0, [(start - self.first, end - self.first)])
        payloads = gathered(cells) if gathers() else None
        return payloads[0] if payloads else stacked(views)

    def trim(self, first: int, end: int) -> None:
        """Keep only tokens [first, end). One layer at a time: there is no memory for a second slab."""
        for i, arrays in enumerate(self.layers):
            a, b = first - self.first, end - self.first
            kept = tuple(None if x is None else array_copy(x[..., a:b, :]) for x in arrays)
            evaluate_layers([kept])
            self.layers[i] = kept
        self.first, self.end = first, end
        self._measure()


class RowPages(InRow):
    """The pages of one row, live or parked. Its records belong to one chain of blocks."""

    __slots__ = ("_changed", "_ends", "_layout", "_slab", "_starts", "chain", "n_gathered", "row")

    def __init__(self, layout: Layout, changed: set[RowPages]) -> None:
        """changed: where it notes that what it takes has changed."""
        super().__init__()
        self._layout = layout
        self._changed = changed
        self.row: LiveRow | None = None
        self._slab: Slab | None = None
        self.chain: Node | None = None
        """The last whole block that the row holds, whether or not its records are in this row."""
        self.n_gathered = 0
        """Up to here, `gather` has brought the records of its chain into this row."""
        self._starts: list[int] = []
        self._ends: list[int] = []
        """Where its records start and end, sorted."""

    @property
    def slab(self) -> Slab | None:
        """Its buffers, while it is parked."""
        return self._slab

    @slab.setter
    def slab(self, slab: Slab | None) -> None:
        self._slab = slab
        self._changed.add(self)

    @property
    def first(self) -> int:
        """Where its first record starts."""
        return self._starts[0] if self._starts else 0

    @property
    def end(self) -> int:
        """Where its last record ends."""
        return self._ends[-1] if self._ends else 0

    def add(self, record: Record) -> None:
        super().add(record)
        insort(self._starts, record.node.start)
        insort(self._ends, record.node.end)
        self._changed.add(self)

    def discard(self, record: Record) -> None:
        super().discard(record)
        del self._starts[bisect_left(self._starts, record.node.start)]
        del self._ends[bisect_left(self._ends, record.node.end)]
        self._changed.add(self)

    @property
    def is_available(self) -> bool:
        return self.slab is not None or (self.row is not None and self.row.is_live)

    def holds(self, node: Node) -> bool:
        """Whether it has the tokens of this node, which must be in its chain."""
        slab = self.slab
        return slab is None or (slab.first <= node.start and node.end <= slab.end)

    def views(self, start: int, end: int) -> Views:
        if self.slab is not None:
            return Views(self.slab.views(start, end))
        assert self.row is not None, "the row is gone"
        view = self.row.view()
        return Views(self._layout.views(Part.PAGES, view.layers, view.at, start, end))

    def cut(self, start: int, end: int) -> Payload:
        """Lazy copies: they must be computed before the row continues."""
        if self.slab is not None:
            return self.slab.cut(start, end)
        assert self.row is not None, "the row is gone"
        view = self.row.view()
        return self._layout.cut(Part.PAGES, view.layers, view.at, start, end)


def payload_of(record: Record) -> Payload:
    """What memory holds of a record; a lazy copy if it is in a row."""
    arrays: Payload | RowPages = record.arrays
    if isinstance(arrays, RowPages):
        return arrays.cut(record.node.start, record.node.end)
    return arrays


def wait_for_row(record: Record) -> None:
    """Wait for the row's dispatched work, where cutting the record would wait for it, too.

    Otherwise that time would count as spilling.
    """
    if not copies_are_awaited():
        return
    pages = record.arrays
    if isinstance(pages, RowPages) and pages.row is not None and pages.row.is_live:
        evaluate_layers(pages.views(record.node.start, record.node.end).layers)


class LiveRows:
    """All rows that hold records. `Parking` moves them from one of these tables to another.

    What rows take beyond their records is kept as a sum: only rows that have changed are looked at.
    """

    def __init__(self, tree: Tree, ledger: Ledger) -> None:
        self._tree = tree
        self._ledger = ledger
        self.live: dict[LiveRow, RowPages] = {}
        self.parked: dict[RowPages, None] = {}
        self.moving: dict[RowPages, None] = {}
        """Neither live nor parked: their buffers are being taken over by a new row."""
        self.unconfirmed: dict[RowPages, None] = {}
        """Parked since the device was last confirmed to have had no fault."""
        self._changed: set[RowPages] = set()
        self._n_detached = 0
        """How many roots had been cleared when the rows were last counted."""
        self._extra: dict[RowPages, int] = {}
        self._extra_nbytes = 0
        self._spare: dict[RowPages, int] = {}
        """What trimming a parked row would free, where that is worth the copy."""
        self._spare_nbytes = 0
        self._useless: dict[RowPages, None] = {}
        """Parked rows without records, or without buffers."""
        self._to_gather: dict[RowPages, None] = {}
        """Rows that may hold tokens whose records are in parked rows, the last one parked last."""

    def of(self, row: LiveRow, layout: Layout, *, chain: Node | None = None) -> RowPages:
        pages = self.live.get(row)
        if pages is None:
            pages = self.live[row] = RowPages(layout, self._changed)
            pages.row = row
        pages.chain = chain or pages.chain
        self._gather_later(pages)
        return pages

    def knows(self, pages: RowPages) -> bool:
        is_live = pages.row is not None and self.live.get(pages.row) is pages
        return is_live or pages in self.parked or pages in self.moving

    def every(self) -> Iterator[RowPages]:
        yield from self.live.values()
        yield from self.parked
        yield from self.moving

    # --- from one table to another ---------------------------------------------------------

    def park(self, pages: RowPages, slab: Slab) -> None:
        """The row has ended, and these are its buffers."""
        pages.slab = slab
        self.parked[pages] = self.unconfirmed[pages] = None
        self._gather_later(pages)

    def start_moving(self, pages: RowPages) -> None:
        """A new row is about to take over the buffers of a parked one."""
        del self.parked[pages]
        self.moving[pages] = None
        self._changed.add(pages)

    def has_moved(self, pages: RowPages, row: LiveRow) -> None:
        """The new row exists, and holds the buffers now."""
        self.moving.pop(pages, None)
        self.unconfirmed.pop(pages, None)
        pages.row = row
        self.live[row] = pages

    def forget(self, pages: RowPages) -> None:
        """Forget a row that holds no records any more."""
        assert not pages.records
        for table in (self.parked, self.moving, self.unconfirmed, self._to_gather):
            table.pop(pages, None)
        if pages.row is not None and self.live.get(pages.row) is pages:
            del self.live[pages.row]
        pages.row = pages.slab = None

    # --- tokens that several rows hold ------------------------------------------------------

    def gather(self) -> None:
        """Where several rows hold the same tokens, leave their records to a live row, which takes no
        memory, or else to the row parked last: the others can then be trimmed.

        Not done before memory is needed: a parked row that is whole is continued without a copy.
        """
        rows, self._to_gather = self._to_gather, {}
        for pages in sorted(rows, key=lambda p: p.row is not None):
            if pages.is_available and pages.chain is not None:
                self._gather(pages, pages.chain)

    def _gather_later(self, pages: RowPages) -> None:
        self._to_gather.pop(pages, None)
        self._to_gather[pages] = None
        while len(self._to_gather) > N_GATHERED:
            del self._to_gather[next(iter(self._to_gather))]

    def _gather(self, pages: RowPages, chain: Node) -> None:
        for node in chain.path():
            if node.end <= pages.n_gathered:
                break
            record = node.records.get(Part.PAGES)
            if record is None or record.leaving or node.n_pins or not pages.holds(node):
                continue
            if isinstance(record.arrays, RowPages) and record.arrays in self.parked:
                self._ledger.move(record, pages)
        pages.n_gathered = chain.end

    # --- what they take --------------------------------------------------------------------

    @property
    def extra_nbytes(self) -> int:
        """Bytes that memory takes beyond those of its records.

        Negative for records in live rows, whose memory is counted with the request. Positive for
        parked rows: room, and tokens whose records are elsewhere.
        """
        self._recount()
        return self._extra_nbytes

    @property
    def spare_nbytes(self) -> int:
        """How much of that `trim_oldest` can free."""
        self._recount()
        return self._spare_nbytes

    def useless(self) -> list[RowPages]:
        """Parked rows that have lost their buffers or their last record."""
        self._recount()
        return list(self._useless)

    def _recount(self) -> None:
        if self._n_detached != self._tree.n_detached:  # totals have lost the records of some rows
            self._n_detached = self._tree.n_detached
            self._changed.update(self.every())
        while self._changed:
            pages = self._changed.pop()
            is_parked = pages in self.parked
            extra, spare = self._measure(pages, is_parked=is_parked)
            self._extra_nbytes += extra - self._extra.pop(pages, 0)
            self._spare_nbytes += spare - self._spare.pop(pages, 0)
            if extra:
                self._extra[pages] = extra
            if spare:
                self._spare[pages] = spare
            if is_parked and (pages.slab is None or not pages.records):
                self._useless[pages] = None
            else:
                self._useless.pop(pages, None)

    def _measure(self, pages: RowPages, *, is_parked: bool) -> tuple[int, int]:
        """What it takes beyond its records, and what trimming it would free."""
        first = next(iter(pages.records), None)
        if first is None or not self._tree.is_attached(first.node.root):
            return 0, 0
        slab = pages.slab
        if slab is None or not is_parked:
            return -pages.nbytes, 0
        n_spare = slab.n_room - (pages.end - pages.first)
        is_worth_it = n_spare > slab.n_room * SPARE_SHARE
        spare = slab.nbytes // slab.n_room * n_spare if is_worth_it else 0
        return slab.nbytes - pages.nbytes, spare

    def view(self) -> dict[str, Any]:
        """For people. The bytes of live rows are in the memory of requests, not in the cache's."""
        in_slabs = sum(p.slab.nbytes for p in self.parked if p.slab is not None)
        return {
            "live": {"rows": len(self.live), "bytes": sum(p.nbytes for p in self.live.values())},
            "parked": {"rows": len(self.parked), "bytes": in_slabs},
        }

    # --- giving memory back ----------------------------------------------------------------

    def may_evict(self, record: Record) -> bool:
        """Whether evicting it frees memory: not while it is in a live row."""
        return not isinstance(record.arrays, RowPages) or record.arrays in self.parked

    def own(self, record: Record) -> None:
        """Give the record its own arrays, if it is in a row."""
        if isinstance(record.arrays, RowPages):
            payload = payload_of(record)
            evaluate([payload])
            self._ledger.move(record, payload)

    def n_to_give(self, pages: RowPages) -> int:
        """How many tokens must be evicted from its end until trimming is worth the copy."""
        slab = pages.slab
        if slab is None or not pages.records:
            return 0
        n_spare = slab.n_room - (pages.end - pages.first)
        return max(int(slab.n_room * GIVEN_SHARE) + 1 - n_spare, 0)

    def trim_oldest(self) -> bool:
        """Trim the least recently used parked row that is worth it. False: there is none."""
        self._recount()
        if not self._spare:
            return False
        pages = min(self._spare, key=_last_use)
        self._trim(pages, pages.first)
        return True

    def forget_empty(self) -> None:
        """Free parked rows that have lost their last record."""
        for pages in self.useless():
            if not pages.records:
                self.forget(pages)

    def trim(self) -> None:
        """Free what is far too much of parked rows, whether or not memory is needed."""
        self.forget_empty()
        for pages in list(self._spare):
            slab = pages.slab
            if slab is not None and self._is_wasteful(slab, pages.end):
                self._trim(pages, slab.first)

    def _is_wasteful(self, slab: Slab, end: int) -> bool:
        n_most = max(int(slab.n_room * WASTED_SHARE), LEAST_BLOCKS * self._tree.block)
        return slab.n_room - (end - slab.first) > n_most

    def _trim(self, pages: RowPages, first: int) -> None:
        """If trimming fails, the row is left without a slab, and the next sweep drops it."""
        slab, pages.slab = pages.slab, None
        assert slab is not None
        slab.trim(first, pages.end)
        pages.slab = slab


def _last_use(pages: RowPages) -> float:
    """When the row's own conversation was last used: others may use what it begins with."""
    return next(reversed(pages.records)).node.used_at
