"""The two clocks of the process, as a value that a test replaces."""

from __future__ import annotations

import time


class Clock:
    def elapsed(self) -> float:
        """Seconds since some moment; never goes back."""
        return time.monotonic()

    def wall(self) -> float:
        """Unix time; goes back where somebody sets it."""
        return time.time()


SYSTEM_CLOCK = Clock()
