"""Whether a store that failed is asked again: a circuit breaker. Thread-safe.

Closed, calls go through. After some failures in a row it opens: calls fail at once, for 1, 2, 4, ...
seconds with jitter. Then one call is let through to find out; its end closes the circuit or opens it for
longer.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable

from firn.cache.storage.faults import TierFault
from firn.cache.tiers import Status

log = logging.getLogger("firn.cache")

N_FAILURES = 3
"""So many in a row open the circuit."""
FIRST_S, MAX_S = 1.0, 60.0
JITTER = 0.25
"""A pause is longer or shorter by at most this share: a fleet must not come back all at once."""


class CircuitBreaker:
    def __init__(
        self,
        tier: str,
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._tier = tier
        self._clock = clock
        self._wall = wall
        self._jitter = jitter
        self._lock = threading.Lock()
        self._n_failures = 0
        self._n_pauses = 0
        self._opens_at = 0.0
        """When the next call may go through, while the circuit is open."""
        self._is_probing = False
        self.status = Status()

    def check(self) -> None:
        """Before a call. Raises TierFault while the store is left alone."""
        with self._lock:
            if not self._n_pauses:
                return
            if self._is_probing or self._clock() < self._opens_at:
                raise TierFault("circuit open", self.status.reason)
            self._is_probing = True

    def failed(self, fault: TierFault, *, for_good: bool = False) -> None:
        """for_good: trying again will not help, as with wrong credentials."""
        with self._lock:
            self._n_failures += 1
            if self._n_failures < N_FAILURES and not for_good and not self._n_pauses:
                return
            pause_s = min(FIRST_S * 2**self._n_pauses, MAX_S)
            pause_s *= 1 + JITTER * (2 * self._jitter() - 1)
            self._n_pauses = min(self._n_pauses + 1, 32)
            self._opens_at = self._clock() + pause_s
            self._is_probing = False
            is_new = self.status.state == "ok"
            since = self._wall() if is_new else self.status.since
            self.status = Status("paused", fault.message, since)
        level = logging.WARNING if is_new else logging.DEBUG
        text = "the %s store is left alone: %s; next try in %.1f s"
        log.log(level, text, self._tier, fault.message, pause_s)

    def worked(self) -> None:
        with self._lock:
            was_open = self._n_pauses > 0
            self._n_failures = self._n_pauses = 0
            self._is_probing = False
            status, self.status = self.status, Status()
        if was_open:
            log.warning("the %s store answers again, after: %s", self._tier, status.reason)

    def ended(self) -> None:
        """A call ended in a way that says nothing of the store's health."""
        with self._lock:
            self._is_probing = False
