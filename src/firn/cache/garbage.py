"""Python's garbage collector beside a tree of half a million objects that live for hours.

A full collection looks at every object there is, and all threads wait for it: a tenth of a second with
100,000 stored records. So it comes when the engine has nothing to do, and what is known to live long is
taken out of its sight ("frozen"). Reference counts free that: only cycles need the collector, and the
tree breaks its own.

Owner: the engine thread. For a whole process: a server has one, tests have none.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

IDLE_EVERY_S, BUSY_EVERY_S = 60.0, 600.0
NEVER = 1 << 30


class Garbage:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Takes over from Python: of its own accord it collects young objects only."""
        self._clock = clock
        self._collected_at = clock()
        gc.set_threshold(*gc.get_threshold()[:2], NEVER)
        gc.freeze()

    def keep(self) -> None:
        """What was just made is to stay."""
        gc.collect(1)
        gc.freeze()

    def tick(self, *, idle: bool) -> None:
        """Now and then a full collection, of what is new since the last."""
        if self._clock() - self._collected_at >= (IDLE_EVERY_S if idle else BUSY_EVERY_S):
            gc.collect()
            gc.freeze()
            self._collected_at = self._clock()
