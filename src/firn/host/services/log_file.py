"""Keeps the file small that a supervisor appends a service's output to.

launchd has no log rotation, and the system's own (newsyslog) needs root. The file stays in its place,
because launchd and the processes of a front's models have it open: what it holds is copied to `.1`,
`.1` having become `.2`, and then it is emptied. Lines written between the two are lost.

Owner: a thread of the service.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import threading
import time
from pathlib import Path

from firn.core.units import MIB

LARGEST_NBYTES = 16 * MIB
N_OLD = 3
LOOK_S = 60.0


class LogFile:
    def __init__(
        self,
        path: Path,
        *,
        descriptors: tuple[int, ...] = (1, 2),
        largest_nbytes: int = LARGEST_NBYTES,
        look_s: float = LOOK_S,
    ) -> None:
        self._path = path
        self._descriptors = descriptors
        self._largest_nbytes = largest_nbytes
        self._look_s = look_s

    def watch(self) -> None:
        """In a thread, as long as the process lives."""
        threading.Thread(target=self._watch, name="firn-log", daemon=True).start()

    def _watch(self) -> None:
        while True:
            self.rotate()
            time.sleep(self._look_s)

    def rotate(self) -> bool:
        """Whether the file was too large and has been emptied."""
        for descriptor in self._descriptors:
            if self._is_it(descriptor) and os.fstat(descriptor).st_size > self._largest_nbytes:
                self._keep()
                os.ftruncate(descriptor, 0)
                return True
        return False

    def _is_it(self, descriptor: int) -> bool:
        """Whether output goes to this file; it is appended from now on, wherever the file ends."""
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode) or not os.path.samestat(status, self._path.stat()):
                return False
            flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
            fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_APPEND)
        except OSError:
            return False
        return True

    def _keep(self) -> None:
        """A full disk keeps nothing: emptying the file is then the more urgent."""
        with contextlib.suppress(OSError):
            for n in range(N_OLD, 1, -1):
                with contextlib.suppress(FileNotFoundError):
                    self._old(n - 1).replace(self._old(n))
            shutil.copyfile(self._path, self._old(1))
            self._old(1).chmod(0o600)

    def _old(self, n: int) -> Path:
        return self._path.with_name(f"{self._path.name}.{n}")
