"""Notices that the launcher of this rank is gone: the ranks would go on serving without it.

`mlx.launch` that is told to end ends at once, and leaves its processes alone. It holds the other end
of their standard input, and is their parent. Only both signs together count: a rank that somebody
has started in the background also gets a new parent, and MPI may close the standard input at any time.

Owner: the process. The thread never ends.
"""

from __future__ import annotations

import logging
import os
import select
import stat
import sys
import threading
from collections.abc import Callable

log = logging.getLogger("firn.ranks")

EVERY_MS = 1000


class Launcher:
    def __init__(self) -> None:
        """To be made before the model is loaded: the launcher may be gone by then."""
        self._pid = os.getppid()

    def watch(self, gone: Callable[[], object]) -> None:
        """gone: called once, on a thread of its own."""
        fd = sys.__stdin__.fileno() if sys.__stdin__ is not None else -1
        if fd >= 0 and stat.S_ISFIFO(os.fstat(fd).st_mode):
            args = (fd, gone)
            threading.Thread(
                target=self._watch, args=args, name="firn-launcher", daemon=True
            ).start()

    def _watch(self, fd: int, gone: Callable[[], object]) -> None:
        pipe, wait = select.poll(), threading.Event().wait
        pipe.register(fd, 0)  # hang-ups are reported in any case
        while not pipe.poll(EVERY_MS):
            pass
        while os.getppid() == self._pid:
            wait(EVERY_MS / 1000)
        log.warning("the launcher of this rank is gone: all ranks stop")
        gone()
