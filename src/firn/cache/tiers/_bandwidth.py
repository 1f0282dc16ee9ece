"""A limit on the bytes per second sent to a store. Thread-safe."""

from __future__ import annotations

import threading

from firn.core.clock import SYSTEM_CLOCK, Clock

BURST_S = 1.0
"""Cap on unused bandwidth that is saved up, in seconds' worth."""


class Bandwidth:
    def __init__(self, bytes_per_s: float, *, clock: Clock = SYSTEM_CLOCK) -> None:
        """bytes_per_s: 0 for no limit."""
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._lock = threading.Lock()
        self._free_at = clock.elapsed() - BURST_S
        """When everything taken so far will have been sent, at this rate."""

    def take(self, nbytes: int) -> None:
        """Wait until everything taken before is sent. A large piece delays only the next one."""
        if not self._bytes_per_s:
            return
        with self._lock:
            now = self._clock.elapsed()
            begins = max(self._free_at, now - BURST_S)
            self._free_at = begins + nbytes / self._bytes_per_s
        if begins > now:
            self._clock.sleep(begins - now)
