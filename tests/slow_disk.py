"""A disk with a set latency and bandwidth, under the real SSD tier.

    disk = SlowDisk(folder, latency_s=0.005, nbytes_per_s=50e6)
    tier = SsdTier(TierOptions(str(folder), limit), disk=disk)

Every opening or creation of a file costs the latency, which threads wait for in parallel; they
share the bandwidth. `stall()` keeps every transfer waiting until `resume()`. All of it may be
changed at any time.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from firn.cache.tiers import Buffer
from firn.cache.tiers._folder import Disk


class SlowDisk(Disk):
    def __init__(
        self,
        folder: Path,
        *,
        latency_s: float = 0.0,
        nbytes_per_s: float = float("inf"),
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        super().__init__(folder)
        self.latency_s = latency_s
        self.nbytes_per_s = nbytes_per_s
        self._clock, self._sleep = clock, sleep
        self.n_waiting = 0
        """Transfers that wait because of a stall."""
        self._lock = threading.Lock()
        self._free_at = 0.0
        self._moving = threading.Event()
        self._moving.set()

    def stall(self) -> None:
        self._moving.clear()

    def resume(self) -> None:
        self._moving.set()

    def open(self, path: str, flags: int = os.O_RDONLY) -> int:
        if self.latency_s and path.endswith((".safetensors", ".tmp")):
            self._sleep(self.latency_s)
        return super().open(path, flags)

    def read(self, fd: int, buffer: memoryview) -> int:
        n = super().read(fd, buffer)
        self._transfer(n)
        return n

    def write(self, fd: int, pieces: Sequence[Buffer]) -> None:
        self._transfer(sum(len(p) for p in pieces))
        super().write(fd, pieces)

    def _transfer(self, nbytes: int) -> None:
        """Wait for as long as the disk would take, after the transfers before it."""
        if not self._moving.is_set():
            with self._lock:
                self.n_waiting += 1
            self._moving.wait()
            with self._lock:
                self.n_waiting -= 1
        with self._lock:
            start = max(self._free_at, self._clock())
            self._free_at = start + nbytes / self.nbytes_per_s
            wait = self._free_at - self._clock()
        if wait > 0:
            self._sleep(wait)
