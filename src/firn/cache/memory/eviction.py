"""The memory tier: which records are held as arrays, under a limit in bytes.

The least recently used record is evicted first (see tree/order.py). Last uses move forward, so the heap
may hold outdated times, and a record that was used since is put back. They move back only for what a
chain has left behind, which is queued once more.
Records that are leased or pinned are set aside until a lease or a pin ends.

States have a share of memory: beyond it, a new state evicts other states, not pages.

Owner: the engine thread, through `Records`.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count

from firn.cache.ledger import Ledger
from firn.cache.memory.rows import LiveRows, RowPages
from firn.cache.parts import Part
from firn.cache.tree import EvictionOrder, Record, Tree

STATE_SHARE = 0.5
"""The share of memory that states may take."""
ALONG_S = 60.0
"""When a parked row gives memory back, blocks last used within this time are evicted together."""


class MemoryTier:
    def __init__(
        self,
        tree: Tree,
        ledger: Ledger,
        rows: LiveRows,
        *,
        limit_nbytes: int,
        evict: Callable[[Record], None],
    ) -> None:
        """evict: takes a record out of memory."""
        self._tree = tree
        self._ledger = ledger
        self._rows = rows
        self._evict = evict
        self._all = EvictionQueue(tree.order)
        self._states = StateQueue(tree.order)
        self._set_aside: dict[Record, None] = {}
        """Records of either queue that may not be evicted for now."""
        self._try_again = False
        self.limit_nbytes = limit_nbytes

    @property
    def nbytes(self) -> int:
        return self._ledger.memory.total_nbytes + self._rows.extra_nbytes

    def added(self, record: Record) -> None:
        """Memory now holds the record; room was made before."""
        self._queue(record)
        behind = self._tree.order.left_behind(record)
        if behind is not None and behind.arrays is not None:
            self._queue(behind)  # from now on it is evicted sooner
        n_held = self._ledger.memory.total_records
        self._all.tidy(n_held)
        self._states.tidy(n_held)

    def _queue(self, record: Record) -> None:
        self._all.push(record)
        if record.part is Part.STATE:
            self._states.push(record)

    def make_room(self, nbytes: int, *, part: Part) -> bool:
        """Evict until `nbytes` more fit; False when what is left may not be evicted."""
        if not self.fits_alone(nbytes, part=part):
            return False
        if part is Part.STATE:
            while self._ledger.memory.nbytes[Part.STATE] + nbytes > self._state_limit_nbytes:
                if not self._evict_next(self._states):
                    return False
        return self.shrink_to(self.limit_nbytes - nbytes)

    def fits_alone(self, nbytes: int, *, part: Part) -> bool:
        """Whether `nbytes` would fit if memory held nothing else."""
        limit = self._state_limit_nbytes if part is Part.STATE else self.limit_nbytes
        return nbytes <= limit

    @property
    def _state_limit_nbytes(self) -> int:
        return int(self.limit_nbytes * STATE_SHARE)

    def shrink_to(self, nbytes: int) -> bool:
        """Make memory hold at most `nbytes`: evict only what trimming parked rows cannot spare.

        Rows are trimmed last, each once: a row that gives many records is copied when all are gone.
        """
        if self.nbytes - self._rows.spare_nbytes > nbytes:
            self._rows.gather()
        while self.nbytes - self._rows.spare_nbytes > nbytes and self._evict_next(self._all):
            pass
        self._rows.forget_empty()
        while self.nbytes > nbytes and self._rows.trim_oldest():
            pass
        return self.nbytes <= nbytes

    def let_go(self) -> None:
        """A lease or a pin has ended: some of what was set aside may be evicted now."""
        self._try_again = True

    def _queue_again(self) -> None:
        self._try_again = False
        records, self._set_aside = self._set_aside, {}
        for record in records:
            if record.arrays is None or not record.alive:
                continue
            if self._may_evict(record):
                self.added(record)
            else:
                self._set_aside[record] = None

    def _evict_next(self, queue: EvictionQueue) -> bool:
        """Evict the least recently used record; False when none may be evicted."""
        if self._try_again:
            self._queue_again()
        while (record := queue.pop()) is not None:
            if self._may_evict(record):
                pages = record.arrays
                self._evict(record)
                if isinstance(pages, RowPages):
                    self._evict_along(pages, self._tree.order.last_use(record))
                return True
            self._set_aside[record] = None
        return False

    def _may_evict(self, record: Record) -> bool:
        return self._tree.may_evict(record) and self._rows.may_evict(record)

    def _evict_along(self, pages: RowPages, last_use: float) -> None:
        """Evict more of a parked row: trimming copies what stays of it, and should be rare."""
        n_to_give = self._rows.n_to_give(pages)
        if not n_to_give:
            return
        end = pages.end - n_to_give
        for record in sorted(pages.records, key=lambda r: -r.node.end):
            if record.node.end <= end or self._tree.order.last_use(record) > last_use + ALONG_S:
                return
            if record not in pages.records:
                continue
            if not self._may_evict(record) or carries(record):
                return
            self._evict(record)


def carries(record: Record) -> bool:
    """Whether memory holds a block that needs this one."""
    below = (r for child in record.node.children for r in child.records.values())
    return any(r.arrays is not None and not r.leaving for r in below)


class EvictionQueue:
    """Records by last use, at equal times by turn. May contain a record twice."""

    def __init__(self, order: EvictionOrder) -> None:
        self._order = order
        self._heap: list[tuple[float, int, int, Record]] = []
        self._serial = count()

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, record: Record) -> None:
        turn, serial = self._order.turn(record), next(self._serial)
        heapq.heappush(self._heap, (self._last_use(record), turn, serial, record))

    def pop(self) -> Record | None:
        """The least recently used record that memory still holds; None when there is none."""
        while self._heap:
            last_use, *_, record = heapq.heappop(self._heap)
            if record.arrays is None or record.leaving or not record.alive:
                continue
            if self._last_use(record) <= last_use:
                return record
            self.push(record)  # it was used since
        return None

    def _last_use(self, record: Record) -> float:
        return self._order.last_use(record)

    def tidy(self, n_held: int) -> None:
        """Drop entries of records that are gone, before they outnumber the others."""
        if len(self._heap) > 64 + 4 * n_held:
            live = dict.fromkeys(r for *_, r in self._heap if r.arrays is not None and r.alive)
            self._heap.clear()
            for record in live:
                self.push(record)


class StateQueue(EvictionQueue):
    """States by how soon they should give way to other states."""

    def _last_use(self, record: Record) -> float:
        return self._order.state_last_use(record)
