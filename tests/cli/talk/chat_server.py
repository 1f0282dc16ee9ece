"""A server that sends what a test's scripts tell it to, and a terminal that runs `firn chat`."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import select
import signal
import subprocess
import sys
import tempfile
import termios
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from tests.cli import command

CHAT = [sys.executable, "-c", "from firn.cli import main; main()", "chat"]
PATIENCE_S = 60
N_NUDGES = 6
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("FIRN_")}


class Wire:
    """What a script can do to one connection."""

    def __init__(self, handler: BaseHTTPRequestHandler) -> None:
        self._handler = handler

    def start(self) -> None:
        self._handler.send_response(200)
        self._handler.send_header("Content-Type", "text/event-stream")
        self._handler.send_header("Connection", "close")
        self._handler.end_headers()

    def raw(self, text: str) -> None:
        self._handler.wfile.write(text.encode())
        self._handler.wfile.flush()

    def data(self, value: Any) -> None:
        self.raw(f"data: {json.dumps(value)}\n\n")

    def delta(self, **delta: str) -> None:
        self.data({"choices": [{"index": 0, "delta": delta, "finish_reason": None}]})

    def finish(
        self, reason: str = "stop", *, prompt: int = 9, reply: int = 4, cached: int = 5
    ) -> None:
        self.data({"choices": [{"index": 0, "delta": {}, "finish_reason": reason}]})
        usage = {
            "prompt_tokens": prompt,
            "completion_tokens": reply,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        self.data({"choices": [], "usage": usage})
        self.raw("data: [DONE]\n\n")

    def refuse(self, status: int, body: Any) -> None:
        payload = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        self._handler.send_response(status)
        self._handler.send_header("Content-Length", str(len(payload)))
        self._handler.end_headers()
        self._handler.wfile.write(payload)

    def wait_until_client_is_gone(self) -> None:
        self._handler.connection.settimeout(PATIENCE_S)
        with contextlib.suppress(ConnectionError):
            while self._handler.connection.recv(1024):
                pass


@dataclass
class ChatServer:
    """Runs one script for each chat request, in order, and keeps the requests."""

    scripts: list[Callable[[Wire], None]]
    models: Any = field(default_factory=lambda: {"data": [{"id": "tiny"}]})
    key: str | None = None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    """Paths of GET requests."""
    url: str = ""

    @property
    def messages(self) -> list[tuple[str, str]]:
        """The messages of the last request."""
        return [(m["role"], m["content"]) for m in self.bodies[-1]["messages"]]


@contextlib.contextmanager
def serving(
    *scripts: Callable[[Wire], None], models: Any = None, key: str | None = None
) -> Iterator[ChatServer]:
    server = ChatServer(list(scripts), key=key)
    if models is not None:
        server.models = models
    http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(server))
    server.url = f"http://127.0.0.1:{http.server_port}"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join()


def _handler(server: ChatServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            server.asked.append(self.path)
            if self._allowed():
                Wire(self).refuse(200, server.models)

        def do_POST(self) -> None:
            length = int(self.headers["Content-Length"])
            server.bodies.append(json.loads(self.rfile.read(length)))
            server.paths.append(self.path)
            if self._allowed():
                server.scripts.pop(0)(Wire(self))

        def _allowed(self) -> bool:
            if server.key and self.headers["Authorization"] != f"Bearer {server.key}":
                Wire(self).refuse(401, {"error": {"message": "no"}})
                return False
            return True

        def log_message(self, *args: Any) -> None:
            pass

    return Handler


def one_shot(
    server_url: str, *arguments: str, stdin: str = "", **environ: str
) -> subprocess.CompletedProcess[str]:
    return command.run("chat", "--url", server_url, *arguments, stdin=stdin, **environ)


def one_process(
    server_url: str, *arguments: str, stdin: str = "", **environ: str
) -> subprocess.CompletedProcess[str]:
    """The same in its own process."""
    return subprocess.run(
        [*CHAT, "--url", server_url, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        env=CLEAN | environ,
        timeout=PATIENCE_S,
    )


class Terminal:
    """`firn chat` on a pseudo-terminal, which is its controlling terminal."""

    def __init__(self, *arguments: str, term: str = "dumb", home: Path | None = None) -> None:
        """home: where the history of what was typed is kept; None: nowhere that stays."""
        self._home = tempfile.TemporaryDirectory(prefix="firn-home-")
        home = home or Path(self._home.name)
        self._master, slave = pty.openpty()
        self.process = subprocess.Popen(
            [*CHAT, *arguments],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            env=CLEAN
            | {
                "TERM": term,
                "COLUMNS": "200",
                "HOME": str(home),
                "XDG_CACHE_HOME": str(home / "xdg"),
            },
        )
        os.close(slave)
        self.shown = ""
        self._seen = 0
        self._ended = False

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self._master)
        self._home.cleanup()

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)

    def wait_for(self, text: str, *, nudge: str = "") -> None:
        """Reads until `text` appears after the text that was last waited for.

        `nudge` is typed first, and again after a long silence: a signal that arrives just before
        input() blocks is only noticed with the next one. If there is a /proc, the first nudge is
        typed once the process has blocked.
        """
        self._settle(nudge)
        for typed in [nudge] * N_NUDGES:
            self.type(typed)
            while text not in self.shown[self._seen :] and self._more():
                pass
            if text in self.shown[self._seen :]:
                self._seen = self.shown.index(text, self._seen) + len(text)
                return
        raise AssertionError(f"{text!r} never came; shown: {self.shown!r}")

    def exit_code(self, *, nudge: str = "") -> int:
        self._settle(nudge)
        for typed in [nudge] * N_NUDGES:
            with contextlib.suppress(OSError):
                self.type(typed)
            while self._more():
                pass
            if self._ended:
                break
        return self.process.wait(PATIENCE_S)

    def _settle(self, nudge: str) -> None:
        stat = Path(f"/proc/{self.process.pid}/stat")
        while nudge and stat.exists() and stat.read_text().rpartition(")")[2].split()[0] == "R":
            pass

    def _more(self) -> bool:
        """Reads what is available, or waits a while for it. False: silence, or the end."""
        ready, _, _ = select.select([self._master], [], [], PATIENCE_S / N_NUDGES)
        if not ready:
            return False
        try:
            piece = os.read(self._master, 65536)
        except OSError:  # Linux: the other end is closed; macOS returns b"" instead
            piece = b""
        self._ended = not piece
        self.shown += piece.decode(errors="replace")
        return bool(piece)
