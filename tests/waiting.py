"""Waiting for another thread, without taking the processor away from it."""

from __future__ import annotations

import time
from collections.abc import Callable

POLL_S, MAX_POLL_S = 0.001, 0.02
"""The first and the longest sleep between two checks, some of which are requests."""
WAIT_S = 60.0


def wait_until(is_so: Callable[[], object]) -> None:
    until, poll_s = time.monotonic() + WAIT_S, POLL_S
    while not is_so():
        assert time.monotonic() < until, "it took too long"
        time.sleep(poll_s)
        poll_s = min(1.5 * poll_s, MAX_POLL_S)
