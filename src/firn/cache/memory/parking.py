"""Parks rows that end; the next turn of their conversation continues in their buffers.

    a row ends            alone: its buffers stay as they are; in a group: they are copied out once;
                          a row of a few blocks is cut into records instead
    the next turn         takes the buffers over, cut back to where the two prompts agree: no copy
    another conversation  copies what it shares; the row stays parked
    after a copy          the records are in the new row, and no longer where they were copied from

A row that leaves without being parked is not trusted: the records in it are forgotten.

Owner: the engine thread, through the prefix cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from firn.cache.arrays.payload import evaluate_layers
from firn.cache.codecs import concat_tokens
from firn.cache.commit import RowCutter
from firn.cache.copies import Copies, CopyOrder
from firn.cache.layout import Layout
from firn.cache.memory.eviction import carries
from firn.cache.memory.rows import LEAST_BLOCKS, RowPages, Slab
from firn.cache.parts import Part
from firn.cache.planning.match import Match
from firn.cache.records import Records
from firn.cache.tree import Node, Record
from firn.core.ports import LiveRow

ROOM_TOKENS = 256
"""Room after what is copied out of a group, so that the next turn need not copy it again."""


class Parking:
    def __init__(
        self, records: Records, layout: Layout, copies: Copies, *, keeps_pages_in_rows: bool
    ) -> None:
        """keeps_pages_in_rows: whether this cache leaves pages in rows."""
        self._records = records
        self._copies = copies
        self._tree = records.tree
        self._ledger = records.ledger
        self._rows = records.rows
        self._layout = layout
        self._keeps_pages_in_rows = keeps_pages_in_rows
        self._block = records.identity.block

    # --- a row ends ------------------------------------------------------------------------

    def end(self, row: LiveRow) -> None:
        """Keep the records in the row, which is about to leave."""
        pages = self._rows.live.pop(row, None)
        if pages is None:
            return
        try:
            if pages.end >= LEAST_BLOCKS * self._block:
                self._park(pages, row)
            elif pages.records:
                self._cut(pages, row)
        finally:
            pages.row = None
            if pages not in self._rows.parked:  # a fault left records in it
                self._drop(pages, "in doubt")
            self._records.memory.let_go()

    def _park(self, pages: RowPages, row: LiveRow) -> None:
        end = pages.end
        layers = row.view().layers
        if self._layout.is_lone(layers):
            buffers = self._layout.take(layers)
        else:
            pad = -end % ROOM_TOKENS + ROOM_TOKENS
            buffers = [concat_tokens([a], pad=pad) for a in pages.views(0, end).layers]
            evaluate_layers(buffers)
        self._rows.park(pages, Slab(buffers, 0, end))
        self._rows.trim()

    def _cut(self, pages: RowPages, row: LiveRow) -> None:
        """Give its records their own arrays.

        No room is made first: the row's own memory is about to be freed, or given to another request.
        If that is not enough, the next new records evict others.
        """
        records = list(pages.records)
        cutter = RowCutter(self._layout, row, min(r.node.start for r in records), pages.end)
        cut = cutter.cut_pages([(r.node.start, r.node.end) for r in records])
        for record, payload in zip(records, cut, strict=True):
            self._ledger.move(record, payload)
        self._copies.compute(CopyOrder(records, are_new=False))

    def move_out(self, row: LiveRow) -> None:
        """Keep the records in the row, which goes on with other tokens behind them."""
        pages = self._rows.live.get(row)
        if pages is not None:
            if pages.records:
                self._cut(pages, row)
            self._rows.forget(pages)

    def abandon(self, pages: RowPages | None) -> None:
        """The row of these leaves, and must not be kept."""
        if pages is not None and pages.row is not None:
            self._drop(pages, "in doubt")

    # --- faults ----------------------------------------------------------------------------

    def sweep(self) -> None:
        """Forget the records of rows that have left, were never made, or could not be trimmed."""
        rows = self._rows
        gone = [p for r, p in rows.live.items() if not r.is_live]
        for pages in [*gone, *rows.useless(), *rows.moving]:
            self._drop(pages, "in doubt")

    def discard_unconfirmed(self) -> None:
        """The device has failed: no row that was written since the last confirmation is trusted."""
        for pages in [*self._rows.live.values(), *self._rows.moving, *self._rows.unconfirmed]:
            self._drop(pages, "in doubt")

    def drop_all(self) -> None:
        """Free the parked rows without a copy: what no tier has of them is lost."""
        rows = self._rows
        for pages in list(rows.parked):  # none takes over what another one holds: all of them go
            self._drop(pages, "no memory", others=[*rows.live.values(), *rows.moving])

    def _drop(self, pages: RowPages, why: str, *, others: Iterable[RowPages] | None = None) -> None:
        """Forget the records in it, the last first, except those that another row holds, too."""
        if pages.records:
            namespace = next(iter(pages.records)).node.root.namespace
            self._move_to(self._rows.every() if others is None else others, pages)
            self._records.counts.dropped(namespace, why, len(pages.records))
            self._records.drop(sorted(pages.records, key=lambda r: -r.node.start))
        self._rows.forget(pages)

    def _move_to(self, others: Iterable[RowPages], pages: RowPages) -> None:
        lost = {r.node: r for r in pages.records}
        for other in others:
            if other is pages or other.chain is None or not other.is_available:
                continue
            for node in other.chain.path():
                if node in lost and other.holds(node):
                    self._ledger.move(lost.pop(node), other)

    # --- the next turn ---------------------------------------------------------------------

    def row_for(self, match: Match) -> RowPages | None:
        """The parked row that a match can continue, if taking it over is cheaper than a copy."""
        record = match.segments[-1].node.records.get(Part.PAGES)
        pages = record.arrays if record is not None else None
        if not isinstance(pages, RowPages) or pages not in self._rows.parked:
            return None
        slab, n = pages.slab, match.n_tokens
        assert slab is not None
        fits = slab.first == 0 and n <= pages.end
        return pages if fits and pages.end - n <= n // 2 else None

    def take(self, pages: RowPages, match: Match) -> Slab:
        """Give up the buffers to a new row. Records beyond the match are cut out of them first."""
        self._rows.start_moving(pages)
        beyond = [r for r in pages.records if r.node.end > match.n_tokens]
        for record in sorted(beyond, key=lambda r: -r.node.end):
            self._save(record)
        slab, pages.slab = pages.slab, None
        assert slab is not None
        return slab

    def _save(self, record: Record) -> None:
        """Save a record from being overwritten. What others need always gets its own arrays."""
        may_go = self._tree.may_evict(record) and not carries(record)
        if record.stored and may_go:
            self._ledger.release(record)
        elif self._records.memory.make_room(record.nbytes, part=record.part) or not may_go:
            self._rows.own(record)
        else:
            self._records.drop([record])

    def was_taken(self, pages: RowPages, row: LiveRow, *, chain: Node) -> None:
        """The new row exists, and holds the buffers now. chain: the last whole block it begins with."""
        pages.chain = chain
        self._rows.has_moved(pages, row)

    # --- after a copy ----------------------------------------------------------------------

    def row_of(self, row: LiveRow, *, chain: Node) -> RowPages | None:
        """A new row, to keep records in; None: they are not kept in rows."""
        return self._rows.of(row, self._layout, chain=chain) if self._keeps_pages_in_rows else None

    def move_in(
        self, pages: RowPages, match: Match, loaded: Mapping[Record, int]
    ) -> Sequence[Record]:
        """Move the records that the row was filled from into the row; returns those that moved.

        loaded: those that memory may not have, and their bytes.
        """
        whole = [s.node for s in match.segments if s.n_tokens == s.node.n_tokens]
        records = [node.records[Part.PAGES] for node in whole if Part.PAGES in node.records]
        moving = [r for r in records if self._moves(r, is_loaded=r in loaded)]
        for record in moving:
            if record.arrays is None:
                self._records.hold(record, pages, nbytes=loaded[record])
            else:
                self._ledger.move(record, pages)
        self._rows.trim()
        return moving

    def leave_old(self, old: RowPages | None, pages: RowPages) -> None:
        """A request has a new row, and its old one will leave: the new one holds the same, and more."""
        if old is not None and old is not pages:
            for record in list(old.records):
                self._ledger.move(record, pages)
            self._rows.forget(old)

    def _moves(self, record: Record, *, is_loaded: bool) -> bool:
        """Whether it moves into the new row. Not if it is pinned, and must survive a fault of that
        row, nor if it is in a row that a turn can still continue."""
        if record.leaving or record.node.n_pins:
            return False
        arrays = record.arrays
        if isinstance(arrays, RowPages):
            return arrays.slab is not None and arrays.slab.first > 0
        return arrays is not None or is_loaded
