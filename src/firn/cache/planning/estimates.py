"""What computing and loading cost on this machine, learned while they happen.

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
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from firn.core.clock import SYSTEM_CLOCK, Clock
from firn.core.measure import Median
from firn.core.prefill_speed import PrefillSpeed

N_KEPT = 5
"""How many samples an estimate is made of."""
FIRST_LATENCY_S = 0.002
FIRST_SECONDS_PER_BYTE = 1 / 2e9
"""Optimistic, because a load that is not tried is never measured."""
STALE_S = 60.0
"""After this time a tier that looked too slow is tried again: disks wake up, and other work ends."""
SMALL_NBYTES, LARGE_NBYTES = 1 << 20, 4 << 20
"""Smaller loads show the latency, larger ones the bandwidth."""
LARGE_FILL_NBYTES = 32 << 20
"""Smaller fills show the fixed cost of a fill, larger ones the cost of its bytes."""


@dataclass(eq=False)
class TierSpeed:
    """How fast a tier reads, from the order to the last byte in memory."""

    latency_s: Median = field(default_factory=lambda: Median(FIRST_LATENCY_S, kept=N_KEPT))
    seconds_per_byte: Median = field(
        default_factory=lambda: Median(FIRST_SECONDS_PER_BYTE, kept=N_KEPT)
    )
    seen_at: float = -math.inf

    def see(self, nbytes: int, seconds: float, *, now: float) -> None:
        self.seen_at = now
        if nbytes <= SMALL_NBYTES:
            self.latency_s.add(seconds)
        elif nbytes >= LARGE_NBYTES:
            self.seconds_per_byte.add(max(seconds - self.latency_s.value, 1e-6) / nbytes)

    def see_delay(self, nbytes: int, seconds: float, *, now: float) -> bool:
        """`nbytes` bytes take longer than `seconds`. Returns whether they were expected sooner:
        otherwise the delay says nothing, so a load that is given up early spoils no estimate."""
        if seconds <= self.expected_s(nbytes, now=now):
            return False
        self.seen_at = now
        if seconds > self.load_s(nbytes):
            if nbytes >= LARGE_NBYTES:
                self.seconds_per_byte.add((seconds - self.latency_s.value) / nbytes)
            else:
                self.latency_s.add(seconds - nbytes * self.seconds_per_byte.value)
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

    fixed_s: Median = field(default_factory=lambda: Median(kept=N_KEPT, of=min))
    """The minimum of the last few samples: most fills wait for something else as well."""
    seconds_per_byte: Median = field(default_factory=lambda: Median(kept=N_KEPT))

    def see(self, nbytes: int, seconds: float) -> None:
        if nbytes >= LARGE_FILL_NBYTES:
            self.seconds_per_byte.add(max(seconds - self.fixed_s.value, 0.0) / nbytes)
        elif nbytes:
            self.fixed_s.add(seconds)

    def to_save(self) -> list[float | None]:
        return [s.value if s else None for s in (self.fixed_s, self.seconds_per_byte)]


@dataclass(eq=False)
class Estimates:
    clock: Clock = SYSTEM_CLOCK
    tiers: defaultdict[str, TierSpeed] = field(default_factory=lambda: defaultdict(TierSpeed))
    array_s: Median = field(default_factory=lambda: Median(kept=N_KEPT))
    """Seconds per byte on the engine thread, from loaded bytes to arrays."""
    filling: FillSpeed = field(default_factory=FillSpeed)
    prefill: PrefillSpeed = field(default_factory=PrefillSpeed)

    # --- computing -------------------------------------------------------------------------

    @property
    def knows_prefill(self) -> bool:
        return self.prefill.is_known

    def prefill_s(self, start: int, end: int) -> float:
        """How long computing tokens [start, end) of a prompt takes."""
        return self.prefill.seconds(start, end)

    def chunk_s(self, start: int) -> float:
        """How long a whole chunk that begins here takes."""
        return self.prefill.chunk_s(start)

    # --- loading ---------------------------------------------------------------------------

    def observe_load(self, tier: str, nbytes: int, seconds: float) -> None:
        """Bytes of one prompt's loads, and the seconds from the order to the last of them."""
        self.tiers[tier].see(nbytes, seconds, now=self.clock.elapsed())

    def observe_delay(self, tier: str, nbytes: int, seconds: float) -> bool:
        """Some of the bytes of one prompt's loads had not arrived after `seconds`.

        Returns whether that was longer than expected; if so, it counts as a load of that duration.
        """
        return self.tiers[tier].see_delay(nbytes, seconds, now=self.clock.elapsed())

    def observe_arrays(self, nbytes: int, seconds: float) -> None:
        if nbytes >= SMALL_NBYTES:
            self.array_s.add(seconds / nbytes)

    def observe_fill(self, nbytes: int, seconds: float) -> None:
        self.filling.see(nbytes, seconds)

    def fill_s(self, nbytes: int) -> float:
        """How much of the engine's own time it takes to fill a row with this many bytes."""
        if not nbytes:
            return 0.0
        return self.filling.fixed_s.value + nbytes * self.filling.seconds_per_byte.value

    def load_s(self, tier: str, nbytes: int) -> float:
        """How long loading this many bytes takes, from the order to the last byte."""
        return self.tiers[tier].expected_s(nbytes, now=self.clock.elapsed()) if nbytes else 0.0

    def engine_s(self, nbytes: int) -> float:
        """How much of the engine's own time this many loaded bytes take."""
        return nbytes * self.array_s.value

    # --- across a restart ------------------------------------------------------------------

    def to_save(self) -> dict[str, Any]:
        """What the next process should know, as plain values."""
        return {
            **self.prefill.to_save(),
            "array": self.array_s.value if self.array_s else None,
            "fill": self.filling.to_save(),
            "tiers": {
                name: [s.value if s else None for s in (speed.latency_s, speed.seconds_per_byte)]
                for name, speed in self.tiers.items()
            },
        }

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Begin with what an earlier process learned. Raises ValueError, TypeError, KeyError."""
        self.prefill.restore(saved)
        fill_s, fill_s_per_byte = saved["fill"]
        named: list[tuple[Median, float | None]] = [
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
        return {
            **self.prefill.view(),
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
