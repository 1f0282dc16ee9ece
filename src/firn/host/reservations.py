"""How much of the machine's memory each firn server of this user has reserved.

Each has a small file that it keeps locked while it runs. When it dies, in whatever way, the kernel
releases the lock, and the next server that looks removes the file. A file is removed only by a
process that holds its lock and finds it still at its path. A fault here never prevents a start.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

from firn.core.private_folder import make_private

log = logging.getLogger("firn")

TEXT_NBYTES = 256
N_TRIES, RETRY_S = 10, 0.01
"""Attempts to lock this process's own file: others that look at it lock it for microseconds."""


@dataclass(frozen=True, slots=True)
class Reserved:
    """group: servers that share a budget among themselves (a front's models) do not count each other."""

    device: str
    group: int
    reserved_nbytes: int
    used_nbytes: int

    @property
    def unclaimed_nbytes(self) -> int:
        return max(self.reserved_nbytes - self.used_nbytes, 0)


class Reservation:
    """This process's own file. Owner: the server, from its memory plan to its end."""

    def __init__(self, folder: Path, *, pid: int | None = None) -> None:
        self._path = folder / f"{pid or os.getpid()}.json"
        self._file: IO[bytes] | None = None
        self._has_failed = False

    def put(self, reserved: Reserved) -> None:
        """Write what this process has reserved and uses now."""
        try:
            file = self._file or self._open()
            # One write of fixed length: a reader sees either the old text or the new one.
            os.pwrite(file.fileno(), json.dumps(asdict(reserved)).ljust(TEXT_NBYTES).encode(), 0)
        except OSError as e:
            level = logging.DEBUG if self._has_failed else logging.WARNING  # put is called often
            self._has_failed = True
            log.log(level, "other firn servers will not know how much memory this one needs: %s", e)

    def _open(self) -> IO[bytes]:
        """Retries, because another process may look between opening and locking. It would take this
        for a dead server's file, lock it for a moment and remove it."""
        make_private(self._path.parent)
        for _ in range(N_TRIES):
            # Not in append mode: on Linux, pwrite would then ignore its offset and append.
            file = os.fdopen(os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0)
            if _lock(file) and _is_at(self._path, file):
                self._file = file
                return file
            file.close()
            time.sleep(RETRY_S)
        raise BlockingIOError(errno.EAGAIN, "another process has locked it", str(self._path))

    def close(self) -> None:
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)
            self._file.close()
            self._file = None


def others(folder: Path, *, device: str, group: int, pid: int | None = None) -> list[Reserved]:
    """What other running servers have reserved on this device, except those of the same group."""
    living = []
    for path in _files(folder):
        if path.stem == str(pid or os.getpid()):
            continue
        reserved = _read(path)
        if reserved is not None and reserved.device == device and reserved.group != group:
            living.append(reserved)
    return living


def _files(folder: Path) -> list[Path]:
    """Empty if the folder cannot be read."""
    try:
        return sorted(folder.glob("*.json"))
    except OSError:
        return []


def _read(path: Path) -> Reserved | None:
    """None: its server is gone, or the file cannot be read."""
    try:
        with path.open("r+b", buffering=0) as file:
            if not _lock(file):  # its server is running
                return Reserved(**json.load(file))
            if _is_at(path, file):
                path.unlink(missing_ok=True)
    except (OSError, ValueError, TypeError):
        pass
    return None


def _lock(file: IO[bytes]) -> bool:
    """False: another process has locked it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_at(path: Path, file: IO[bytes]) -> bool:
    """Whether this path still leads to this file, which may have been removed or replaced."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False
