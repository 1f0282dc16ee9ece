"""The live tier: pages that lie in a row, in the place of records that were cut out of it.

The blocks of a running row are known to the tree and lie in the row. A row that ends is parked as it is,
and the next turn of its conversation goes on in its buffers. So a conversation costs its memory once.

    live    row    read through the row, wherever that is: alone, or in a seat of a group
    parked  slab   the buffers of a row that has ended: tokens [first, end), and some room behind them

A view of a buffer makes the next write to it copy all of it: none may outlive the call that made it.

Owner: the engine thread, through the prefix cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from firn.cache.arrays.payload import Payload, Views, array_copy, compute, evaluate, stacked
from firn.cache.codecs import TOKEN_AXIS, Arrays, At, nbytes_of
from firn.cache.layout import Layout
from firn.cache.parts import Part
from firn.cache.tree import InRow, Node, Record, Tree
from firn.core.ports import LiveRow

LEAST_BLOCKS = 4
"""Shorter rows have their blocks cut out at once: their buffers are mostly room, and there are many."""
TRIM_SHARE = 0.25
"""Of a slab: so much of it must be of no use before it is worth a copy of the rest, and at least as
much as the shortest slab. A little room is what the next turn goes on in."""


@dataclass(eq=False, slots=True)
class Slab:
    """Buffers of the layers that have pages, each with a token axis: tokens [first, end)."""

    layers: list[Arrays]
    first: int
    end: int
    nbytes: int = 0
    n_room: int = 0
    """Tokens that fit it."""

    def __post_init__(self) -> None:
        present = (a for arrays in self.layers for a in arrays if a is not None)
        self.n_room = int(next(present).shape[TOKEN_AXIS])
        self.nbytes = sum(map(nbytes_of, self.layers))

    def views(self, start: int, end: int) -> list[Arrays]:
        a, b = start - self.first, end - self.first
        return [
            tuple(None if x is None else x[..., a:b, :] for x in arrays) for arrays in self.layers
        ]

    def trim(self, first: int, end: int) -> None:
        """Keep tokens [first, end) alone. A layer at a time: there is no room for a second slab."""
        for i, arrays in enumerate(self.layers):
            a, b = first - self.first, end - self.first
            kept = tuple(None if x is None else array_copy(x[..., a:b, :]) for x in arrays)
            compute([kept])
            self.layers[i] = kept
        self.first, self.end = first, end
        self.__post_init__()


class RowPages(InRow):
    """The pages of one row, live or parked. Its records are of one chain of blocks."""

    __slots__ = ("_end", "_layout", "chain", "row", "slab")

    def __init__(self, layout: Layout) -> None:
        super().__init__()
        self._layout = layout
        self.row: LiveRow | None = None
        self.slab: Slab | None = None
        self.chain: Node | None = None
        """The last whole block that the row holds, whether or not any record of its chain lies in it."""
        self._end = 0

    @property
    def end(self) -> int:
        """Of its last record."""
        if self._end < 0:
            self._end = max((r.node.end for r in self.records), default=0)
        return self._end

    def add(self, record: Record) -> None:
        super().add(record)
        self._end = max(self.end, record.node.end)

    def discard(self, record: Record) -> None:
        super().discard(record)
        if record.node.end >= self._end:
            self._end = -1  # to be found when somebody asks

    @property
    def is_there(self) -> bool:
        return self.slab is not None or (self.row is not None and self.row.is_live)

    def holds(self, node: Node) -> bool:
        """Whether it has the tokens of this node of its chain."""
        slab = self.slab
        return slab is None or (slab.first <= node.start and node.end <= slab.end)

    def views(self, start: int, end: int) -> Views:
        if self.slab is not None:
            return Views(self.slab.views(start, end))
        assert self.row is not None, "the row is gone"
        at = At(self.row.index, self.row.n_tokens)
        return Views(self._layout.views(Part.PAGES, self.row.live_layers, at, start, end))

    def cut(self, start: int, end: int) -> Payload:
        """Arrays of their own, lazily: to be computed at once."""
        return stacked(self.views(start, end).layers)


def payload_of(record: Record) -> Payload:
    """What memory holds of a record, as arrays of its own: where it lies in a row, lazily and for a
    moment."""
    held = record.arrays
    if isinstance(held, RowPages):
        return held.cut(record.node.start, record.node.end)
    payload: Payload = held
    return payload


def wait_for_row(record: Record) -> None:
    """Until what its row was dispatched is done: a cut would wait for that, too, and seem slow."""
    pages = record.arrays
    if isinstance(pages, RowPages) and pages.row is not None and pages.row.is_live:
        compute(pages.views(record.node.start, record.node.end).layers)


class LiveRows:
    """Every row that records lie in."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self.live: dict[LiveRow, RowPages] = {}
        self.parked: dict[RowPages, None] = {}
        self.moving: dict[RowPages, None] = {}
        """Neither: their buffers are on the way to a new row."""
        self.unconfirmed: dict[RowPages, None] = {}
        """Parked since the device was last known to have had no fault."""

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
        """What memory takes beyond the bytes of its records.

        Less than nothing for those in live rows, whose memory is the request's. For those in parked
        rows what these hold besides: room, and tokens whose records lie elsewhere.
        """
        counted = [p for p in self.every() if self._is_counted(p)]
        return sum(self._nbytes_of_use(p) - p.nbytes for p in counted)

    def _is_counted(self, pages: RowPages) -> bool:
        """Not what is cleared: the tree's books know it no more."""
        first = next(iter(pages.records), None)
        return first is not None and self._tree.is_attached(first.node.root)

    def view(self) -> dict[str, Any]:
        """For people. Of `used_bytes` the first are in requests' memory, not in the cache's."""
        in_slabs = sum(p.slab.nbytes for p in self.parked if p.slab is not None)
        return {
            "live": {"rows": len(self.live), "bytes": sum(p.nbytes for p in self.live.values())},
            "parked": {"rows": len(self.parked), "bytes": in_slabs},
        }

    # --- giving way ------------------------------------------------------------------------

    def may_go(self, record: Record) -> bool:
        """Whether memory gains anything by it: not where it lies in a live row."""
        return not isinstance(record.arrays, RowPages) or record.arrays in self.parked

    def own(self, record: Record) -> None:
        """Give it arrays of its own."""
        if isinstance(record.arrays, RowPages):
            payload = payload_of(record)
            evaluate([payload])
            self._tree.move(record, payload)

    def n_to_give(self, pages: RowPages) -> int:
        """How many tokens of its end must go until the rest is worth a copy."""
        slab = pages.slab
        if slab is None or not pages.records:
            return 0
        n_spare = slab.n_room - (pages.end - slab.first)
        return max(self._n_worth(slab) + 1 - n_spare, 0)

    def compact(self) -> bool:
        """Let go of what a parked row holds of others' records; one row, the least recently used."""
        found = [p for p in self.parked if p.records and self._holds_more(p)]
        if not found:
            return False
        pages = min(found, key=lambda p: max(r.node.used_at for r in p.records))
        self._trim(pages, _first_of(pages), pages.end)
        return True

    def _trim(self, pages: RowPages, first: int, end: int) -> None:
        """One that is trimmed by halves has no slab any more: it is dropped with the next sweep."""
        slab, pages.slab = pages.slab, None
        assert slab is not None
        slab.trim(first, end)
        pages.slab = slab

    def _holds_more(self, pages: RowPages) -> bool:
        """Whether many tokens at its front have their records elsewhere."""
        slab = pages.slab
        return slab is not None and _first_of(pages) - slab.first > self._n_worth(slab)

    def trim(self) -> None:
        """Take out of parked rows what nobody needs any more."""
        for pages in list(self.parked):
            if not pages.records:
                self.forget(pages)
            elif pages.slab is not None and self._is_wasteful(pages.slab, pages.end):
                self._trim(pages, pages.slab.first, pages.end)

    def _is_wasteful(self, slab: Slab, end: int) -> bool:
        return slab.n_room - (end - slab.first) > self._n_worth(slab)

    def _n_worth(self, slab: Slab) -> int:
        return max(int(slab.n_room * TRIM_SHARE), LEAST_BLOCKS * self._tree.block)

    def _nbytes_of_use(self, pages: RowPages) -> int:
        """What a parked row takes, or will once it is trimmed; nothing for a live one."""
        slab = pages.slab
        if slab is None or pages not in self.parked:
            return 0
        nbytes, end = slab.nbytes, pages.end
        if not self._is_wasteful(slab, end):
            return nbytes
        return nbytes // slab.n_room * (end - slab.first)

    def forget(self, pages: RowPages) -> None:
        """No record lies in it any more."""
        assert not pages.records
        for table in (self.parked, self.moving, self.unconfirmed):
            table.pop(pages, None)
        if pages.row is not None and self.live.get(pages.row) is pages:
            del self.live[pages.row]
        pages.row = pages.slab = None


def _first_of(pages: RowPages) -> int:
    return min(r.node.start for r in pages.records)
