"""What computing and what loading cost here, learned while it happens. Owner: the engine thread.

Prefill is slower the deeper in the prompt it is: what a token costs is kept by depth, in powers of two,
and goes in a straight line from one depth that was seen to the next, as attention does. That is learned
from whole chunks. A short one costs more than its share, on a GPU far more: what it costs however short
it is comes on top.

Of a tier, latency and bandwidth are kept apart: small loads tell the one and large ones the other. What
the engine itself spends on a loaded byte, making arrays of it and copying it into a row, is a third
figure, for that time is lost to computing.

Medians of the last few, the lower of two: a first chunk that compiled its kernels, or one that met with
other work, is soon forgotten. They are kept over a restart; what was kept counts as one sample, and is
thrown away by the first that contradicts it.
"""

from __future__ import annotations

import math
import time
from bisect import bisect
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median_low
from typing import Any

N_KEPT = 5
"""Samples of the same kind that the median is taken of."""
FIRST_SECONDS_PER_TOKEN = 1e-3
FIRST_LATENCY_S = 0.002
FIRST_SECONDS_PER_BYTE = 1 / 2e9
"""A hope: a load that is not tried is never measured."""
STALE_S = 60.0
"""A tier that looks too slow is tried again after so long: disks warm up, and other work ends."""
MIN_CHUNK_TOKENS = 8
GRAIN_TOKENS = 512
SMALL_NBYTES, LARGE_NBYTES = 1 << 20, 4 << 20
"""Loads below the one tell latency, loads above the other bandwidth."""
CONTRADICTION = 3.0
"""Samples further apart than this factor are not of the same machine."""


class Samples:
    """The median of the last few of one kind; of two the lower."""

    __slots__ = ("_is_kept", "_seen", "value")

    def __init__(self, value: float) -> None:
        """`value`: what is thought until something is seen."""
        self._seen: deque[float] = deque(maxlen=N_KEPT)
        self._is_kept = False
        self.value = value

    @property
    def known(self) -> bool:
        return bool(self._seen)

    def see(self, sample: float) -> None:
        if self._is_kept:
            self._is_kept = False
            if not 1 / CONTRADICTION < (sample + 1e-12) / (self.value + 1e-12) < CONTRADICTION:
                self._seen.clear()
        self._seen.append(sample)
        self.value = median_low(self._seen)

    def keep(self, value: float) -> None:
        """What an earlier process learned."""
        if not self._seen:
            self._seen.append(value)
            self._is_kept = True
            self.value = value


@dataclass(eq=False)
class TierSpeed:
    """How a tier delivers, from the order to the last byte in memory."""

    latency_s: Samples = field(default_factory=lambda: Samples(FIRST_LATENCY_S))
    seconds_per_byte: Samples = field(default_factory=lambda: Samples(FIRST_SECONDS_PER_BYTE))
    seen_at: float = -math.inf

    def see(self, nbytes: int, seconds: float, *, now: float) -> None:
        self.seen_at = now
        if nbytes <= SMALL_NBYTES:
            self.latency_s.see(seconds)
        elif nbytes >= LARGE_NBYTES:
            self.seconds_per_byte.see(max(seconds - self.latency_s.value, 1e-6) / nbytes)

    def load_s(self, nbytes: int) -> float:
        return self.latency_s.value + nbytes * self.seconds_per_byte.value

    def hoped_s(self, nbytes: int, *, now: float) -> float:
        """As above, but a tier that was not tried for long is thought to be as fast as any."""
        if now - self.seen_at < STALE_S:
            return self.load_s(nbytes)
        hope = FIRST_LATENCY_S + nbytes * FIRST_SECONDS_PER_BYTE
        return min(self.load_s(nbytes), hope)


def _samples_by_depth() -> defaultdict[int, deque[tuple[float, float]]]:
    return defaultdict(lambda: deque(maxlen=N_KEPT))


