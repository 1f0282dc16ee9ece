"""A tier in numbers: how fast it has been read of late, and what it did."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

DECAY = 0.9
"""What is left of a sample's weight when the next comes: about the last ten count."""


class Meter:
    """Bytes per second of time in which at least one read ran, so parallel reads add up. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._n_running = 0
        self._since = 0.0
        self._nbytes = 0.0
        self._seconds = 0.0

    @contextlib.contextmanager
    def read(self) -> Iterator[Callable[[int], None]]:
        """Around one read; call the value with the bytes that came. One that failed leaves no trace."""
        with self._lock:
            if self._n_running == 0:
                self._since = self._clock()
            self._n_running += 1
        try:
            yield self._came
        finally:
            with self._lock:
                self._n_running -= 1

    @property
    def nbytes_per_s(self) -> float:
        """0 while nothing has been read."""
        with self._lock:
            return self._nbytes / self._seconds if self._seconds else 0.0

    def _came(self, nbytes: int) -> None:
        with self._lock:
            now = self._clock()
            self._nbytes = DECAY * self._nbytes + nbytes
            self._seconds = DECAY * self._seconds + max(now - self._since, 1e-9)
            self._since = now


class Tally:
    """Counts by name, and drops by reason. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._drops: Counter[str] = Counter()

    def add(self, **counts: int) -> None:
        with self._lock:
            self._counts.update(counts)

    def drop(self, reason: str) -> None:
        with self._lock:
            self._drops[reason] += 1

    @property
    def counts(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)

    @property
    def drops(self) -> dict[str, int]:
        with self._lock:
            return dict(self._drops)
