"""Memory of every size in one pass over a trace.

Eviction is by last use, and takes a chain from its end. A memory of n blocks holds the first n of
one list, whatever n is, because a block only moves back in that list until it is used again. So
it is enough to know each block's place. Blocks that the same request used last are adjacent: they
are the end of its path, which no later request shares. A block's place is the number of blocks that
were used after that request, plus the number of adjacent blocks before it on the path. Sums over
requests are kept in a binary indexed tree.

Tests compare it with the cache itself. Requests with the same arrival time count as consecutive.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from firn.traces.simulate import TELL_EVERY, Progress
from firn.traces.trace import Ints, Longs, Trace

_NONE: Longs = np.zeros(0, dtype=np.int64)


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
