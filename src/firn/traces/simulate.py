"""A trace played against one tier: the cache's own eviction order, without a model, arrays or files.

The cache's tree has one object per block, and takes 100 times as long. Here blocks are numbers:
what a request does to its whole path is one operation on arrays. The blocks that one request stored
form a run, of which only the deepest can be evicted next, so the heap holds runs. Tests play the
same traces against the cache itself, request by request.

Requests arrive one after the other, and what they compute is stored when they end. Only pages are
modelled: the states of recurrent models are at few places, which a trace does not record. Blocks on
an SSD count even if a prompt has so few of them that the cache would not load them.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable

import numpy as np

from firn.cache.records import TOUCH_EVERY_S
from firn.cache.tree import BLOCK_S
from firn.traces.trace import Ints, Trace

Progress = Callable[[int], None]
"""Called now and then with the number of requests played."""
TELL_EVERY = 4096


def play(tier: SimulatedTier, *, progress: Progress = lambda n: None) -> Ints:
    """How many blocks of each prompt the tier had when the request arrived."""
    n = len(tier.trace)
    depths = np.zeros(n, dtype=np.int32)
    for i in range(n):
        depths[i] = tier.play(i)
        if i % TELL_EVERY == 0:
            progress(i)
    progress(n)
    return depths


class SimulatedTier:
    """The blocks of one tier. A run is the list of blocks that one request added, the deepest last.
    Its key in the heap is the rank of its deepest block, or an older, lower one: ranks only
    rise."""

    def __init__(self, trace: Trace, *, n_blocks: int) -> None:
        self.trace = trace
        self._cuts = list(zip(trace.starts.tolist(), trace.ends.tolist(), strict=True))
        self._n_prompt_blocks: list[int] = trace.n_prompt_blocks.tolist()
        self._n_blocks = n_blocks
        self._stored = np.zeros(trace.n_nodes, dtype=bool)
        self._n_stored = 0
        self._heap: list[tuple[float, int, int, list[int]]] = []
        """(rank, -depth of the deepest, number of the request, run)."""

    def play(self, i: int) -> int:
        """Plays request i: uses its stored blocks and stores the rest; how many its prompt used."""
        start, end = self._cuts[i]
        if start == end:
            return 0
        path = self.trace.nodes[start:end]
        there = self._stored[path]
        n_there = int(there.argmin())  # the first that is not stored, or 0 if all are
        if there[n_there]:
            n_there = end - start
        n_hit = min(n_there, self._n_prompt_blocks[i])
        self._use(i, path, n_there, n_hit)
        if n_there < end - start:
            self._store(i, path, n_there)
        return n_hit

    def _use(self, i: int, path: Ints, n_there: int, n_hit: int) -> None:
        raise NotImplementedError

    def _store(self, i: int, path: Ints, start: int) -> None:
        raise NotImplementedError

    def _rank(self, node: int) -> float:
        raise NotImplementedError

    def _add(self, i: int, new: Ints, start: int) -> None:
        """Adds a run of blocks that begins at this depth."""
        if len(new):
            self._stored[new] = True
            self._n_stored += len(new)
            run = new.tolist()
            entry = (self._rank(run[-1]), 1 - start - len(run), i, run)
            heapq.heappush(self._heap, entry)

    def _lowest(self) -> float:
        """The rank of the next block to evict, whose run is then at the top of the heap."""
        while True:
            rank, depth, i, run = self._heap[0]
            current = self._rank(run[-1])
            if current <= rank:
                return rank
            heapq.heapreplace(self._heap, (current, depth, i, run))

    def _drop_lowest(self) -> None:
        _, depth, i, run = self._heap[0]
        self._stored[run.pop()] = False
        self._n_stored -= 1
        if run:
            heapq.heapreplace(self._heap, (self._rank(run[-1]), depth + 1, i, run))
        else:
            heapq.heappop(self._heap)


class SimulatedSsd(SimulatedTier):
    """Evicts by stamps, which hold the rank as of the last time that a chain was touched. Nothing
    is evicted to store a block that ranks lower."""

    def __init__(self, trace: Trace, *, n_blocks: int) -> None:
        super().__init__(trace, n_blocks=n_blocks)
        self._stamps = np.zeros(trace.n_nodes)
        lengths = trace.ends - trace.starts
        self._lower = BLOCK_S * np.arange(int(lengths.max(initial=0)))
        """By depth: how much lower than its rank a stamp is."""

    def _rank(self, node: int) -> float:
        return float(self._stamps[node])

    def _use(self, i: int, path: Ints, n_there: int, n_hit: int) -> None:
        now = float(self.trace.at[i])
        late_s = now - self._lower[:n_there] - self._stamps[path[:n_there]]
        late = np.flatnonzero(late_s >= TOUCH_EVERY_S)
        if len(late):  # and all blocks before them, which must not rank lower
            self._touch(path[: late[-1] + 1], now)

    def _touch(self, path: Ints, now: float) -> None:
        self._stamps[path] = np.maximum(self._stamps[path], now - self._lower[: len(path)])

    def _store(self, i: int, path: Ints, start: int) -> None:
        now = float(self.trace.at[i])
        if start < len(path):
            self._touch(path[:start], now)
        n = 0
        for depth in range(start, len(path)):
            stamp = now - BLOCK_S * depth
            if self._n_stored + n >= self._n_blocks:
                if not self._heap or self._lowest() > stamp:
                    break
                self._drop_lowest()
            self._stamps[path[depth]] = stamp
            n += 1
        self._add(i, path[start : start + n], start)
