"""Waiting for another thread, without taking the processor from it meanwhile."""

from __future__ import annotations

import time
from collections.abc import Callable

POLL_S = 0.001
WAIT_S = 60.0


def wait_until(is_so: Callable[[], object]) -> None:
    until = time.monotonic() + WAIT_S
    while not is_so():
        assert time.monotonic() < until, "it took too long"
        time.sleep(POLL_S)
