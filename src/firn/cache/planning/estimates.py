"""What computing and loading cost on this machine, learned while they happen.

Prefill gets slower with depth. Seconds per token are kept by depth, in buckets of powers of two, and
interpolated linearly between them, because the cost of attention is linear in depth. Only whole chunks
count for that. A short chunk costs more than its share, on a GPU far more: a fixed cost is added for it.

For a tier, latency and bandwidth are separate: small loads show the one and large loads the other.
The engine thread's own time for loaded bytes, to make arrays and to copy them into a row, is
estimated separately, because that time is lost to computing.

An estimate is the median of the last few samples (for the fixed cost of a fill, the minimum), so a
first chunk that compiled its kernels, or one that was disturbed, is soon forgotten. Estimates
survive a restart: what was saved counts as one sample, and is thrown away if the first new sample
contradicts it.

Owner: the engine thread.
"""

from __future__ import annotations

import math
import time
from bisect import bisect
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from statistics import median_low
from typing import Any

N_KEPT = 5
"""How many samples an estimate is made of."""
FIRST_SECONDS_PER_TOKEN = 1e-3
FIRST_LATENCY_S = 0.002
FIRST_SECONDS_PER_BYTE = 1 / 2e9
"""Optimistic, because a load that is not tried is never measured."""
STALE_S = 60.0
"""After this time a tier that looked too slow is tried again: disks wake up, and other work ends."""
MIN_CHUNK_TOKENS = 8
"""Shorter chunks say nothing about the speed of prefill."""
GRAIN_TOKENS = 512
"""Prefill is summed up in steps that double the position; the first reaches at least this one."""
SMALL_NBYTES, LARGE_NBYTES = 1 << 20, 4 << 20
"""Smaller loads show the latency, larger ones the bandwidth."""
LARGE_FILL_NBYTES = 32 << 20
"""Smaller fills show the fixed cost of a fill, larger ones the cost of its bytes."""
CONTRADICTION = 3.0
"""Samples that differ by more than this factor are not from the same machine."""


class Samples:
    """The median of the last few samples, the lower one of two; or what `of` makes of them."""

    __slots__ = ("_is_saved", "_of", "_seen", "value")

    def __init__(
        self, value: float, *, of: Callable[[Iterable[float]], float] = median_low
    ) -> None:
        """value: the estimate before the first sample."""
        self._of = of
        self._seen: deque[float] = deque(maxlen=N_KEPT)
        self._is_saved = False
        self.value = value

    @property
    def known(self) -> bool:
        return bool(self._seen)

    def see(self, sample: float) -> None:
        if self._is_saved:
            self._is_saved = False
            if not 1 / CONTRADICTION < (sample + 1e-12) / (self.value + 1e-12) < CONTRADICTION:
                self._seen.clear()
        self._seen.append(sample)
        self.value = self._of(self._seen)

    def restore(self, value: float) -> None:
        """Begin with what an earlier process learned."""
        if not self._seen:
            self._seen.append(value)
            self._is_saved = True
            self.value = value


