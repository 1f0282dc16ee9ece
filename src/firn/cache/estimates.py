"""What computing and what loading cost here, learned while it happens. Owner: the engine thread.

Prefill is slower the deeper in the prompt it is: what a token costs is kept by depth, in powers of two,
and goes in a straight line from one depth that was seen to the next, as attention does. That is learned
from whole chunks. A short one costs more than its share, on a GPU far more: what it costs however short
it is comes on top.

Medians of the last few, the lower of two: a first chunk that compiled its kernels, or one that met with
other work, is soon forgotten.
"""

from __future__ import annotations

import math
import time
from bisect import bisect
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import Any

RATE = 0.2
N_KEPT = 5
"""Samples of the same kind that the median is taken of."""
FIRST_SECONDS_PER_TOKEN = 1e-3
FIRST_LOAD_NBYTES_PER_S = 2e9
"""A hope: a load that is not tried is never measured."""
STALE_S = 600.0
"""A measurement of loads older than this is hope again: disks warm up, and other work ends."""
LOAD_OVERHEAD_S = 0.002
"""What a load costs whatever its size: queueing, a thread's wake-up, a step of the engine."""
MIN_CHUNK_TOKENS = 8
GRAIN_TOKENS = 512


def _samples() -> deque[Any]:
    return deque(maxlen=N_KEPT)


@dataclass(eq=False)
class Estimates:
    clock: Callable[[], float] = time.monotonic
    _whole: int = 0
    """Tokens of a whole chunk: of the largest that was seen."""
    _seen: defaultdict[int, deque[tuple[float, float]]] = field(
        default_factory=lambda: defaultdict(_samples)
    )
    """By powers of two: depths of whole chunks, and their seconds per token."""
    _line: list[tuple[float, float]] = field(default_factory=list)
    """Of each of these the middle, by depth."""
    _short: deque[float] = field(default_factory=_samples)
    """What short chunks cost, had they no tokens at all."""
    _filled: deque[float] = field(default_factory=_samples)
    """Seconds per byte from loaded arrays to a row that can go on."""
    _measured_nbytes_per_s: float = FIRST_LOAD_NBYTES_PER_S
    _measured_at: float = 0.0
    n_loads: int = 0
    load_error: float = 0.0
    """Mean of |predicted - took| / took."""

    def saw_prefill(self, start: int, end: int, seconds: float) -> None:
        n = end - start
        if n < MIN_CHUNK_TOKENS:
            return
        if n > 2 * self._whole:  # what was whole until now was short
            self._seen.clear()
            self._short.clear()
        self._whole = max(self._whole, n)
        depth = (start + end) / 2
        if 2 * n > self._whole:
            bucket = self._seen[int(depth).bit_length()]
            bucket.append((depth, seconds / n))
            self._line = sorted(map(_middle, self._seen.values()))
        else:
            share = n / self._whole
            alone = (seconds - n * self.seconds_per_token(depth)) / (1 - share)
            self._short.append(max(alone, 0.0))

    def saw_fill(self, nbytes: int, seconds: float) -> None:
        """A row was filled with so many loaded bytes."""
        self._filled.append(seconds / max(nbytes, 1))

    def saw_load(self, nbytes: int, seconds: float) -> None:
        speed = nbytes / max(seconds - LOAD_OVERHEAD_S, 1e-6)
        if self._is_hope:
            self._measured_nbytes_per_s = speed
        else:
            error = abs(self._read_s(nbytes) - seconds) / max(seconds, 1e-6)
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
        n_last = (end - start) % max(self._whole, 1)
        if n_last and self._short:
            total += median_low(self._short) * (1 - n_last / self._whole)
        return total

    def load_s(self, nbytes: int) -> float:
        """Reading so many bytes, and filling a row with them."""
        if not nbytes:
            return 0.0
        per_byte = median_low(self._filled) if self._filled else 0.0
        return self._read_s(nbytes) + nbytes * per_byte

    def _read_s(self, nbytes: int) -> float:
        return LOAD_OVERHEAD_S + nbytes / self.load_nbytes_per_s

    def view(self) -> dict[str, Any]:
        speeds = {str(round(d)): round(1 / max(c, 1e-9)) for d, c in self._line}
        return {
            "prefill_tokens_per_s": speeds,
            "short_chunk_s": round(median_low(self._short), 6) if self._short else 0.0,
            "load_bytes_per_s": round(self.load_nbytes_per_s),
            "loads": self.n_loads,
            "load_error": round(self.load_error, 3),
        }


def _middle(samples: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """The mean depth, and the median cost."""
    depths, costs = zip(*samples, strict=True)
    return sum(depths) / len(depths), median_low(costs)


def _beyond(points: Sequence[tuple[float, float]], depth: float) -> float:
    """Deeper than anything seen: on with the last slope, but no steeper than through the origin."""
    x1, y1 = points[-1]
    if len(points) < 2:
        return y1
    x0, y0 = points[-2]
    slope = min(max((y1 - y0) / (x1 - x0), 0.0), y1 / x1)
    return y1 + slope * (depth - x1)
