"""What computing and what loading cost here, learned while it happens. Owner: the engine thread.

Prefill is slower the deeper in the prompt it is: what a token costs is kept by depth, in powers of two,
and goes in a straight line from one depth that was seen to the next, as attention does.
"""

from __future__ import annotations

import math
import time
from bisect import bisect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

RATE = 0.2
FIRST_SECONDS_PER_TOKEN = 1e-3
FIRST_LOAD_NBYTES_PER_S = 2e9
"""A hope: a load that is not tried is never measured."""
STALE_S = 600.0
"""A measurement of loads older than this is hope again: disks warm up, and other work ends."""
LOAD_OVERHEAD_S = 0.002
"""What a load costs whatever its size: queueing, a thread's wake-up, a step of the engine."""
MIN_CHUNK_TOKENS = 8
GRAIN_TOKENS = 512


@dataclass(eq=False)
class Estimates:
    clock: Callable[[], float] = time.monotonic
    _seen: dict[int, tuple[float, float]] = field(default_factory=dict)
    """By powers of two: the mean depth of the chunks seen there, and their seconds per token."""
    _line: list[tuple[float, float]] = field(default_factory=list)
    """The same, by depth."""
    _measured_nbytes_per_s: float = FIRST_LOAD_NBYTES_PER_S
    _measured_at: float = 0.0
    n_loads: int = 0
    load_error: float = 0.0
    """Mean of |predicted - took| / took."""

    def saw_prefill(self, start: int, end: int, seconds: float) -> None:
        if end - start < MIN_CHUNK_TOKENS:
            return
        depth, cost = (start + end) / 2, seconds / (end - start)
        bucket = int(depth).bit_length()
        old_depth, old_cost = self._seen.get(bucket, (depth, cost))
        self._seen[bucket] = (
            old_depth + RATE * (depth - old_depth),
            old_cost + RATE * (cost - old_cost),
        )
        self._line = sorted(self._seen.values())

    def saw_load(self, nbytes: int, seconds: float) -> None:
        speed = nbytes / max(seconds - LOAD_OVERHEAD_S, 1e-6)
        if self._is_hope:
            self._measured_nbytes_per_s = speed
        else:
            error = abs(self.load_s(nbytes) - seconds) / max(seconds, 1e-6)
            self.load_error += (error - self.load_error) / min(self.n_loads, 20)
            self._measured_nbytes_per_s += RATE * (speed - self._measured_nbytes_per_s)
        self.n_loads += 1
        self._measured_at = self.clock()

    @property
    def _is_hope(self) -> bool:
        return not self.n_loads or self.clock() - self._measured_at > STALE_S

    @property
    def load_nbytes_per_s(self) -> float:
        if self._is_hope:
            return max(self._measured_nbytes_per_s, FIRST_LOAD_NBYTES_PER_S)
        return self._measured_nbytes_per_s

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

    def prefill_s(self, start: int, end: int) -> float:
        """Computing tokens [start, end) of a prompt."""
        total, position = 0.0, start
        while position < end:
            edge = min(end, max(2 * position, GRAIN_TOKENS))
            total += (edge - position) * self.seconds_per_token((position + edge) / 2)
            position = edge
        return total

    def load_s(self, nbytes: int) -> float:
        return LOAD_OVERHEAD_S + nbytes / self.load_nbytes_per_s if nbytes else 0.0

    def view(self) -> dict[str, Any]:
        speeds = {str(round(d)): round(1 / max(c, 1e-9)) for d, c in self._line}
        return {
            "prefill_tokens_per_s": speeds,
            "load_bytes_per_s": round(self.load_nbytes_per_s),
            "loads": self.n_loads,
            "load_error": round(self.load_error, 3),
        }


def _beyond(points: Sequence[tuple[float, float]], depth: float) -> float:
    """Deeper than anything seen: on with the last slope, but no steeper than through the origin."""
    x1, y1 = points[-1]
    if len(points) < 2:
        return y1
    x0, y0 = points[-2]
    slope = min(max((y1 - y0) / (x1 - x0), 0.0), y1 / x1)
    return y1 + slope * (depth - x1)
