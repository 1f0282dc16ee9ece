"""Keeps a Mac from falling asleep while requests run, and only then.

`caffeinate -i` prevents idle sleep while it runs, and `-w` ends it with this process, however that
ends. The display may still sleep, and closing the lid still puts the Mac to sleep. On other systems
there is nothing to do. Owner: the event loop of a server.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

from firn.host.programs import started

log = logging.getLogger("firn")

LINGER_S = 5.0
"""How long to stay awake after the last request: an agent's next turn follows within seconds."""


def command(platform: str = sys.platform) -> tuple[str, ...]:
    """The command that prevents sleep; empty: none is needed."""
    if platform != "darwin":
        return ()
    return ("/usr/bin/caffeinate", "-i", "-w", str(os.getpid()))


class Awake:
    def __init__(
        self,
        holder: Sequence[str] | None = None,
        *,
        linger_s: float = LINGER_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._holder = command() if holder is None else tuple(holder)
        self._linger_s = linger_s
        self._clock = clock
        self._process: subprocess.Popen[bytes] | None = None
        self._idle_since = clock()

    @property
    def holds(self) -> bool:
        return self._process is not None

    def note(self, *, busy: bool) -> None:
        """Called regularly. busy: whether requests are running. Does not block."""
        if not self._holder:
            return
        if busy:
            self._idle_since = self._clock()
            if self._process is None or self._process.poll() is not None:
                self._start()
        elif self._process is not None and self._clock() - self._idle_since >= self._linger_s:
            self.close()

    def _start(self) -> None:
        try:
            self._process = started(self._holder)
        except OSError as e:
            log.warning("this machine may fall asleep while requests run: %s", e)
            self._holder = ()

    def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()
