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

from firn.cache.parts import Part
from firn.cache.tree import Record, Tree

STATE_SHARE = 0.5
Entry = tuple[float, int, Record]


class Memory:
    def __init__(
        self, tree: Tree, *, limit_nbytes: int, evict: Callable[[Record], None]
    ) -> None:
        """`evict` takes a record out of memory."""
        self._tree = tree
        self._evict = evict
        self._heap: list[Entry] = []
        self._states: list[Entry] = []
        self._kept: list[Entry] = []
        """Of both heaps: what may not go for now."""
        self._serial = count()
        self.limit_nbytes = limit_nbytes

    @property
    def nbytes(self) -> int:
        return self._tree.memory.total_nbytes

    def added(self, record: Record) -> None:
        """The tree holds it from now on. Room was made before."""
        self._push(self._heap, record)
        if record.part is Part.STATE:
            self._push(self._states, record)

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
        """Evict until at most `nbytes` are held."""
        while self.nbytes > nbytes:
            if not self._evict_next(self._heap):
                return False
        return True

    def let_go(self) -> None:
        """A lease or a pin ended: what was set aside may be able to go."""
        for entry in self._kept:
            self._push(self._heap, entry[2])
            if entry[2].part is Part.STATE:
                self._push(self._states, entry[2])
        self._kept = []

    def _evict_next(self, heap: list[Entry]) -> bool:
        """Evict the lowest-ranked; False when none may go."""
        while heap:
            entry = heapq.heappop(heap)
            rank, _, record = entry
            if record.arrays is None or record.leaving or not record.alive:
                continue
            if not self._tree.may_go(record):
                self._kept.append(entry)
            elif self._tree.rank(record) > rank:
                self._push(heap, record)
            else:
                self._evict(record)
                return True
        return False

    def _push(self, heap: list[Entry], record: Record) -> None:
        heapq.heappush(heap, (self._tree.rank(record), next(self._serial), record))
        if len(heap) > 64 + 4 * self._tree.memory.total_records:
            live = {r for *_, r in heap if r.arrays is not None and r.alive}
            heap[:] = [(self._tree.rank(r), next(self._serial), r) for r in live]
            heapq.heapify(heap)
