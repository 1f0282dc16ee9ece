"""Calls as bytes on a socket between two ranks.

    u32 n   u32 m   n bytes: ["name", args...] as JSON   m bytes: the blob

Both ends run the same version of firn, started by one command; the first call checks that. Only
JSON and bytes are decoded, never pickle. The call `alive` is a heartbeat (heartbeat.py); `receive`
drops it.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Callable

from firn.ranks.calls import RankCall

_HEAD = struct.Struct("<II")
MAX_NBYTES = 1 << 30
ALIVE = "alive"
KEEPALIVE = (("TCP_KEEPIDLE", 3), ("TCP_KEEPALIVE", 3), ("TCP_KEEPINTVL", 2), ("TCP_KEEPCNT", 3))
"""A machine that is switched off is noticed within ten seconds. TCP_KEEPALIVE is macOS's name."""


class LinkClosed(Exception):
    """The connection is closed, or the other end is not a rank."""


def encode(call: RankCall) -> bytes:
    text = json.dumps([call.name, *call.args], separators=(",", ":")).encode()
    return _HEAD.pack(len(text), len(call.blob)) + text + call.blob


class RankLink:
    """One connection. Any thread may send; one receives."""

    def __init__(self, sock: socket.socket) -> None:
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE:
            if (number := getattr(socket, name, None)) is not None:
                sock.setsockopt(socket.IPPROTO_TCP, number, value)
        self._sock = sock
        self._lock = threading.Lock()
        self._buffer = bytearray()
        self.n_received = 0
        """Bytes received so far."""
        self.is_closed = False
        """Whether the other end is gone."""

    def send(self, data: bytes) -> None:
        """Raises LinkClosed."""
        with self._lock:
            try:
                self._sock.sendall(data)
            except OSError as e:
                raise LinkClosed from e

    def receive(self, *, max_nbytes: int = MAX_NBYTES, until: float | None = None) -> RankCall:
        """Wait for the next call. Raises LinkClosed, also for a call of more than `max_nbytes`, or
        if it is not complete by `until`."""
        while True:
            n_text, n_blob = _HEAD.unpack(self._take(_HEAD.size, until))
            if n_text + n_blob > max_nbytes:
                raise LinkClosed
            body = self._take(n_text + n_blob, until)
            name, *args = json.loads(body[:n_text])
            if name != ALIVE:
                return RankCall(str(name), tuple(args), body[n_text:])

    def receive_within(self, timeout_s: float, *, max_nbytes: int) -> RankCall:
        """Wait `timeout_s` at most for the next call. Raises LinkClosed, see `receive`."""
        try:
            return self.receive(max_nbytes=max_nbytes, until=time.monotonic() + timeout_s)
        finally:
            self._sock.settimeout(None)

    def _take(self, n: int, until: float | None) -> bytes:
        while len(self._buffer) < n:
            if until is not None:
                left_s = until - time.monotonic()
                if left_s <= 0:
                    raise LinkClosed
                self._sock.settimeout(left_s)
            try:
                data = self._sock.recv(max(n - len(self._buffer), 1 << 16))
            except OSError as e:
                raise LinkClosed from e
            if not data:
                raise LinkClosed
            self.n_received += len(data)
            self._buffer += data
        taken = bytes(self._buffer[:n])
        del self._buffer[:n]
        return taken

    def listen(self, take: Callable[[RankCall], None], gone: Callable[[], None], name: str) -> None:
        """Start a thread that passes calls to `take` until the other end is gone."""

        def run() -> None:
            try:
                while True:
                    take(self.receive())
            except (LinkClosed, ValueError):
                self.is_closed = True
                gone()

        threading.Thread(target=run, name=name, daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()
