"""How a tier is: whether it takes writes, and what it did. Thread-safe."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable

from firn.cache.storage.faults import TierFault
from firn.cache.tiers import Status

log = logging.getLogger("firn.cache")


class WriteBackoff:
    """When to try again after a tier failed: after 1, 2, 4, ... seconds."""

    def __init__(
        self,
        tier: str,
        *,
        first_s: float,
        max_s: float,
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self._tier = tier
        self._first_s = first_s
        self._max_s = max_s
        self._clock = clock
        self._wall = wall
        self._lock = threading.Lock()
        self._n_failures = 0
        self._retry_at = 0.0
        self.status = Status()

    def check(self) -> None:
        """Raises TierFault while it is too early for another try."""
        if self._n_failures and self._clock() < self._retry_at:
            raise TierFault("paused", self.status.reason)

    def failed(self, fault: TierFault) -> None:
        with self._lock:
            wait = min(self._first_s * 2**self._n_failures, self._max_s)
            self._n_failures = min(self._n_failures + 1, 32)
            self._retry_at = self._clock() + wait
            is_new = self.status.state == "ok"
            since = self._wall() if is_new else self.status.since
            self.status = Status("paused", fault.message, since)
        level = logging.WARNING if is_new else logging.DEBUG
        text = "the %s cache pauses writing: %s; next try in %.0f s"
        log.log(level, text, self._tier, fault.message, wait)

    def worked(self) -> None:
        with self._lock:
            if self._n_failures:
                log.warning("the %s cache writes again, after: %s", self._tier, self.status.reason)
            self._n_failures = 0
            self.status = Status()


class Tally:
    """Counts by name, and drops by reason."""

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