@dataclass(eq=False)
class TierSpeed:
    """How fast a tier reads, from the order to the last byte in memory."""

    latency_s: Samples = field(default_factory=lambda: Samples(FIRST_LATENCY_S))
    seconds_per_byte: Samples = field(default_factory=lambda: Samples(FIRST_SECONDS_PER_BYTE))
    seen_at: float = -math.inf

    def see(self, nbytes: int, seconds: float, *, now: float) -> None:
        self.seen_at = now
        if nbytes <= SMALL_NBYTES:
            self.latency_s.see(seconds)
        elif nbytes >= LARGE_NBYTES:
            self.seconds_per_byte.see(max(seconds - self.latency_s.value, 1e-6) / nbytes)

    def see_delay(self, nbytes: int, seconds: float, *, now: float) -> bool:
        """`nbytes` bytes take longer than `seconds`. Returns whether they were expected sooner:
        otherwise the delay says nothing, so a load that is given up early spoils no estimate."""
        if seconds <= self.expected_s(nbytes, now=now):
            return False
        self.seen_at = now
        if seconds > self.load_s(nbytes):
            if nbytes >= LARGE_NBYTES:
                self.seconds_per_byte.see((seconds - self.latency_s.value) / nbytes)
            else:
                self.latency_s.see(seconds - nbytes * self.seconds_per_byte.value)
        return True

    def load_s(self, nbytes: int) -> float:
        return self.latency_s.value + nbytes * self.seconds_per_byte.value

    def expected_s(self, nbytes: int, *, now: float) -> float:
        """Like load_s, but optimistic about a tier that has not been tried for a while."""
        if now - self.seen_at < STALE_S:
            return self.load_s(nbytes)
        untried_s = FIRST_LATENCY_S + nbytes * FIRST_SECONDS_PER_BYTE
        return min(self.load_s(nbytes), untried_s)


@dataclass(eq=False)
class FillSpeed:
    """How long the engine thread takes to fill a row. On a GPU a small fill is all dispatch: it
    says nothing about the cost of a large one's bytes."""

    fixed_s: Samples = field(default_factory=lambda: Samples(0.0, of=min))
    """The minimum of the last few samples: most fills wait for something else as well."""
    seconds_per_byte: Samples = field(default_factory=lambda: Samples(0.0))

    def see(self, nbytes: int, seconds: float) -> None:
        if nbytes >= LARGE_FILL_NBYTES:
            self.seconds_per_byte.see(max(seconds - self.fixed_s.value, 0.0) / nbytes)
        elif nbytes:
            self.fixed_s.see(seconds)

    def to_save(self) -> list[float | None]:
        return [s.value if s.known else None for s in (self.fixed_s, self.seconds_per_byte)]


def _samples_by_depth() -> defaultdict[int, deque[tuple[float, float]]]:
    return defaultdict(lambda: deque(maxlen=N_KEPT))


