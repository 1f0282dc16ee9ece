"""A limit on the bytes that are sent to a store in a second. Thread-safe."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

BURST_S = 1.0
"""The most that may be saved up: what this many seconds allow."""


class Bandwidth:
    def __init__(
        self,
        bytes_per_s: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """0: no limit."""
        self._bytes_per_s = bytes_per_s
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._free_at = clock() - BURST_S
        """When everything that was taken so far will have been sent, at this rate."""

    def take(self, nbytes: int) -> None:
        """Wait until what was taken before is sent. A large piece goes at once: the next one waits."""
        if not self._bytes_per_s:
            return
        with self._lock:
            now = self._clock()
            begins = max(self._free_at, now - BURST_S)
            self._free_at = begins + nbytes / self._bytes_per_s
        if begins > now:
            self._sleep(begins - now)
