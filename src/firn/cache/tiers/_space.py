"""How much a folder may take up on a disk that has become full: what it had then, until there is room.

The tier goes on evicting its own oldest records for new ones, instead of keeping what it happened to
have. Other programs' files, quotas and snapshots fill disks too, so the only sign is a write that fails.

Owner: the tier, under its mutex.
"""

from __future__ import annotations

import errno
import logging
from collections.abc import Callable
from pathlib import Path

from firn.core.clock import Clock

log = logging.getLogger("firn.cache")

FULL = {errno.ENOSPC, errno.EDQUOT}


class DiskSpace:
    def __init__(self, folder: Path, clock: Clock, *, first_s: float, max_s: float) -> None:
        """first_s, max_s: how long the limit stays before it may rise; twice as long each time that
        the disk is full again."""
        self._folder = folder
        self._clock = clock
        self._first_s = first_s
        self._max_s = max_s
        self._n_times = 0
        self._limit_nbytes: int | None = None
        """None: as far as is known, there is room."""
        self._raise_at = 0.0

    @property
    def is_full(self) -> bool:
        return self._limit_nbytes is not None

    def ran_out(self, used_nbytes: int) -> None:
        """A write has failed while the folder took up `used_nbytes`."""
        if self._limit_nbytes is None:
            log.warning(
                "the disk of the SSD cache %s is full: it keeps to the %.1f GiB that it has, evicting "
                "its oldest records, until there is room",
                self._folder,
                used_nbytes / 2**30,
            )
        self._limit_nbytes = used_nbytes
        self._n_times += 1
        self._put_off()

    def _put_off(self) -> None:
        pause_s = min(self._first_s * 2 ** min(self._n_times - 1, 32), self._max_s)
        self._raise_at = self._clock.elapsed() + pause_s

    def forget(self) -> None:
        """Making room did not help: the tier pauses, and then begins anew."""
        self._limit_nbytes = None

    def limited(
        self, limit_nbytes: int, *, used: Callable[[], int], free: Callable[[], int]
    ) -> int:
        """The limit that holds now. used, free: bytes that the folder takes up, and that are free."""
        if self._limit_nbytes is None:
            return limit_nbytes
        if self._clock.elapsed() >= self._raise_at:
            self._put_off()
            # Half of what is free: others write there, too.
            self._limit_nbytes = max(self._limit_nbytes, used() + free() // 2)
            if self._limit_nbytes >= limit_nbytes:
                self._limit_nbytes, self._n_times = None, 0
                log.warning("the disk of the SSD cache %s has room again", self._folder)
                return limit_nbytes
        return min(self._limit_nbytes, limit_nbytes)
