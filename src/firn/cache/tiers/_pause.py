"""When to try again after the disk failed: after 1, 2, 4, ... seconds."""

from __future__ import annotations

import logging
from collections.abc import Callable

from firn.cache.faults import TierFault
from firn.cache.tiers import Status

log = logging.getLogger("firn.cache")


class Pause:
    """Whether the tier writes. Owner: the tier, under its mutex."""

    def __init__(
        self,
        *,
        first_s: float,
        max_s: float,
        clock: Callable[[], float],
        wall: Callable[[], float],
    ) -> None:
        self._first_s = first_s
        self._max_s = max_s
        self._clock = clock
        self._wall = wall
        self._n_failures = 0
        self._retry_at = 0.0
        self.status = Status()

    def check(self) -> None:
        """Raises TierFault while it is too early for another try."""
        if self._n_failures and self._clock() < self._retry_at:
            raise TierFault("paused", self.status.reason)

    def failed(self, fault: TierFault) -> None:
        wait = min(self._first_s * 2**self._n_failures, self._max_s)
        self._n_failures = min(self._n_failures + 1, 32)
        self._retry_at = self._clock() + wait
        is_new = self.status.state == "ok"
        since = self._wall() if is_new else self.status.since
        self.status = Status("paused", fault.message, since)
        level = logging.WARNING if is_new else logging.DEBUG
        log.log(level, "the SSD cache pauses writing: %s; next try in %.0f s", fault.message, wait)

    def worked(self) -> None:
        if self._n_failures:
            log.warning("the SSD cache writes again, after: %s", self.status.reason)
        self._n_failures = 0
        self.status = Status()
