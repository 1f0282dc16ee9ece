"""The hub offline, out of reach or breaking off, played by a hub of our own on a loopback port."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

SCRIPT = (
    "import logging, sys\n"
    "logging.basicConfig(format='%(message)s', stream=sys.stdout)\n"
    "from firn.core.errors import SetupError\n"
    "from firn.models import hub\n"
    "hub.FIRST_PAUSE_S = 0.0\n"
    "try:\n    print('found', hub.folder_of('owner/model', hub.HubRules({rules})))\n"
    "except SetupError as e:\n    print('fault', e.message)\n"
    "from huggingface_hub import constants\n"
    "print('timeout', constants.HF_HUB_DOWNLOAD_TIMEOUT)\n"
)


def ask(rules: str, home: Path, endpoint: str) -> list[str]:
    """In a process of its own, as the hub's library reads its settings when it is imported."""
    env = {**os.environ, "HF_HOME": str(home), "HF_ENDPOINT": endpoint}
    for name in ("HF_HUB_CACHE", "HF_HUB_OFFLINE"):
        env.pop(name, None)
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(rules=rules)],
        env=env,
        capture_output=True,
        text=True,
        check=True,
    )
    return run.stdout.splitlines()


@contextmanager
def a_hub(status: int) -> Iterator[tuple[str, list[str]]]:
    """Answers everything with this status, and records what it was asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_response(status)
            self.send_header("content-length", "0")
            self.end_headers()

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_offline_asks_nobody(tmp_path: Path) -> None:
    with a_hub(500) as (endpoint, asked):
        fault, timeout = ask("offline=True, timeout_s=7", tmp_path, endpoint)
    assert fault == "fault owner/model is not on this machine and --offline forbids fetching it."
    assert timeout == "timeout 7"
    assert asked == []


def test_offline_finds_what_was_downloaded(tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--owner--model" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    refs = tmp_path / "hub" / "models--owner--model" / "refs"
    refs.mkdir()
    (refs / "main").write_text("abc")
    with a_hub(500) as (endpoint, asked):
        line, _ = ask("offline=True", tmp_path, endpoint)
    assert line == f"found {snapshot}"
    assert asked == []


@pytest.mark.parametrize("retries", [0, 2])
def test_a_download_is_retried_while_the_hub_fails(tmp_path: Path, retries: int) -> None:
    with a_hub(503) as (endpoint, _):
        lines = ask(f"retries={retries}", tmp_path, endpoint)
    assert sum("broke off" in line for line in lines) == retries
    assert lines[-2].startswith("fault owner/model")


def test_a_hub_that_hangs_up_is_asked_again_and_then_named_in_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def hang_up() -> None:
            while True:
                connection, _ = listening.accept()
                with connection:
                    if connection.recv(1 << 16) == b"over":
                        return

        thread = threading.Thread(target=hang_up)
        thread.start()
        try:
            port = listening.getsockname()[1]
            lines = ask("retries=1", tmp_path, f"http://127.0.0.1:{port}")
        finally:
            with socket.create_connection(listening.getsockname()) as last:
                last.sendall(b"over")
            thread.join()
    assert sum("broke off" in line for line in lines) == 1
    assert lines[-2].startswith("fault owner/model could not be fetched from the hub")


@pytest.mark.parametrize("status", [401, 404])
def test_a_refused_download_is_not_tried_again(tmp_path: Path, status: int) -> None:
    with a_hub(status) as (endpoint, _):
        lines = ask("retries=3", tmp_path, endpoint)
    assert not any("broke off" in line for line in lines)
    assert lines[-2].startswith("fault owner/model")


def test_an_unreachable_hub_is_not_asked_again(tmp_path: Path) -> None:
    lines = ask("retries=3", tmp_path, "http://127.0.0.1:9")
    assert lines[0] == "fault owner/model is not on this machine and the hub cannot be reached."