@dataclass(eq=False)
class Estimates:
    clock: Callable[[], float] = time.monotonic
    tiers: defaultdict[str, TierSpeed] = field(default_factory=lambda: defaultdict(TierSpeed))
    array_s: Samples = field(default_factory=lambda: Samples(0.0))
    """Seconds per byte from loaded bytes to arrays, on the engine thread."""
    fill_s: Samples = field(default_factory=lambda: Samples(0.0))
    """Seconds per byte from arrays to a row that can go on, likewise."""
    _whole: int = 0
    """Tokens of a whole chunk: of the largest that was seen."""
    _depths: defaultdict[int, deque[tuple[float, float]]] = field(default_factory=_samples_by_depth)
    """By powers of two: depths of whole chunks, and their seconds per token."""
    _kept: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Of these, the one that an earlier process learned."""
    _line: list[tuple[float, float]] = field(default_factory=list)
    """Of each of these the middle, by depth."""
    _short: Samples = field(default_factory=lambda: Samples(0.0))
    """What short chunks cost, had they no tokens at all."""

    # --- computing -------------------------------------------------------------------------

    @property
    def knows_prefill(self) -> bool:
        return bool(self._line)

    def saw_prefill(self, start: int, end: int, seconds: float) -> None:
        n = end - start
        if n < MIN_CHUNK_TOKENS:
            return
        if n > 2 * self._whole:  # what was whole until now was short
            self._depths.clear()
            self._short = Samples(0.0)
        self._whole = max(self._whole, n)
        depth = (start + end) / 2
        if 2 * n > self._whole:
            self._saw_whole(depth, seconds / n)
        else:
            share = n / self._whole
            alone = (seconds - n * self.seconds_per_token(depth)) / (1 - share)
            self._short.see(max(alone, 0.0))

    def _saw_whole(self, depth: float, cost: float) -> None:
        bucket = int(depth).bit_length()
        kept = self._kept.pop(bucket, None)
        if kept is not None and not 1 / CONTRADICTION < cost / kept[1] < CONTRADICTION:
            self._kept.clear()  # another machine's, or another model's
            self._depths.clear()
        self._depths[bucket].append((depth, cost))
        self._draw()

    def _draw(self) -> None:
        self._line = sorted(
            (sum(d for d, _ in seen) / len(seen), median_low([c for _, c in seen]))
            for seen in self._depths.values()
            if seen
        )

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
        if n_last:
            total += self._short.value * (1 - n_last / self._whole)
        return total

    def chunk_s(self, start: int) -> float:
        """A whole chunk from here on."""
        return self._whole * self.seconds_per_token(start + self._whole / 2)

    # --- loading ---------------------------------------------------------------------------

    def saw_load(self, tier: str, nbytes: int, seconds: float) -> None:
        """So many bytes of one prompt arrived so long after they were ordered."""
        self.tiers[tier].see(nbytes, seconds, now=self.clock())

    def saw_arrays(self, nbytes: int, seconds: float) -> None:
        if nbytes >= SMALL_NBYTES:
            self.array_s.see(seconds / nbytes)

    def saw_fill(self, nbytes: int, seconds: float) -> None:
        if nbytes >= SMALL_NBYTES:
            self.fill_s.see(seconds / nbytes)

    def load_s(self, tier: str, nbytes: int) -> float:
        """From the order of so many bytes until the last of them is there."""
        return self.tiers[tier].hoped_s(nbytes, now=self.clock()) if nbytes else 0.0

    def engine_s(self, nbytes: int) -> float:
        """What so many loaded bytes take of the engine's own time."""
        return nbytes * self.array_s.value

    def knows_tier(self, tier: str) -> bool:
        return self.tiers[tier].latency_s.known or self.tiers[tier].seconds_per_byte.known

    # --- over a restart --------------------------------------------------------------------

    def to_keep(self) -> dict[str, Any]:
        """What the next process should know. Plain values."""
        return {
            "whole": self._whole,
            "depths": [[depth, cost] for depth, cost in self._line],
            "short": self._short.value if self._short.known else None,
            "array": self.array_s.value if self.array_s.known else None,
            "fill": self.fill_s.value if self.fill_s.known else None,
            "tiers": {
                name: [
                    s.value if s.known else None for s in (speed.latency_s, speed.seconds_per_byte)
                ]
                for name, speed in self.tiers.items()
            },
        }

    def take_kept(self, kept: Mapping[str, Any]) -> None:
        """What an earlier process learned. Raises ValueError, TypeError, KeyError."""
        self._whole = max(int(kept["whole"]), 0)
        for depth, cost in kept["depths"]:
            if not (math.isfinite(depth) and math.isfinite(cost) and depth >= 0 and cost > 0):
                raise ValueError("no such costs")
            bucket = int(depth).bit_length()
            self._kept[bucket] = (float(depth), float(cost))
            self._depths[bucket].append(self._kept[bucket])
        self._draw()
        named = ((self._short, "short"), (self.array_s, "array"), (self.fill_s, "fill"))
        for samples, name in named:
            if kept[name] is not None:
                samples.keep(max(float(kept[name]), 0.0))
        for name, (latency, per_byte) in kept["tiers"].items():
            speed = self.tiers[str(name)]
            if latency is not None:
                speed.latency_s.keep(max(float(latency), 0.0))
            if per_byte is not None:
                speed.seconds_per_byte.keep(max(float(per_byte), 0.0))

    def view(self) -> dict[str, Any]:
        speeds = {str(round(d)): round(1 / max(c, 1e-9)) for d, c in self._line}
        return {
            "prefill_tokens_per_s": speeds,
            "short_chunk_s": round(self._short.value, 6),
            "engine_s_per_gib": round((self.array_s.value + self.fill_s.value) * (1 << 30), 4),
            "tiers": {
                name: {
                    "latency_s": round(speed.latency_s.value, 6),
                    "bytes_per_s": round(1 / max(speed.seconds_per_byte.value, 1e-12)),
                    "seen": speed.seen_at > -math.inf,
                }
                for name, speed in self.tiers.items()
            },
        }


def _beyond(points: list[tuple[float, float]], depth: float) -> float:
    """Deeper than anything seen: on with the last slope, but no steeper than through the origin."""
    x1, y1 = points[-1]
    if len(points) < 2:
        return y1
    x0, y0 = points[-2]
    slope = min(max((y1 - y0) / (x1 - x0), 0.0), y1 / x1)
    return y1 + slope * (depth - x1)
