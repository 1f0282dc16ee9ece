"""`firn serve A B` as a user runs it: Ctrl-C ends all of its processes, and so does kill -9 of the
front.

Slow: a front and its models, each in its own process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from firn.demo.server import _free_port

GONE_S = 60.0


@contextmanager
def started(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A front with firn-demo loaded."""
    port = _free_port()
    command = [
        sys.executable, "-m", "firn", "serve", "firn-demo", "firn-demo-hybrid", "--port", str(port),
        "--ssd-cache-dir", str(tmp_path / "ssd"),
    ]  # fmt: skip
    log = tmp_path / "log"
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
    url = f"http://127.0.0.1:{port}"
    try:
        _until(lambda: _answers(url))
        assert httpx.post(f"{url}/v1/models/firn-demo/load", timeout=60).status_code == 200
        yield process, url
    finally:
        process.kill()
        process.wait(30)


def _answers(url: str) -> bool:
    try:
        return httpx.get(f"{url}/ready", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def _until(done: object) -> None:
    until = time.monotonic() + GONE_S
    while not done():  # type: ignore[operator]
        assert time.monotonic() < until
        time.sleep(0.02)


def children(pid: int) -> list[int]:
    pids = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in pids]


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()


def lost(pid: int) -> bool:
    try:
        return not is_alive(pid)
    except OSError:
        return True


pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_no_process_outlives_the_front(tmp_path: Path, number: signal.Signals) -> None:
    with started(tmp_path) as (front, _):
        (child,) = children(front.pid)
        front.send_signal(number)
        code = front.wait(GONE_S)
        assert code == (0 if number == signal.SIGINT else -signal.SIGKILL)
        _until(lambda: lost(child))
    log = (tmp_path / "log").read_text()
    assert "Traceback" not in log, log
