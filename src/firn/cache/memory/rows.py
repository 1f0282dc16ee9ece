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
from firn.cache.codecs import TOKEN_AXIS, Arrays, At, nbytes_of
from firn.cache.layout import Layout
from firn.cache.parts import Part
from firn.cache.tree import InRow, Node, Record, Tree
from firn.core.ports import LiveRow

LEAST_BLOCKS = 4
"""Shorter rows are cut into records: there are many of them, and their buffers are mostly room."""
TRIM_SHARE = 0.25
"""A slab is trimmed, which copies the rest of it, once more than this share and more than
LEAST_BLOCKS blocks of it are unused. Less is left as room for the next turn."""


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
        a, b = start - self.first, end - self.first
        return [
            tuple(None if x is None else x[..., a:b, :] for x in arrays) for arrays in self.layers
        ]

    def cut(self, start: int, end: int) -> Payload:
        """Lazy copies."""
        cells = Cells(self.layers, 0, [(start - self.first, end - self.first)])
        payloads = gathered(cells) if gathers() else None
        return payloads[0] if payloads else stacked(self.views(start, end))

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

    __slots__ = ("_end", "_layout", "chain", "row", "slab")

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self._layout = layout
        self.row: LiveRow | None = None
        self.slab: Slab | None = None
        self.chain: Node | None = None
        """The last whole block that the row holds, whether or not its records are in this row."""
        self._end = 0

    @property
    def end(self) -> int:
        """Where its last record ends."""
        if self._end < 0:
            self._end = max((r.node.end for r in self.records), default=0)
        return self._end

    def add(self, record: Record) -> None:
        super().add(record)
        self._end = max(self.end, record.node.end)

    def discard(self, record: Record) -> None:
        super().discard(record)
        if record.node.end >= self._end:
            self._end = -1  # computed on demand

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
        at = At(self.row.index, self.row.n_tokens)
        return Views(self._layout.views(Part.PAGES, self.row.live_layers, at, start, end))

    def cut(self, start: int, end: int) -> Payload:
        """Lazy copies: they must be computed before the row continues."""
        if self.slab is not None:
            return self.slab.cut(start, end)
        assert self.row is not None, "the row is gone"
        at = At(self.row.index, self.row.n_tokens)
        return self._layout.cut(Part.PAGES, self.row.live_layers, at, start, end)


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
    """All rows that hold records. `Parking` moves them from one of these tables to another."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self.live: dict[LiveRow, RowPages] = {}
        self.parked: dict[RowPages, None] = {}
        self.moving: dict[RowPages, None] = {}
        """Neither live nor parked: their buffers are being taken over by a new row."""
        self.unconfirmed: dict[RowPages, None] = {}
        """Parked since the device was last confirmed to have had no fault."""

    def of(self, row: LiveRow, layout: Layout, *, chain: Node | None = None) -> RowPages:
        pages = self.live.get(row)
        if pages is None:
            pages = self.live[row] = RowPages(layout)
            pages.row = row
        pages.chain = chain or pages.chain
        return pages

    def every(self) -> Iterator[RowPages]:
        yield from self.live.values()
        yield from self.parked
        yield from self.moving

    @property
    def extra_nbytes(self) -> int:
        """Bytes that memory takes beyond those of its records.

        Negative for records in live rows, whose memory is counted with the request. Positive for
        parked rows: room, and tokens whose records are elsewhere.
        """
        counted = [p for p in self.every() if self._is_counted(p)]
        return sum(self._used_nbytes(p) - p.nbytes for p in counted)

    def _is_counted(self, pages: RowPages) -> bool:
        """Whether the tree's totals contain it; not once it was cleared."""
        first = next(iter(pages.records), None)
        return first is not None and self._tree.is_attached(first.node.root)

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
            self._tree.move(record, payload)

    def n_to_give(self, pages: RowPages) -> int:
        """How many tokens must be evicted from its end until trimming is worth the copy."""
        slab = pages.slab
        if slab is None or not pages.records:
            return 0
        n_spare = slab.n_room - (pages.end - slab.first)
        return max(self._n_worth_trimming(slab) + 1 - n_spare, 0)

    def compact(self) -> bool:
        """Trim the least recently used parked row with a wasteful front. False: there is none."""
        trimmable = [p for p in self.parked if p.records and self._is_wasteful_in_front(p)]
        if not trimmable:
            return False
        pages = min(trimmable, key=lambda p: max(r.node.used_at for r in p.records))
        self._trim(pages, _first_of(pages), pages.end)
        return True

    def _trim(self, pages: RowPages, first: int, end: int) -> None:
        """If trimming fails, the row is left without a slab, and the next sweep drops it."""
        slab, pages.slab = pages.slab, None
        assert slab is not None
        slab.trim(first, end)
        pages.slab = slab

    def _is_wasteful_in_front(self, pages: RowPages) -> bool:
        """Whether the records of many tokens at its front are elsewhere."""
        slab = pages.slab
        return slab is not None and _first_of(pages) - slab.first > self._n_worth_trimming(slab)

    def trim(self) -> None:
        """Free what is no longer needed of parked rows."""
        for pages in list(self.parked):
            if not pages.records:
                self.forget(pages)
            elif pages.slab is not None and self._is_wasteful(pages.slab, pages.end):
                self._trim(pages, pages.slab.first, pages.end)

    def _is_wasteful(self, slab: Slab, end: int) -> bool:
        return slab.n_room - (end - slab.first) > self._n_worth_trimming(slab)

    def _n_worth_trimming(self, slab: Slab) -> int:
        """How many unused tokens are worth a copy of the rest."""
        return max(int(slab.n_room * TRIM_SHARE), LEAST_BLOCKS * self._tree.block)

    def _used_nbytes(self, pages: RowPages) -> int:
        """What a parked row takes, or will take once it is trimmed; 0 for a live row."""
        slab = pages.slab
        if slab is None or pages not in self.parked:
            return 0
        nbytes, end = slab.nbytes, pages.end
        if not self._is_wasteful(slab, end):
            return nbytes
        return nbytes // slab.n_room * (end - slab.first)

    def forget(self, pages: RowPages) -> None:
        """Forget a row that holds no records any more."""
        assert not pages.records
        for table in (self.parked, self.moving, self.unconfirmed):
            table.pop(pages, None)
        if pages.row is not None and self.live.get(pages.row) is pages:
            del self.live[pages.row]
        pages.row = pages.slab = None


def _first_of(pages: RowPages) -> int:
    return min(r.node.start for r in pages.records)
