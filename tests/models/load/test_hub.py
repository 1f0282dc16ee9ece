"""The hub offline, out of reach or breaking off, played by a hub of our own on a loopback port."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub.errors import LocalEntryNotFoundError

from firn.models.load import hub

SCRIPT = (
    "import logging, sys\n"
    "logging.basicConfig(format='%(message)s', stream=sys.stdout)\n"
    "from firn.core.errors import SetupError\n"
    "from firn.models.load import hub\n"
    "hub.FIRST_PAUSE_S = 0.0\n"
    "try:\n    print('found', hub.{call}, hub.HubRules({rules})))\n"
    "except SetupError as e:\n    print('fault', e.message)\n"
    "from huggingface_hub import constants\n"
    "print('timeout', constants.HF_HUB_DOWNLOAD_TIMEOUT)\n"
)


FOLDER_OF = "folder_of('owner/model'"
FETCH_INTO = "fetch_into('owner/model', hub.Path(sys.argv[1])"


def ask(rules: str, home: Path, endpoint: str, *, call: str = FOLDER_OF, **more: str) -> list[str]:
    """In a process of its own, as the hub's library reads its settings when it is imported."""
    env = {**os.environ, "HF_HOME": str(home), "HF_ENDPOINT": endpoint}
    for name in ("HF_HUB_CACHE", "HF_HUB_OFFLINE"):
        env.pop(name, None)
    env |= more
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(call=call, rules=rules), str(home / "models")],
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
    assert sum("was interrupted" in line for line in lines) == retries
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
    assert sum("was interrupted" in line for line in lines) == 1
    assert lines[-2].startswith("fault owner/model could not be fetched from the hub")


@pytest.mark.parametrize("status", [401, 404])
def test_a_refused_download_is_not_tried_again(tmp_path: Path, status: int) -> None:
    with a_hub(status) as (endpoint, _):
        lines = ask("retries=3", tmp_path, endpoint)
    assert not any("was interrupted" in line for line in lines)
    assert lines[-2].startswith("fault owner/model")


def test_an_unreachable_hub_is_not_asked_again(tmp_path: Path) -> None:
    lines = ask("retries=3", tmp_path, "http://127.0.0.1:9")
    assert lines[0] == "fault owner/model is not on this machine and the hub cannot be reached."


def test_a_download_into_a_folder_follows_the_same_rules(tmp_path: Path) -> None:
    with a_hub(500) as (endpoint, asked):
        fault, timeout = ask("offline=True, timeout_s=7", tmp_path, endpoint, call=FETCH_INTO)
        told, _ = ask("", tmp_path, endpoint, call=FETCH_INTO, HF_HUB_OFFLINE="1")
    assert fault == "fault owner/model is not on this machine and --offline forbids fetching it."
    assert timeout == "timeout 7"
    assert (
        told == "fault owner/model is not on this machine and HF_HUB_OFFLINE forbids fetching it."
    )
    assert asked == []


# --- an outage while a model is downloaded -------------------------------------------------


def not_reached() -> Exception:
    """What the library raises if it cannot ask for the list of files."""
    error = LocalEntryNotFoundError("not found")
    error.__cause__ = hub._http().ConnectError("no route to host")
    return error


def in_a_file() -> Exception:
    """What it raises if it cannot resume a file."""
    error: Exception = hub._http().ConnectError("no route to host")
    return error


def hung_up() -> Exception:
    error: Exception = hub._http().ReadTimeout("no data")
    return error


@pytest.mark.parametrize("first", [hung_up, in_a_file])
def test_an_outage_in_a_download_uses_all_retries(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, first: Callable[[], Exception]
) -> None:
    monkeypatch.setattr(hub, "FIRST_PAUSE_S", 0.0)
    errors = [first(), not_reached(), not_reached()]

    def fetch() -> Path:
        if errors:
            raise errors.pop(0)
        return tmp_path

    assert hub._retried("owner/model", fetch, retries=3) == tmp_path


def test_an_outage_longer_than_all_retries_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "FIRST_PAUSE_S", 0.0)
    errors = [hung_up(), not_reached(), not_reached()]

    def fetch() -> Path:
        raise errors.pop(0)

    with pytest.raises(LocalEntryNotFoundError):
        hub._retried("owner/model", fetch, retries=2)
    assert not errors
