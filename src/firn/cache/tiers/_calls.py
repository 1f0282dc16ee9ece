"""Calls to a network store: within a deadline, retried with jitter, behind a circuit breaker.

An attempt may take half the deadline, and none begins in its second half. So two slow attempts use up
the deadline, and calls that fail immediately are retried more often. Thread-safe.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import TypeVar

from firn.cache.storage.faults import PermanentFault, TierError, TierFault
from firn.cache.tiers._backoff import CircuitBreaker
from firn.core.clock import SYSTEM_CLOCK, Clock

T = TypeVar("T")
N_TRIES = 3
FIRST_PAUSE_S = 0.05


class RetriedCalls:
    def __init__(
        self,
        breaker: CircuitBreaker,
        *,
        deadline_s: float,
        clock: Clock = SYSTEM_CLOCK,
        random: Random | None = None,
    ) -> None:
        self.breaker = breaker
        self.attempt_s = deadline_s / 2
        """Time limit of one attempt. The client enforces it."""
        self._clock = clock
        self._random = random or Random()

    def run(self, attempt: Callable[[], T]) -> T:
        """Raises what the attempt raises; a TierFault only if it may not be retried."""
        self.breaker.check()
        began = self._clock.elapsed()
        n_tries = 0
        while True:
            try:
                result = attempt()
            except TierFault as fault:
                n_tries += 1
                # Full jitter: servers that failed together must not retry together.
                pause_s = FIRST_PAUSE_S * 2**n_tries * self._random.random()
                is_late = self._clock.elapsed() - began + pause_s > self.attempt_s
                if n_tries >= N_TRIES or is_late or isinstance(fault, PermanentFault):
                    self.breaker.failed(fault, for_good=isinstance(fault, PermanentFault))
                    raise
                self._clock.sleep(pause_s)
            except TierError:  # an answer: not there, full, damaged
                self.breaker.worked()
                raise
            except BaseException:
                self.breaker.ended()
                raise
            else:
                self.breaker.worked()
                return result
