"""A firn server as a child process, started as a user would start it."""

from __future__ import annotations

import contextlib
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

START_S, STOP_S = 60.0, 30.0


class ServerProcess:
    """One server process. Owner: its creator, which must end it."""

    def __init__(self, model: str, *flags: str, log: Path, start_s: float = START_S) -> None:
        self.port = _free_port()
        self._log = log
        command = [sys.executable, "-m", "firn", "serve", model, "--port", str(self.port), *flags]
        with log.open("ab") as f:
            self._process = subprocess.Popen(command, stdout=f, stderr=f)
        self._wait(start_s)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        return self._process.pid

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"{self.url}{path}", timeout=10) as answer:
            return json.load(answer)

    def stop(self) -> int:
        """Ask it to end; returns its exit code."""
        self._process.send_signal(signal.SIGTERM)
        return self._process.wait(STOP_S)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait(STOP_S)

    def _wait(self, start_s: float) -> None:
        until = time.monotonic() + start_s
        while time.monotonic() < until:
            if self._process.poll() is not None:
                break
            with contextlib.suppress(urllib.error.URLError, OSError):
                self.get("/ready")
                return
            time.sleep(0.05)
        self._process.kill()
        raise RuntimeError(f"the server did not start:\n{self._log.read_text()[-2000:]}")


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])
