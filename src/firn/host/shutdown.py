"""Ends the process in bounded time, whatever its threads are doing.

Python waits for every non-daemon thread, and no thread can be stopped from outside. A thread that
tokenizes a book or hangs in a library would keep a server alive that was told to stop.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from typing import NoReturn

log = logging.getLogger("firn")

GRACE_S = 2.0
"""For threads that are about to end anyway."""
ASKED_TWICE = 130
"""The exit code of a process that was told to stop while it was stopping: nothing more is saved."""


def outlives_terminal() -> bool:
    """Whether the process should continue when its terminal is closed, as under nohup."""
    return signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def end_at_next_signal() -> None:
    """From now on a signal to stop ends the process immediately; a closed terminal has no effect.

    Called once the event loop is closed: uvloop leaves handlers behind that ignore signals.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: os._exit(ASKED_TWICE))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def kill_after(seconds: float) -> None:
    """End the process after this time, printing all threads' stacks. Works without the GIL."""
    faulthandler.dump_traceback_later(seconds, exit=True)


def end(code: object) -> NoReturn:
    """End the process as SystemExit(code) would, but without finalizing Python and its libraries.

    There, a thread that is in MLX's code, or was a moment ago, would abort the process.
    """
    if isinstance(code, str):
        print(code, file=sys.stderr)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or there is none
            stream.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def exit_or_return(code: int, *, grace_s: float = GRACE_S) -> int:
    """Returns the exit code if all threads end within the grace period; otherwise ends the process
    here."""
    until = time.monotonic() + grace_s
    others = [t for t in threading.enumerate() if not t.daemon and t is not threading.main_thread()]
    for thread in others:
        thread.join(max(until - time.monotonic(), 0.0))
    if running := [t.name for t in others if t.is_alive()]:
        log.warning("exiting although threads still run: %s", ", ".join(running))
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    faulthandler.cancel_dump_traceback_later()
    return code
