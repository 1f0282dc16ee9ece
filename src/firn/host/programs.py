"""Small programs of the system, started without copying this process.

A server maps tens of gigabytes, and on macOS a fork copies the description of all of it and makes
every later write to it dearer for a while. Python starts a program by posix_spawn instead, if its path
is absolute and it need not close descriptors. Those that Python opens are closed on exec all the same.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

TIMEOUT_S = 10.0


def output_of(command: Sequence[str]) -> str:
    """What the program prints. Raises OSError or SubprocessError if it cannot be run, or fails.

    command: begins with an absolute path.
    """
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=TIMEOUT_S, close_fds=False
    )
    return done.stdout


def started(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """The program, running, connected to nothing. Raises OSError."""
    null = subprocess.DEVNULL
    return subprocess.Popen(command, stdin=null, stdout=null, stderr=null, close_fds=False)
