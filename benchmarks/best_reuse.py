"""The most that any cache with so much memory could reuse of a trace: Belady's rule, with hindsight.

A token costs nothing while it is in the row of a request that is under way. Between two rows that have
it, it must be kept, and keeping it saves computing it once:

    row  |--------|              kept               |-----------|
                   <------------ interval ---------->

So of all intervals as many are chosen as fit into memory at every moment: when there are too many, the
one that ends last is given up. That is optimal for intervals of one size and value, and it keeps
prefixes whole by itself, because whatever needs a token also needs the tokens before it. Blocks, windows
and states cost nothing here, so the result is a bound that a cache need not be able to reach.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np


@dataclass(frozen=True, slots=True)
class Stay:
    """A request in a trace. Times are any numbers that grow."""

    ids: np.ndarray[Any, Any]
    """Prompt and reply, as far as it was computed."""
    n_wanted: int
    """How many tokens a perfect cache would have had of it."""
    began: int
    ended: int


def best_reuse(stays: Sequence[Stay], n_kept: int) -> int:
    """How many of the wanted tokens could be reused with memory for `n_kept` tokens.

    What is beyond them in memory is in rows. stays: in any order.
    """
    n_reused, intervals = 0, list[tuple[int, int, int]]()
    for stay in stays:
        free, between = _intervals(stay, stays)
        n_reused += free
        intervals += between
    return n_reused + _chosen(intervals, n_kept)


def _intervals(stay: Stay, stays: Sequence[Stay]) -> tuple[int, list[tuple[int, int, int]]]:
    """How many of its wanted tokens are in another row when it begins; for the others, from when to
    when how many of them must have been kept."""
    before = [
        (n_common(stay.ids[: stay.n_wanted], s.ids), s) for s in stays if s.began < stay.began
    ]
    free = max((n for n, s in before if s.ended > stay.began), default=0)
    intervals, at = [], free
    # The longest-shared rows last: a token was last in the latest of those that share that far.
    for n in sorted({n for n, _ in before if n > free}):
        since = max(s.ended for m, s in before if m >= n)
        intervals.append((since, stay.began, n - at))
        at = n
    return free, intervals


def n_common(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> int:
    """How many tokens both begin with."""
    n = min(len(one), len(other))
    differs = np.flatnonzero(one[:n] != other[:n])
    return int(differs[0]) if len(differs) else n


def _chosen(intervals: Sequence[tuple[int, int, int]], n_kept: int) -> int:
    """The size of the largest choice. Each interval: its start, end, and how many there are of it."""
    kept: list[tuple[int, int]] = []  # by end, the last first
    n_held = n_chosen = 0
    for start, end, n in sorted(intervals):
        for stop, count in [k for k in kept if -k[0] <= start]:
            kept.remove((stop, count))
            n_held -= count
        heapq.heapify(kept)
        heapq.heappush(kept, (-end, n))
        n_held += n
        n_chosen += n
        while n_held > n_kept:
            stop, count = heapq.heappop(kept)
            too_many = min(n_held - n_kept, count)
            n_held -= too_many
            n_chosen -= too_many
            if count > too_many:
                heapq.heappush(kept, (stop, count - too_many))
    return n_chosen
