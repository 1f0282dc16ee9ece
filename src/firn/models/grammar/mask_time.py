"""How much time an owner's slow masks take: all streams wait for a mask."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable

SLOW_S = 0.005
"""CPU time. Ordinary masks take 5 to 50 us, now and then a millisecond."""
BURST_S = 1.0
SHARE = 0.2
"""Of all time: what the slow masks of one owner may take in the long run."""


class MaskTime:
    """Fills with the time of slow masks and empties as time passes. Thread-safe."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._spent_s = 0.0
        self._as_of = 0.0

    def spend(self, cpu_s: float) -> bool:
        """Whether it counts."""
        if cpu_s <= SLOW_S:
            return False
        with self._lock:
            self._spent_s, self._as_of = self._now_spent() + cpu_s, self._clock()
        return True

    @property
    def is_spent(self) -> bool:
        return self._spent_s > BURST_S and self._now_spent() > BURST_S

    @property
    def recovers_in_s(self) -> int:
        return max(1, math.ceil((self._now_spent() - BURST_S) / SHARE))

    def _now_spent(self) -> float:
        return max(self._spent_s - (self._clock() - self._as_of) * SHARE, 0.0)


class MaskTimes:
    """Those of all owners. Owner: the compiler. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._by_owner: dict[str, MaskTime] = {}

    def of(self, owner: str) -> MaskTime:
        return self._by_owner.setdefault(owner, MaskTime(self._clock))
