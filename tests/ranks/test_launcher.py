"""A rank notices that its launcher is gone, and takes nothing else for that."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from firn.ranks.launcher import Launcher
from tests.waiting import wait_until

RANK = """
import os, sys, threading
from pathlib import Path
from firn.ranks import launcher
launcher.EVERY_MS = 10
path = Path(sys.argv[1])
launcher.Launcher().watch(lambda: (path.with_suffix(".gone").touch(), os._exit(0)))
path.with_suffix(".partial").write_text(str(os.getpid()))
path.with_suffix(".partial").rename(path)
threading.Event().wait()
"""
LAUNCHER = """
import subprocess, sys, threading
stdin = getattr(subprocess, sys.argv[1])
p = subprocess.Popen([sys.executable, "-c", sys.argv[2], sys.argv[3]], stdin=stdin)
threading.Event().wait()
"""


def launched(path: Path, stdin: str) -> tuple[subprocess.Popen[bytes], int]:
    """A launcher with one rank, and that rank's process id."""
    made = subprocess.Popen([sys.executable, "-c", LAUNCHER, stdin, RANK, str(path)])
    wait_until(path.exists)
    return made, int(path.read_text())


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_launcher_that_ends_is_noticed(tmp_path: Path, number: signal.Signals) -> None:
    launcher, pid = launched(tmp_path / "rank", "PIPE")
    assert is_running(pid)
    launcher.send_signal(number)
    launcher.wait()
    wait_until((tmp_path / "rank.gone").exists)


def test_who_is_started_in_the_background_goes_on(tmp_path: Path) -> None:
    """It has a new parent, too, but nobody holds its standard input."""
    launcher, pid = launched(tmp_path / "rank", "DEVNULL")
    try:
        launcher.kill()
        launcher.wait()
        assert not threading.Event().wait(0.3)
        assert is_running(pid)
        assert not (tmp_path / "rank.gone").exists()
    finally:
        os.kill(pid, signal.SIGKILL)


def test_an_end_of_input_alone_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """MPI closes the standard input of its ranks when its own ends."""
    read, write = os.pipe()
    os.close(write)
    gone: list[bool] = []
    with os.fdopen(read) as stdin:
        monkeypatch.setattr(sys, "__stdin__", stdin)
        Launcher().watch(lambda: gone.append(True))
        assert not threading.Event().wait(0.2)
        assert not gone
