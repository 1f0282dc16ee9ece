"""Clocks that a test sets, for whatever takes a `Clock`."""

from __future__ import annotations

import time
from collections.abc import Callable

from firn.core.clock import Clock


class SetClock(Clock):
    def __init__(
        self,
        elapsed: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._elapsed = elapsed
        self._wall = wall

    def elapsed(self) -> float:
        return self._elapsed()

    def wall(self) -> float:
        return self._wall()