@dataclass(eq=False)
class Estimates:
    clock: Callable[[], float] = time.monotonic
    tiers: defaultdict[str, TierSpeed] = field(default_factory=lambda: defaultdict(TierSpeed))
    array_s: Samples = field(default_factory=lambda: Samples(0.0))
    """Seconds per byte on the engine thread, from loaded bytes to arrays."""
    filling: FillSpeed = field(default_factory=FillSpeed)
    _whole: int = 0
    """Tokens of a whole chunk: the largest seen so far."""
    _depths: defaultdict[int, deque[tuple[float, float]]] = field(default_factory=_samples_by_depth)
    """Whole chunks by bucket: (depth, seconds per token)."""
    _saved: dict[int, tuple[float, float]] = field(default_factory=dict)
    """The samples among `_depths` that an earlier process saved."""
    _line: list[tuple[float, float]] = field(default_factory=list)
    """Per bucket: (mean depth, median seconds per token)."""
    _short: Samples = field(default_factory=lambda: Samples(0.0))
    """The fixed cost of a short chunk."""

    # --- computing -------------------------------------------------------------------------

    @property
    def knows_prefill(self) -> bool:
        return bool(self._line)

    def saw_prefill(self, start: int, end: int, seconds: float) -> None:
        n = end - start
        if n < MIN_CHUNK_TOKENS:
            return
        if n > 2 * self._whole:  # the chunks that counted as whole so far were short
            self._saved.clear()
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
        saved = self._saved.pop(bucket, None)
        if saved is not None and not 1 / CONTRADICTION < cost / saved[1] < CONTRADICTION:
            self._saved.clear()  # another machine's, or another model's
            self._depths.clear()
        self._depths[bucket].append((depth, cost))
        self._draw()

    def _draw(self) -> None:
        """Recompute the line from the samples."""
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

    # --- loading ---------------------------------------------------------------------------

    def saw_load(self, tier: str, nbytes: int, seconds: float) -> None:
        """Bytes of one prompt's loads, and the seconds from the order to the last of them."""
        self.tiers[tier].see(nbytes, seconds, now=self.clock())

    def saw_delay(self, tier: str, nbytes: int, seconds: float) -> bool:
        """Some of the bytes of one prompt's loads had not arrived after `seconds`.

        Returns whether that was longer than expected; if so, it counts as a load of that duration.
        """
        return self.tiers[tier].see_delay(nbytes, seconds, now=self.clock())

    def saw_arrays(self, nbytes: int, seconds: float) -> None:
        if nbytes >= SMALL_NBYTES:
            self.array_s.see(seconds / nbytes)

    def saw_fill(self, nbytes: int, seconds: float) -> None:
        self.filling.see(nbytes, seconds)

    def fill_s(self, nbytes: int) -> float:
        """How much of the engine's own time it takes to fill a row with this many bytes."""
        if not nbytes:
            return 0.0
        return self.filling.fixed_s.value + nbytes * self.filling.seconds_per_byte.value

    def load_s(self, tier: str, nbytes: int) -> float:
        """How long loading this many bytes takes, from the order to the last byte."""
        return self.tiers[tier].expected_s(nbytes, now=self.clock()) if nbytes else 0.0

    def engine_s(self, nbytes: int) -> float:
        """How much of the engine's own time this many loaded bytes take."""
        return nbytes * self.array_s.value

    # --- across a restart ------------------------------------------------------------------

    def to_save(self) -> dict[str, Any]:
        """What the next process should know, as plain values."""
        return {
            "whole": self._whole,
            "depths": [[depth, cost] for depth, cost in self._line],
            "short": self._short.value if self._short.known else None,
            "array": self.array_s.value if self.array_s.known else None,
            "fill": self.filling.to_save(),
            "tiers": {
                name: [
                    s.value if s.known else None for s in (speed.latency_s, speed.seconds_per_byte)
                ]
                for name, speed in self.tiers.items()
            },
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Begin with what an earlier process learned. Raises ValueError, TypeError, KeyError."""
        self._whole = max(int(saved["whole"]), 0)
        for depth, cost in saved["depths"]:
            if not (math.isfinite(depth) and math.isfinite(cost) and depth >= 0 and cost > 0):
                raise ValueError(f"invalid cost {cost} at depth {depth}")
            bucket = int(depth).bit_length()
            self._saved[bucket] = (float(depth), float(cost))
            self._depths[bucket].append(self._saved[bucket])
        self._draw()
        fill_s, fill_s_per_byte = saved["fill"]
        named: list[tuple[Samples, float | None]] = [
            (self._short, saved["short"]),
            (self.array_s, saved["array"]),
            (self.filling.fixed_s, fill_s),
            (self.filling.seconds_per_byte, fill_s_per_byte),
        ]
        for name, (latency, per_byte) in saved["tiers"].items():
            speed = self.tiers[str(name)]
            named += [(speed.latency_s, latency), (speed.seconds_per_byte, per_byte)]
        for samples, value in named:
            if value is not None:
                samples.restore(max(float(value), 0.0))

    def view(self) -> dict[str, Any]:
        speeds = {str(round(d)): round(1 / max(c, 1e-9)) for d, c in self._line}
        return {
            "prefill_tokens_per_s": speeds,
            "short_chunk_s": round(self._short.value, 6),
            "engine_s_per_gib": round(
                (self.array_s.value + self.filling.seconds_per_byte.value) * (1 << 30), 4
            ),
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
    """Deeper than any sample: continue with the last slope, no steeper than through the origin."""
    x1, y1 = points[-1]
    if len(points) < 2:
        return y1
    x0, y0 = points[-2]
    slope = min(max((y1 - y0) / (x1 - x0), 0.0), y1 / x1)
    return y1 + slope * (depth - x1)
