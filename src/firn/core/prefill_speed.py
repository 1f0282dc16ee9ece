"""How long prefill takes on this machine, by depth: for chunk sizes, and for what loading has to beat.

Prefill gets slower with depth. Seconds per token are kept by depth, in buckets of powers of two, and
interpolated linearly between them, because the cost of attention is linear in depth. Only whole chunks
count for that. A short chunk costs more than its share, on a GPU far more: a fixed cost is added for it.

Owner: the engine thread.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from firn.core.measure import Median, contradict

N_KEPT = 5
"""Measurements that are kept of each depth."""
FIRST_SECONDS_PER_TOKEN = 1e-3
MIN_CHUNK_TOKENS = 8
"""Shorter chunks say nothing about the speed of prefill."""
GRAIN_TOKENS = 512
"""Prefill is summed up in steps that double the position; the first reaches at least this one."""


@dataclass(eq=False)
class _Bucket:
    """Whole chunks of about the same depth: how deep they were, and their seconds per token."""

    depth: Median = field(default_factory=lambda: Median(kept=N_KEPT, of=_mean))
    cost: Median = field(default_factory=lambda: Median(kept=N_KEPT))


class PrefillSpeed:
    def __init__(self) -> None:
        self._whole = 0
        """Tokens of a whole chunk: the largest seen so far."""
        self._buckets: defaultdict[int, _Bucket] = defaultdict(_Bucket)
        self._saved: set[int] = set()
        """Buckets that an earlier process saved, and in which nothing was measured since."""
        self._line: list[tuple[float, float]] = []
        """Per bucket: (mean depth, median seconds per token)."""
        self._short = Median(kept=N_KEPT)
        """The fixed cost of a short chunk."""

    @property
    def is_known(self) -> bool:
        return bool(self._line)

    # --- learning --------------------------------------------------------------------------

    def observe(self, start: int, end: int, seconds: float) -> None:
        """Reading tokens [start, end) of a prompt took so long."""
        n = end - start
        if n < MIN_CHUNK_TOKENS:
            return
        if n > 2 * self._whole:  # the chunks that counted as whole so far were short
            self._saved.clear()
            self._buckets.clear()
            self._short = Median(kept=N_KEPT)
        self._whole = max(self._whole, n)
        depth = (start + end) / 2
        if 2 * n > self._whole:
            self._saw_whole(depth, seconds / n)
        else:
            share = n / self._whole
            alone = (seconds - n * self.seconds_per_token(depth)) / (1 - share)
            self._short.add(max(alone, 0.0))

    def _saw_whole(self, depth: float, cost: float) -> None:
        number = int(depth).bit_length()
        if number in self._saved:
            self._saved.discard(number)
            if contradict(cost, self._buckets[number].cost.value):
                self._saved.clear()  # another machine's, or another model's
                self._buckets.clear()
        self._add(depth, cost)
        self._draw()

    def _add(self, depth: float, cost: float) -> None:
        bucket = self._buckets[int(depth).bit_length()]
        bucket.depth.add(depth)
        bucket.cost.add(cost)

    def _draw(self) -> None:
        """Recompute the line from the measurements."""
        self._line = sorted((b.depth.value, b.cost.value) for b in self._buckets.values())

    # --- asking ----------------------------------------------------------------------------

    def seconds_per_token(self, depth: float) -> float:
        line = self._line
        if not line:
            return FIRST_SECONDS_PER_TOKEN
        i = bisect(line, (depth, math.inf))
        if i == 0:
            return line[0][1]
        if i == len(line):
            return _beyond(line, depth)
        (x0, y0), (x1, y1) = line[i - 1], line[i]
        return y0 + (y1 - y0) * (depth - x0) / (x1 - x0)

    def seconds(self, start: int, end: int) -> float:
        """How long computing tokens [start, end) of a prompt takes."""
        total, position = 0.0, start
        while position < end:
            edge = min(end, max(2 * position, GRAIN_TOKENS))
            total += (edge - position) * self.seconds_per_token((position + edge) / 2)
            position = edge
        n_last = (end - start) % max(self._whole, 1)
        if n_last:
            total += self._short.value * (1 - n_last / self._whole)
        return total

    def chunk_s(self, start: int) -> float:
        """How long a whole chunk that begins here takes."""
        return self._whole * self.seconds_per_token(start + self._whole / 2)

    # --- across a restart ------------------------------------------------------------------

    def to_save(self) -> dict[str, Any]:
        """What the next process should know, as plain values."""
        return {
            "whole": self._whole,
            "depths": [[depth, cost] for depth, cost in self._line],
            "short": self._short.value if self._short else None,
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Begin with what an earlier process learned. Raises ValueError, TypeError, KeyError."""
        self._whole = max(int(saved["whole"]), 0)
        for depth, cost in saved["depths"]:
            if not (math.isfinite(depth) and math.isfinite(cost) and depth >= 0 and cost > 0):
                raise ValueError(f"invalid cost {cost} at depth {depth}")
            self._saved.add(int(depth).bit_length())
            self._add(float(depth), float(cost))
        self._draw()
        if saved["short"] is not None:
            self._short.restore(max(float(saved["short"]), 0.0))

    def view(self) -> dict[str, Any]:
        speeds = {str(round(d)): round(1 / max(c, 1e-9)) for d, c in self._line}
        return {"prefill_tokens_per_s": speeds, "short_chunk_s": round(self._short.value, 6)}


def _mean(values: Any) -> float:
    return math.fsum(values) / len(values)


def _beyond(points: list[tuple[float, float]], depth: float) -> float:
    """Deeper than any sample: continue with the last slope, no steeper than through the origin."""
    x1, y1 = points[-1]
    if len(points) < 2:
        return y1
    x0, y0 = points[-2]
    slope = min(max((y1 - y0) / (x1 - x0), 0.0), y1 / x1)
    return y1 + slope * (depth - x1)
