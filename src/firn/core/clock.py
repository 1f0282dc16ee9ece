"""The clocks of the process, and waiting by them, as a value that a test replaces."""

from __future__ import annotations

import time


class Clock:
    def elapsed(self) -> float:
        """Seconds since some moment; never goes back."""
        return time.monotonic()

    def wall(self) -> float:
        """Unix time; goes back where somebody sets it."""
        return time.time()

    def sleep(self, seconds: float) -> None:
        time.sleep(seconds)


SYSTEM_CLOCK = Clock()
