"""What the processes that share a folder tell each other: one lock, and one page of numbers behind it.

    firn.lock:  magic | limit | 257 counters | 24 x (hour, bytes written in it)

A counter belongs to a folder of records and goes up, under the lock, just before anything in that folder
changes. A process that finds a counter where it left it need not list the folder again; one that dies
between the two steps has only caused a listing. Nothing here is the truth: a page that is lost or
unreadable is made anew with random counters, so that everyone lists everything once.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator

import numpy as np
import numpy.typing as npt

from firn.cache.faults import TierFault
from firn.cache.tiers._disk import LOCK, QUARANTINE, SHELVES, Disk

MAGIC = int.from_bytes(b"firn pg1", "little")
COUNTED = (*SHELVES, QUARANTINE)
N_HOURS = 24
_LIMIT, _COUNTERS, _HOURS = 1, 2, 2 + len(COUNTED)
_N_WORDS = _HOURS + 2 * N_HOURS
INDEX = {shelf: i for i, shelf in enumerate(COUNTED)}
POLL_S = 0.0002
MAX_POLL_S = 0.002

Counters = npt.NDArray[np.uint64]


class Page:
    """The numbers, in the hands of the process that holds the lock."""

    def __init__(self, words: Counters, save: Callable[[bytes], None]) -> None:
        self._words = words
        self._save = save

    @property
    def counters(self) -> Counters:
        return self._words[_COUNTERS:_HOURS]

    @property
    def limit_nbytes(self) -> int:
        """The limit that the process which opened the folder last was given; 0 for none yet."""
        return int(self._words[_LIMIT])

    def set_limit(self, nbytes: int) -> None:
        if nbytes != self.limit_nbytes:
            self._words[_LIMIT] = nbytes
            self._save(self._words.tobytes())

    def announce(self, shelves: Iterable[str]) -> None:
        """These folders are about to change."""
        for shelf in shelves:
            self.counters[INDEX[shelf]] += np.uint64(1)
        self._save(self._words.tobytes())

    def day_nbytes(self, hour: int) -> int:
        """Bytes written in this hour and the 23 before it, by all processes."""
        hours = self._words[_HOURS:].reshape(N_HOURS, 2)
        return sum(int(n) for h, n in hours if hour - N_HOURS < int(h) <= hour)

    def add_written(self, hour: int, nbytes: int) -> None:
        """Saved with the next announcement: whoever writes bytes also changes a folder."""
        slot = self._words[_HOURS:].reshape(N_HOURS, 2)[hour % N_HOURS]
        if int(slot[0]) != hour:
            slot[0], slot[1] = hour, 0
        slot[1] += np.uint64(nbytes)


class FolderLock:
    """Owner: the tier, which lets one thread at a time in here."""

    def __init__(
        self, disk: Disk, *, timeout_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._disk = disk
        self._timeout_s = timeout_s
        self._clock = clock
        self._fd = -1

    @contextlib.contextmanager
    def hold(self) -> Iterator[Page]:
        """Raises TierFault when others keep it too long, OSError when the folder is no good."""
        fd = self._acquire()
        try:
            yield Page(self._words(fd), lambda page: self._disk.write_page(fd, page))
        finally:
            self._disk.unlock(fd)

    def close(self) -> None:
        if self._fd >= 0:
            self._disk.close(self._fd)
            self._fd = -1

    def _acquire(self) -> int:
        deadline = self._clock() + self._timeout_s
        poll = POLL_S
        while True:
            if self._fd < 0:
                self._disk.make_folder()
                self._fd = self._disk.open_lock()
            if self._disk.try_lock(self._fd):
                if self._disk.is_lock(self._fd):
                    return self._fd
                self.close()  # the folder was deleted under us: begin again
                continue
            if self._clock() >= deadline:
                raise TierFault("locked", "another process has held the folder's lock for long")
            time.sleep(poll)
            poll = min(2 * poll, MAX_POLL_S)

    def _words(self, fd: int) -> Counters:
        found = _parse(self._disk.read_page(fd, 8 * _N_WORDS))
        if found is not None:
            return found
        words = np.zeros(_N_WORDS, dtype=np.uint64)
        words[0] = MAGIC
        start = int.from_bytes(os.urandom(6), "little")
        words[_COUNTERS:_HOURS] = 1 + start
        self._disk.write_page(fd, words.tobytes())
        return words


def peek(disk: Disk) -> Page | None:
    """The numbers as they are now, to look at: without the lock, and not to be changed."""
    try:
        fd = disk.open(LOCK)
    except OSError:
        return None
    try:
        words = _parse(disk.read_page(fd, 8 * _N_WORDS))
    finally:
        disk.close(fd)
    return None if words is None else Page(words, lambda page: None)


def _parse(raw: bytes) -> Counters | None:
    if len(raw) != 8 * _N_WORDS:
        return None
    words = np.frombuffer(raw, dtype="<u8").astype(np.uint64)
    return words if words[0] == MAGIC else None
