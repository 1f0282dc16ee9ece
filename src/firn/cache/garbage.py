"""Python's garbage collector beside a tree of half a million objects that live for hours.

A full collection looks at every object there is, and all threads wait for it: a tenth of a second with
100,000 stored records. So it comes when the engine has nothing to do, and what is known to live long is
taken out of its sight ("frozen"). Reference counts free that: only cycles need the collector, and the
tree breaks its own. What a running request has may be a cycle later: nothing is frozen while there are
any, but for the records that a scan brings by the thousands.

What is free goes back to the system when there is no work: glibc keeps it for the thread that had it,
and a server has many.

Owner: the engine thread. For a whole process: a server has one, tests have none.
"""

from __future__ import annotations

import ctypes
import gc
import threading
import time
from collections.abc import Callable

IDLE_EVERY_S, BUSY_EVERY_S = 60.0, 600.0
NEVER = 1 << 30
MANY = 64
"""Fewer records are not worth to freeze the rest of the process with them."""


class Garbage:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Takes over from Python: of its own accord it collects young objects only."""
        self._clock = clock
        self._collected_at = clock()
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
        if self._clock() - self._collected_at < (IDLE_EVERY_S if idle else BUSY_EVERY_S):
            return
        gc.collect()
        if idle:
            gc.freeze()
            threading.Thread(target=self._trim, name="firn-trim", daemon=True).start()
        self._collected_at = self._clock()


def _trim() -> Callable[[], object]:
    """Gives free memory back to the system, where the C library keeps it."""
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):  # macOS, musl
        return lambda: None
    return lambda: trim(0)
