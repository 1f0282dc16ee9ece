"""Garbage collection for a tree of half a million objects that live for hours.

A full collection visits every object while all threads wait: 0.1 s with 100,000 stored records. So
it runs mostly while the engine is idle, and long-lived objects are frozen, which hides them from
the collector. Reference counts still free them: only cycles need the collector, and the tree breaks
its own. Objects of a running request may become part of a cycle later, so nothing is frozen while
requests run, except the thousands of records that a scan finds.

glibc keeps freed memory for the thread that used it, and a server has many threads: with buffers of
varying sizes that can be several times what MLX has in use. So free memory is returned to the
system when there is no work, and under load whenever the process has grown by GROWN_BUSY_BYTES. (A
low M_MMAP_THRESHOLD would return each buffer immediately, but its page faults cost prefill on a CPU
a third of its speed.)

Owner: the engine thread. Acts on the whole process: a server has one, tests have none.
"""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from collections.abc import Callable

from firn.core.clock import SYSTEM_CLOCK, Clock

IDLE_EVERY_S, BUSY_EVERY_S = 60.0, 600.0
"""The time between two full collections."""
NEVER = 1 << 30
MANY = 64
"""Smaller batches of records are not frozen: freezing affects every other object, too."""
GROWN_BUSY_BYTES, GROWN_IDLE_BYTES = 256 << 20, 64 << 20
LOOK_EVERY_S = 0.25
"""How often the size of the process is read."""


class Garbage:
    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        """From now on Python itself collects young objects only."""
        self._clock = clock
        self._collected_at = clock.elapsed()
        self._heap = Heap(clock)
        gc.set_threshold(*gc.get_threshold()[:2], NEVER)
        gc.freeze()

    def keep(self, *, n_new: int) -> None:
        """Freeze `n_new` records that were just created and will live long."""
        if n_new < MANY:
            return
        gc.collect(1)
        gc.freeze()

    def tick(self, *, idle: bool) -> None:
        """Trim the heap if it has grown; now and then, collect all that is not frozen."""
        self._heap.tick(idle=idle)
        if self._clock.elapsed() - self._collected_at < (IDLE_EVERY_S if idle else BUSY_EVERY_S):
            return
        gc.collect()
        if idle:
            gc.freeze()
            self._heap.trim()
        self._collected_at = self._clock.elapsed()


class Heap:
    """The C library's heap. A separate thread trims it, because that may take 100 ms."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._malloc_trim = _malloc_trim()
        self._looked_at = clock.elapsed()
        self._resident = _resident_bytes()
        self._trimming = threading.Lock()

    def tick(self, *, idle: bool) -> None:
        if self._clock.elapsed() - self._looked_at < LOOK_EVERY_S:
            return
        self._looked_at = self._clock.elapsed()
        grown = _resident_bytes() - self._resident
        if grown >= (GROWN_IDLE_BYTES if idle else GROWN_BUSY_BYTES):
            self.trim()

    def trim(self) -> None:
        """Returns immediately. Does nothing without glibc, or while the last trim still runs."""
        if self._malloc_trim and self._trimming.acquire(blocking=False):
            threading.Thread(target=self._run, name="firn-trim", daemon=True).start()

    def _run(self) -> None:
        try:
            assert self._malloc_trim
            self._malloc_trim(0)
            self._resident = _resident_bytes()
        finally:
            self._trimming.release()


def _malloc_trim() -> Callable[[int], int] | None:
    try:
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
        return trim
    except (OSError, AttributeError):  # macOS, musl
        return None


def _resident_bytes() -> int:
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:  # macOS
        return 0
