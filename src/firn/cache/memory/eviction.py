"""The memory tier: which records are held as arrays, under a limit in bytes.

Eviction goes by the tree's rank, lowest first. A rank only grows while nothing goes on from a record, so
the heap holds ranks as they were, and a record whose rank has grown since is put back. What is leased or
pinned is set aside until something is let go of.

States have a share of their own: they are thinned before any page has to give way to them.

Owner: the engine thread, through the prefix cache.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from itertools import count

from firn.cache.memory.rows import LiveRows, RowPages
from firn.cache.parts import Part
from firn.cache.tree import Record, Tree

STATE_SHARE = 0.5
ALONG_S = 60.0
"""Blocks of one row that were used no later than so much after its last go with that."""


class Memory:
    def __init__(
        self,
        tree: Tree,
        rows: LiveRows,
        *,
        limit_nbytes: int,
        evict: Callable[[Record], None],
    ) -> None:
        """`evict` takes a record out of memory."""
        self._tree = tree
        self._rows = rows
        self._evict = evict
        self._all = Order(tree.order.rank)
        self._states = Order(tree.order.state_rank)
        self._kept: dict[Record, None] = {}
        """What may not go for now, of either order."""
        self._look_again = False
        self.limit_nbytes = limit_nbytes

    @property
    def nbytes(self) -> int:
        return self._tree.memory.total_nbytes + self._rows.extra_nbytes

    def added(self, record: Record) -> None:
        """The tree holds it from now on. Room was made before."""
        self._all.push(record)
        if record.part is Part.STATE:
            self._states.push(record)
        n_held = self._tree.memory.total_records
        self._all.tidy(n_held)
        self._states.tidy(n_held)

    def make_room(self, nbytes: int, *, part: Part) -> bool:
        """Evict until `nbytes` more fit; False when what is left may not go."""
        if nbytes > self.limit_nbytes:
            return False
        if part is Part.STATE:
            allowed = int(self.limit_nbytes * STATE_SHARE)
            while self._tree.memory.nbytes[Part.STATE] + nbytes > allowed:
                if nbytes > allowed or not self._evict_next(self._states):
                    return False
        return self.shrink_to(self.limit_nbytes - nbytes)

    def shrink_to(self, nbytes: int) -> bool:
        """Evict until at most `nbytes` are held; what parked rows hold twice goes first."""
        fits = self.nbytes <= nbytes
        if fits:
            return True
        while not fits and (self._rows.compact() or self._evict_next(self._all)):
            fits = self.nbytes <= nbytes
        self._rows.trim()
        return fits

    def let_go(self) -> None:
        """A lease or a pin ended: what was set aside may be able to go."""
        self._look_again = True

    def _take_back(self) -> None:
        self._look_again = False
        kept, self._kept = self._kept, {}
        for record in kept:
            if record.arrays is not None and record.alive:
                self.added(record)

    def _evict_next(self, order: Order) -> bool:
        """Evict the lowest-ranked; False when none may go."""
        if self._look_again:
            self._take_back()
        while (record := order.pop()) is not None:
            if self._may_go(record):
                pages = record.arrays
                self._evict(record)
                if isinstance(pages, RowPages):
                    self._evict_along(pages, self._tree.order.rank(record))
                return True
            self._kept[record] = None
        return False

    def _may_go(self, record: Record) -> bool:
        return self._tree.may_evict(record) and self._rows.may_go(record)

    def _evict_along(self, pages: RowPages, rank: float) -> None:
        """A parked row gives memory back a good part at a time, for the rest of it is copied then."""
        n_to_give = self._rows.n_to_give(pages)
        end = pages.end - n_to_give
        for record in sorted(pages.records, key=lambda r: -r.node.end):
            if record.node.end <= end or self._tree.order.rank(record) > rank + ALONG_S:
                return
            if record not in pages.records:
                continue
            if not self._may_go(record) or carries(record):
                return
            self._evict(record)


def carries(record: Record) -> bool:
    """Whether memory holds something that goes on from it."""
    below = (r for child in record.node.children for r in child.records.values())
    return any(r.arrays is not None and not r.leaving for r in below)


class Order:
    """Records by rank, lowest first, and deepest first of equals. A record may be in it twice."""

    def __init__(self, rank: Callable[[Record], float]) -> None:
        self._rank = rank
        self._heap: list[tuple[float, int, int, Record]] = []
        self._serial = count()

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, record: Record) -> None:
        depth = record.node.start
        heapq.heappush(self._heap, (self._rank(record), -depth, next(self._serial), record))

    def pop(self) -> Record | None:
        """The lowest of those that memory holds; one whose rank has grown since goes back."""
        while self._heap:
            rank, *_, record = heapq.heappop(self._heap)
            if record.arrays is None or record.leaving or not record.alive:
                continue
            if self._rank(record) <= rank:
                return record
            self.push(record)
        return None

    def tidy(self, n_held: int) -> None:
        """Throw out what is long gone, before it is more than what is there."""
        if len(self._heap) > 64 + 4 * n_held:
            live = dict.fromkeys(r for *_, r in self._heap if r.arrays is not None and r.alive)
            self._heap.clear()
            for record in live:
                self.push(record)
