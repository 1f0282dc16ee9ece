"""Helpers for tests of the SSD tier's folder: a clock, files and bytes, a disk without locks."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from firn.cache.tiers._folder import (
    Disk,
)
from tests.cache.tiers.records import Folder, Record


class Clock:
    def __init__(self, now: float = 1_800_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def step(self, seconds: float = 1.0) -> None:
        self.now += seconds


def put(tier: Folder, *records: Record) -> None:
    for one in records:
        tier.write(one)


def du(folder: Path) -> int:
    """Bytes on the disk, each file once, folders included."""
    files = {}
    for base, _, names in os.walk(folder):
        for path in [base, *(os.path.join(base, n) for n in names)]:
            st = os.lstat(path)
            files[st.st_ino] = st.st_blocks * 512
    return sum(files.values())


def files(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.glob("??/*")}


class Lockless(Disk):
    """A file system that refuses locks: some network ones do, for some files or for all."""

    def __init__(self, folder: Path, number: int) -> None:
        super().__init__(folder)
        self._number = number

    def try_lock(self, fd: int) -> bool:
        real, fcntl.flock = fcntl.flock, self._flock
        try:
            return super().try_lock(fd)
        finally:
            fcntl.flock = real

    def _flock(self, fd: int, flags: int) -> None:
        raise OSError(self._number, os.strerror(self._number))
