"""The memory tier: which records are held as arrays, under a budget of bytes.

Eviction takes the record with the lowest rank, where rank = clock + seconds of recompute that the record
saves per megabyte, and the clock is the rank of the last one evicted: among records of equal worth that
is least recently used first, and cheap ones go before dear ones. A page goes only when nothing below it
is held, so a chain is never broken; leased and pinned records stay.

States have a share of their own: they are thinned before any page has to give way to them.

Owner: the engine thread, through the prefix cache.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import count

from firn.cache.index import Index, Mark, Node, Record
from firn.cache.parts import Part

STATE_SHARE = 0.5


@dataclass(eq=False)
class Held:
    """Bytes and records in memory, by part."""

    nbytes: dict[Part, int] = field(default_factory=lambda: dict.fromkeys(Part, 0))
    n_records: dict[Part, int] = field(default_factory=lambda: dict.fromkeys(Part, 0))

    def count(self, record: Record, sign: int) -> None:
        self.nbytes[record.part] += sign * record.nbytes
        self.n_records[record.part] += sign

    @property
    def total_nbytes(self) -> int:
        return sum(self.nbytes.values())


class Pool:
    def __init__(
        self,
        index: Index,
        *,
        limit_nbytes: int,
        worth: Callable[[Record], float],
        release: Callable[[Record], None],
    ) -> None:
        """`worth`: seconds of recompute saved per megabyte. `release`: drops a record that must go."""
        self._index = index
        self._worth = worth
        self._release = release
        self._clock = 0.0
        self._heap: list[tuple[tuple[float, int], Record]] = []
        self._states: set[Record] = set()
        self._uses = count()
        self.limit_nbytes = limit_nbytes
        self.held = Held()
        self.n_evicted = 0

    def admit(self, record: Record) -> None:
        """Count a record whose payload has just been set. Room was made before."""
        self.held.count(record, +1)
        if record.part is Part.STATE:
            self._states.add(record)
        self.touch([record])

    def touch(self, records: Iterable[Record]) -> None:
        """These were just used."""
        for record in records:
            if record.payload is not None:
                record.rank = (self._clock + self._worth(record), next(self._uses))
                self._push(record)

    def make_room(self, nbytes: int, *, part: Part | None = None) -> bool:
        """Evict until `nbytes` more fit; False when what is left may not go."""
        if nbytes > self.limit_nbytes:
            return False
        if part is Part.STATE:
            allowed = int(self.limit_nbytes * STATE_SHARE)
            if nbytes > allowed:
                return False
            while self.held.nbytes[Part.STATE] + nbytes > allowed:
                if not self._thin():
                    return False
        return self.shrink_to(self.limit_nbytes - nbytes)

    def shrink_to(self, nbytes: int) -> bool:
        """Evict until at most `nbytes` are held."""
        while self.held.total_nbytes > nbytes:
            victim = self._next_victim()
            if victim is None:
                return False
            self._clock = max(self._clock, victim.rank[0])
            self.evict(victim)
        return True

    def evict(self, record: Record) -> None:
        """Let go of a record's arrays; the record itself stays only if another tier has it."""
        self.n_evicted += 1
        parent = record.node.parent
        self._release(record)
        for node in (record.node, parent):
            if node is not None:
                self.rejoin(node)

    def rejoin(self, node: Node) -> None:
        """Something below went: the node may be at the end of its chain now, and so may go too."""
        for record in node.records.values():
            if record.payload is not None:
                self._push(record)

    def drop(self, record: Record) -> None:
        """Uncount a record and take its payload away."""
        if record.payload is None:
            return
        self.held.count(record, -1)
        self._states.discard(record)
        self._index.set_payload(record, None)

    def _push(self, record: Record) -> None:
        heapq.heappush(self._heap, (record.rank, record))
        if len(self._heap) > 64 + 8 * sum(self.held.n_records.values()):
            live = {r for _, r in self._heap if r.payload is not None}
            self._heap = [(r.rank, r) for r in live]
            heapq.heapify(self._heap)

    def _next_victim(self) -> Record | None:
        """The lowest-ranked record that may go. Those that may not are pushed again when they may."""
        blocked: list[tuple[tuple[float, int], Record]] = []
        found: Record | None = None
        while self._heap:
            entry = heapq.heappop(self._heap)
            rank, record = entry
            if record.payload is None or rank != record.rank:
                continue
            if self._may_go(record):
                found = record
                break
            if record.n_leases or record.node.n_leases or record.node.n_pins:
                blocked.append(entry)
        for entry in blocked:
            heapq.heappush(self._heap, entry)
        return found

    @staticmethod
    def _may_go(record: Record) -> bool:
        node = record.node
        if record.n_leases or node.n_pins:
            return False
        if record.part is Part.PAGES:
            return node.n_occupied == 0 and not node.n_leases
        return True

    def _thin(self) -> bool:
        """Drop one state: not the newest of a chain, no branch point, none of the lattice, if any."""
        may_go = [r for r in self._states if self._may_go(r)]
        if not may_go:
            return False
        self.evict(min(may_go, key=lambda r: (_keep_class(r), r.rank)))
        return True


def _keep_class(state: Record) -> int:
    """0: thinned first. 1: kept while anything else can go."""
    node = state.node
    newest = not any(c.has(Part.STATE) for c in node.children.values())
    if state.mark == Mark.PROMPT_END:
        return 0
    if state.mark >= Mark.LATTICE or len(node.children) > 1:
        return 2
    return 1 if newest else 0
