"""Decides when a tier that failed is used again. Thread-safe.

A disk that fails receives no writes for 1, 2, 4, ... seconds (`Backoff`). A store fails more often,
but briefly, and many threads call it: a few failures in a row open its circuit, and then one call
at a time checks whether it is back (`CircuitBreaker`).
"""

from __future__ import annotations

import logging
import threading
from random import Random

from firn.cache.storage.faults import TierFault
from firn.cache.tiers import TierStatus
from firn.core.clock import SYSTEM_CLOCK, Clock

log = logging.getLogger("firn.cache")

FIRST_S, MAX_S = 1.0, 60.0
N_FAILURES = 3
"""Failures in a row that open a circuit."""
JITTER = 0.25
"""A store's pause varies by up to this share, so that a fleet does not return all together."""


class Backoff:
    """Pauses that double. A warning is logged at the first one, and another when they are over."""

    def __init__(
        self,
        *,
        paused: str,
        resumed: str,
        first_s: float = FIRST_S,
        max_s: float = MAX_S,
        jitter: float = 0.0,
        clock: Clock = SYSTEM_CLOCK,
        random: Random | None = None,
    ) -> None:
        """paused, resumed: log messages, followed by the reason."""
        self._paused = paused
        self._resumed = resumed
        self._first_s = first_s
        self._max_s = max_s
        self._jitter = jitter
        self._clock = clock
        self._random = random or Random()
        self._lock = threading.Lock()
        self._n_pauses = 0
        self._retry_at = 0.0
        self.status = TierStatus()

    @property
    def is_paused(self) -> bool:
        """Whether it has failed and not worked since. The pause itself may be over."""
        return self._n_pauses > 0

    def check(self, reason: str = "paused") -> None:
        """Raises TierFault until the pause is over."""
        if self._n_pauses and self._clock.elapsed() < self._retry_at:
            raise TierFault(reason, self.status.reason)

    def failed(self, fault: TierFault) -> None:
        with self._lock:
            pause_s = min(self._first_s * 2**self._n_pauses, self._max_s)
            pause_s *= 1 + self._jitter * (2 * self._random.random() - 1)
            self._n_pauses = min(self._n_pauses + 1, 32)
            self._retry_at = self._clock.elapsed() + pause_s
            is_new = self.status.state == "ok"
            since = self._clock.wall() if is_new else self.status.since
            self.status = TierStatus("paused", fault.message, since)
        level = logging.WARNING if is_new else logging.DEBUG
        log.log(level, "%s: %s; next try in %.1f s", self._paused, fault.message, pause_s)

    def worked(self) -> None:
        with self._lock:
            was_paused, self._n_pauses = self._n_pauses > 0, 0
            status, self.status = self.status, TierStatus()
        if was_paused:
            log.warning("%s (last error: %s)", self._resumed, status.reason)


class CircuitBreaker:
    """Decides whether to call a store. After `check` passes, call `failed`, `worked` or `ended`."""

    def __init__(
        self,
        store: str,
        *,
        clock: Clock = SYSTEM_CLOCK,
        random: Random | None = None,
    ) -> None:
        self._backoff = Backoff(
            paused=f"the {store} store is paused",
            resumed=f"the {store} store answers again",
            jitter=JITTER,
            clock=clock,
            random=random,
        )
        self._lock = threading.Lock()
        self._n_failures = 0
        self._is_probing = False
        """The circuit is open, and a call is checking whether the store is back."""

    @property
    def status(self) -> TierStatus:
        return self._backoff.status

    def check(self) -> None:
        """Called before a call to the store. Raises TierFault while the store is left alone."""
        with self._lock:
            if not self._backoff.is_paused:
                return
            if self._is_probing:
                raise TierFault("circuit open", self.status.reason)
            self._backoff.check("circuit open")
            self._is_probing = True

    def failed(self, fault: TierFault, *, for_good: bool = False) -> None:
        """for_good: retrying will not help, as with wrong credentials."""
        with self._lock:
            self._n_failures += 1
            if self._n_failures < N_FAILURES and not for_good and not self._backoff.is_paused:
                return
            self._is_probing = False
        self._backoff.failed(fault)

    def worked(self) -> None:
        with self._lock:
            self._n_failures = 0
            self._is_probing = False
        self._backoff.worked()

    def ended(self) -> None:
        """The call ended in a way that says nothing about the store."""
        with self._lock:
            self._is_probing = False
