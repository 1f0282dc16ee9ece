"""A trace played against one tier: the cache's own eviction order, without a model, arrays or files.

The cache's tree has one object per block, and takes 100 times as long. Here blocks are numbers:
what a request does to its whole path is one operation on arrays. The blocks that one request stored
form a run, of which only the deepest can be evicted next, so the heap holds runs. Tests play the
same traces against the cache itself, request by request.

Requests arrive one after the other, and what they compute is stored when they end. Only pages are
modelled: the states of recurrent models are at few places, which a trace does not record. Blocks on
an SSD count even if a prompt has so few of them that the cache would not load them.

Memory is played in all sizes at once: `play_all`. Eviction is by last use, and takes a chain from its
end. A memory of n blocks holds the first n of one list, whatever n is, because a block only moves
back in that list until it is used again. So it is enough to know each block's place. Blocks that the
same request used last are adjacent: they are the end of its path, which no later request shares. A
block's place is the number of blocks that were used after that request, plus the number of adjacent
blocks before it on the path. Sums over requests are kept in a binary indexed tree. There, requests
with the same arrival time count as consecutive.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from itertools import pairwise

import numpy as np

from firn.cache.records import TOUCH_EVERY_S
from firn.cache.tree import BLOCK_S
from firn.traces.trace import Ints, Longs, Trace

Progress = Callable[[int], None]
"""Called now and then with the number of requests played."""
TELL_EVERY = 4096


_NONE: Longs = np.zeros(0, dtype=np.int64)


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


def play_all(
    trace: Trace, sizes: Sequence[int], *, progress: Progress = lambda n: None
) -> dict[int, Ints]:
    """For each size, in blocks: how many blocks of each prompt were in memory."""
    ordered = np.array(sorted(set(sizes)), dtype=np.int64)
    depths = np.zeros((len(trace), len(ordered)), dtype=np.int32)
    stack = Stack(trace)
    for i in range(len(trace)):
        places = stack.play(i)
        if len(places):
            depths[i] = np.searchsorted(places, ordered)
        if i % TELL_EVERY == 0:
            progress(i)
    progress(len(trace))
    return {int(size): depths[:, k] for k, size in enumerate(ordered)}


class Stack:
    """All blocks in the order of their last use. Owner: one pass."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._last = np.full(trace.n_nodes, -1, dtype=np.int64)
        """The request that used a block last."""
        self._sums = [0] * (len(trace) + 1)
        """Blocks by the request that used them last, as a binary indexed tree."""
        self._n_blocks = 0

    def play(self, i: int) -> Longs:
        """The places of the prompt's known blocks, ascending. Then marks its whole path as used."""
        path = self._trace.path(i)
        if not len(path):
            return _NONE
        last = self._last[path]
        cuts = [0, *(np.flatnonzero(last[1:] != last[:-1]) + 1).tolist(), len(path)]
        places = np.empty(len(path), dtype=np.int64)
        n_known, counted = 0, list[tuple[int, int]]()
        for start, end in pairwise(cuts):
            request = int(last[start])
            if request < 0:
                break
            above = self._n_blocks - self._up_to(request)
            places[start:end] = np.arange(above, above + end - start)
            counted.append((request, end - start))
            n_known = end
        for request, n in counted:
            self._add(request, -n)
        self._add(i, len(path))
        self._n_blocks += len(path) - n_known
        self._last[path] = i
        return places[: min(n_known, int(self._trace.n_prompt_blocks[i]))]

    def _up_to(self, request: int) -> int:
        """How many blocks were last used by this request or an earlier one."""
        total, at, sums = 0, request + 1, self._sums
        while at:
            total += sums[at]
            at &= at - 1
        return total

    def _add(self, request: int, n: int) -> None:
        at, sums = request + 1, self._sums
        while at < len(sums):
            sums[at] += n
            at += at & -at
