"""Raw bytes for an HTTP server: requests that are cut off, have wrong lengths, come in crumbs, or
are no requests at all.

Deterministic for a seed. Every answer is read; none may ever be a 5xx.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import socket
import time
from collections import Counter
from collections.abc import Callable

STATUS = re.compile(rb"HTTP/1\.1 (\d{3})")
PATIENCE_S = 0.25
"""For an answer that may never come."""

BODIES: dict[str, object] = {
    "/v1/completions": {"prompt": "hello", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    "/v1/responses": {"input": "hi", "max_output_tokens": 2},
    "/v1/tokenize": {"text": "hello"},
    "/v1/embeddings": {"input": "hello"},
}
PATHS = (*BODIES, "/", "/health", "/ready", "/metrics", "/v1/models", "/v1/models/x", "/nowhere")


class RawFuzzer:
    def __init__(self, port: int, *, seed: int, key: str | None = None) -> None:
        self._port = port
        self._rng = random.Random(seed)
        self._key = key
        self.statuses: Counter[int] = Counter()
        self.server_errors: list[tuple[str, bytes, bytes]] = []
        """Kind of request, bytes sent, bytes received."""
        self._kinds: dict[str, Callable[[], list[bytes]]] = {
            "cut": self._cut,
            "wrong length": self._wrong_length,
            "chunks": self._chunks,
            "noise": self._noise,
            "flipped": self._flipped,
            "crumbs": self._crumbs,
            "behind each other": self._pipelined,
            "heads": self._odd_heads,
            "whole": lambda: [self._request()],
        }

    def shoot(self) -> None:
        """Opens a connection and sends one odd thing."""
        kind = self._rng.choice(list(self._kinds))
        pieces = self._kinds[kind]()
        got = self._exchange(pieces)
        for status in map(int, STATUS.findall(got)):
            self.statuses[status] += 1
            if status >= 500:
                self.server_errors.append((kind, b"".join(pieces), got))

    def _exchange(self, pieces: list[bytes]) -> bytes:
        found = b""
        with contextlib.suppress(OSError):
            sock = socket.create_connection(("127.0.0.1", self._port), timeout=10)
            with sock:
                for i, piece in enumerate(pieces):
                    if i:
                        time.sleep(0.002)
                    sock.sendall(piece)
                sock.settimeout(PATIENCE_S)
                while more := sock.recv(65536):
                    found += more
        return found

    # --- what is sent ----------------------------------------------------------------------

    def _head(self, path: str, *headers: bytes, method: str | None = None) -> bytes:
        method = method or ("POST" if path in BODIES else "GET")
        lines = [f"{method} {path} HTTP/1.1".encode(), b"host: localhost", *headers]
        if self._key is not None:
            lines.append(f"x-api-key: {self._key}".encode())
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def _body(self, path: str) -> bytes:
        return json.dumps(BODIES[path]).encode() if path in BODIES else b""

    def _request(self, path: str | None = None) -> bytes:
        path = path or self._rng.choice(PATHS)
        body = self._body(path)
        length = b"content-length: %d" % len(body)
        json_type = b"content-type: application/json"
        return self._head(path, json_type, length, b"connection: close") + body

    def _cut(self) -> list[bytes]:
        request = self._request()
        return [request[: self._rng.randrange(len(request))]]

    def _wrong_length(self) -> list[bytes]:
        path = self._rng.choice(list(BODIES))
        body = self._body(path)
        n = len(body)
        wrong = self._rng.choice([
            b"%d" % (n + self._rng.randint(1, 9)), b"%d" % self._rng.randrange(n), b"-1", b"x", b"",
            b"99999999999999999999", b"0x10", b"+5", b"1e3", b"%d, %d" % (n, n), b"%d " % (1 << 62),
        ])  # fmt: skip
        headers = [b"content-type: application/json", b"content-length: " + wrong]
        if self._rng.random() < 0.3:
            headers.append(b"content-length: %d" % n)
        if self._rng.random() < 0.2:
            headers.append(b"transfer-encoding: chunked")
        return [self._head(path, *headers) + body]

    def _chunks(self) -> list[bytes]:
        path = self._rng.choice(list(BODIES))
        body = self._body(path)
        half = len(body) // 2
        chunk = b"%x\r\n%b\r\n" % (half, body[:half])
        rest = b"%X;x=y\r\n%b\r\n0\r\n\r\n" % (len(body) - half, body[half:])
        coding = b"transfer-encoding: chunked"
        head = self._head(path, b"content-type: application/json", coding, b"connection: close")
        ends = [
            rest, b"", b"zz\r\n", b"-1\r\n", b"ffffffffffffffff\r\n", b"5\r\nab\r\n", b"0\r\n",
            b"0\r\nx: y\r\n\r\n", b"\r\n\r\n", b"1\n{\n0\n\n", rest[:-7],
        ]  # fmt: skip
        return [head, chunk, self._rng.choice(ends)]

    def _noise(self) -> list[bytes]:
        noise = [
            self._rng.randbytes(self._rng.randrange(1, 400)),
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + self._rng.randbytes(80),
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
            b"GET /\r\n\r\n",
            b"\r\n" * self._rng.randrange(1, 50),
            b"G" * self._rng.randrange(1, 9000),
            b"",
        ]
        return [self._rng.choice(noise)]

    def _flipped(self) -> list[bytes]:
        raw = bytearray(self._request())
        for _ in range(self._rng.randint(1, 6)):
            raw[self._rng.randrange(len(raw))] = self._rng.randrange(256)
        return [bytes(raw)]

    def _crumbs(self) -> list[bytes]:
        raw = self._request(self._rng.choice(list(BODIES)))
        cuts = sorted(self._rng.sample(range(1, len(raw)), 12))
        return [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]

    def _pipelined(self) -> list[bytes]:
        several = [self._request().replace(b"connection: close\r\n", b"") for _ in range(3)]
        return [b"".join(several) + self._cut()[0]]

    def _odd_heads(self) -> list[bytes]:
        path = self._rng.choice(list(BODIES))
        n = len(self._body(path))
        odd = self._rng.choice([
            [b"x: \x00y"], [b"x : y"], [b"x: y", b" folded: z"], [b"\xff\xfe: z"], [b"x: \xff\xfe"],
            [b"expect: 100-continue"], [b"connection: upgrade", b"upgrade: websocket"],
            [b"connection: upgrade, http2-settings", b"upgrade: h2c"], [b"host: evil.example"],
            [b"x: " + b"y" * 70_000], [b"x: y"] * 500, [b"content-type: text/plain"],
            [b"authorization: Bearer " + b"\xe9" * 50], [b"origin: null"], [b"te: trailers"],
        ])  # fmt: skip
        method = self._rng.choice([None, "PUT", "DELETE", "OPTIONS", "HEAD", "TRACE", "CONNECT"])
        target = self._rng.choice(
            [path, "*", f"http://localhost{path}", path + "?a=%zz&b", path + "/%00"]
        )
        length = b"content-length: %d" % n
        json_type = b"content-type: application/json"
        return [self._head(target, json_type, length, *odd, method=method) + self._body(path)]
