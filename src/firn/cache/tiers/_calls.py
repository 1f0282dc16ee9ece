"""Calls to a network store: within a deadline, retried with jitter, behind a circuit breaker.

An attempt may take half the deadline, and none begins in its second half. So two slow attempts use up
the deadline, and calls that fail immediately are retried more often. Thread-safe.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import TypeVar

from firn.cache.storage.faults import PermanentFault, TierError, TierFault
from firn.cache.tiers._backoff import CircuitBreaker

T = TypeVar("T")
N_TRIES = 3
FIRST_PAUSE_S = 0.05


class RetriedCalls:
    def __init__(
        self,
        breaker: CircuitBreaker,
        *,
        deadline_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self.breaker = breaker
        self.attempt_s = deadline_s / 2
        """Time limit of one attempt. The client enforces it."""
        self._clock = clock
        self._sleep = sleep
        self._jitter = jitter

    def run(self, attempt: Callable[[], T]) -> T:
        """Raises what the attempt raises; a TierFault only if it may not be retried."""
        self.breaker.check()
        began = self._clock()
        n_tries = 0
        while True:
            try:
                result = attempt()
            except TierFault as fault:
                n_tries += 1
                # Full jitter: servers that failed together must not retry together.
                pause_s = FIRST_PAUSE_S * 2**n_tries * self._jitter()
                is_late = self._clock() - began + pause_s > self.attempt_s
                if n_tries >= N_TRIES or is_late or isinstance(fault, PermanentFault):
                    self.breaker.failed(fault, for_good=isinstance(fault, PermanentFault))
                    raise
                self._sleep(pause_s)
            except TierError:  # an answer: not there, full, damaged
                self.breaker.worked()
                raise
            except BaseException:
                self.breaker.ended()
                raise
            else:
                self.breaker.worked()
                return result
