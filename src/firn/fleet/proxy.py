"""HTTP to a model's process over its socket: one request per connection, replies as they arrive.

Bytes are forwarded in the pieces in which they arrive, with one wake-up for each. Closing a connection
before the end of the reply tells the process that its client is gone.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import httptools
from starlette.types import Scope

Headers = Sequence[tuple[bytes, bytes]]

HIGH_NBYTES = 256 * 1024
"""Reading pauses when more than this is buffered for a client that does not keep up."""
HOP_BY_HOP = frozenset(
    {b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-authorization", b"proxy-connection",
     b"te", b"trailer", b"transfer-encoding", b"upgrade"}
)  # fmt: skip
NOT_SENT = HOP_BY_HOP | {b"host", b"content-length", b"expect", b"authorization", b"x-api-key"}
NOT_RETURNED = HOP_BY_HOP | {b"date", b"server", b"x-request-id", b"request-id"}
"""The front adds its own."""
INTERNAL_PREFIX = b"x-firn-"
"""See vouching.py."""


class ProcessLost(Exception):
    """The process does not answer, or ended during its reply."""


@dataclass(frozen=True, slots=True)
class ForwardedRequest:
    method: str
    target: bytes
    """Path and query, as they are on the wire."""
    headers: Headers
    body: bytes = b""

    def encode(self, extra: Headers) -> bytes:
        lines = [b"%b %b HTTP/1.1" % (self.method.encode("ascii"), self.target)]
        kept = (
            (name, value)
            for name, value in self.headers
            if name not in NOT_SENT and not name.startswith(INTERNAL_PREFIX)
        )
        own = [(b"host", b"localhost"), (b"connection", b"close"), *extra]
        if self.body or self.method not in ("GET", "HEAD", "DELETE"):
            own.append((b"content-length", str(len(self.body)).encode()))
        lines += [b"%b: %b" % header for header in (*own, *kept)]
        return b"\r\n".join(lines) + b"\r\n\r\n" + self.body


def target_of(scope: Scope) -> bytes:
    query: bytes = scope["query_string"]
    raw_path: bytes = scope["raw_path"]
    return raw_path + (b"?" + query if query else b"")


class ForwardedReply(asyncio.Protocol):
    """The reply of a model's process. Owner: the task that forwards it."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._pieces: list[bytes] = []
        self._nbytes = 0
        self._begun = self._complete = self._closed = self._paused = False
        self._waiter: asyncio.Future[None] | None = None

    async def head(self) -> None:
        """Wait for status and headers. Raises ProcessLost."""
        while not self._begun:
            await self._wait()

    async def piece(self) -> bytes:
        """Wait for what has arrived since the last call; b"" is the end. Raises ProcessLost."""
        while not self._pieces:
            if self._complete:
                return b""
            await self._wait()
        piece = self._pieces[0] if len(self._pieces) == 1 else b"".join(self._pieces)
        self._pieces.clear()
        self._nbytes = 0
        if self._paused and self._transport is not None:
            self._paused = False
            self._transport.resume_reading()
        return piece

    async def body(self) -> bytes:
        pieces = []
        while piece := await self.piece():
            pieces.append(piece)
        return b"".join(pieces)

    @property
    def client_headers(self) -> list[tuple[bytes, bytes]]:
        """The headers that are forwarded to the client."""
        return [(name, value) for name, value in self.headers if name not in NOT_RETURNED]

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()

    async def _wait(self) -> None:
        if self._closed:
            raise ProcessLost()
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # --- asyncio ---------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's does not inherit from it

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self.close()
        if self._nbytes > HIGH_NBYTES and not self._paused and self._transport is not None:
            self._paused = True
            self._transport.pause_reading()
        self._wake()

    def connection_lost(self, exc: Exception | None) -> None:
        self._closed = True
        self._wake()

    # --- httptools -------------------------------------------------------------------------

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        self.status = self._parser.get_status_code()
        self._begun = True

    def on_body(self, body: bytes) -> None:
        self._pieces.append(body)
        self._nbytes += len(body)

    def on_message_complete(self) -> None:
        self._complete = True


async def send(
    path: Path, request: ForwardedRequest, extra: Iterable[tuple[bytes, bytes]] = ()
) -> ForwardedReply:
    """Send a request. The caller waits for the head and closes the reply. Raises ProcessLost."""
    loop = asyncio.get_running_loop()
    try:
        transport, reply = await loop.create_unix_connection(ForwardedReply, str(path))
    except OSError as e:
        raise ProcessLost() from e
    transport.write(request.encode(list(extra)))
    return reply
