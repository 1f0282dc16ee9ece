"""Python's garbage collector beside a tree of half a million objects that live for hours.

A full collection looks at every object there is, and all threads wait for it: a tenth of a second with
100,000 stored records. So it comes when the engine has nothing to do, and what is known to live long is
taken out of its sight ("frozen"). Reference counts free that: only cycles need the collector, and the
tree breaks its own. What a request had at that moment is frozen with it, and may be a cycle later: so,
once an hour, after a minute without work, the collector looks at everything.

What is free goes back to the system then: glibc keeps it for the thread that had it, and a server has
many.

Owner: the engine thread. For a whole process: a server has one, tests have none.
"""

from __future__ import annotations

import ctypes
import gc
import time
from collections.abc import Callable

IDLE_EVERY_S, BUSY_EVERY_S, WHOLE_EVERY_S = 60.0, 600.0, 3600.0
NEVER = 1 << 30
MANY = 64
"""Fewer records are not worth to freeze the rest of the process with them."""


class Garbage:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Takes over from Python: of its own accord it collects young objects only."""
        self._clock = clock
        self._collected_at = self._whole_at = clock()
        self._was_idle = False
        """All the time since the last collection."""
        self._trim = _trim()
        gc.set_threshold(*gc.get_threshold()[:2], NEVER)
        gc.freeze()

    def keep(self, *, n_new: int) -> None:
        """What was just made is to stay: so many records, and what belongs to them."""
        if n_new < MANY:
            return
        gc.collect(1)
        gc.freeze()

    def tick(self, *, idle: bool) -> None:
        """Now and then a full collection, of what is new since the last."""
        self._was_idle = self._was_idle and idle
        now = self._clock()
        if now - self._collected_at < (IDLE_EVERY_S if idle else BUSY_EVERY_S):
            return
        if self._was_idle and now - self._whole_at >= WHOLE_EVERY_S:
            gc.unfreeze()
            self._whole_at = now
        gc.collect()
        gc.freeze()
        if idle:
            self._trim()
        self._collected_at, self._was_idle = self._clock(), idle


def _trim() -> Callable[[], object]:
    """Gives free memory back to the system, where the C library keeps it."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):  # macOS, musl
        return lambda: None
    return lambda: trim(0)
