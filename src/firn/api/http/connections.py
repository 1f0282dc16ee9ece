"""Connections with deadlines: a client that stops in the middle of a request or a reply is cut off.

uvicorn waits indefinitely for the rest of a request, and a process has few descriptors. Here the
head of a request must arrive within seconds, and its body at a minimum speed. If too many
connections have sent no head yet, the oldest of the address with most of them are closed first. Requests
of one client get only its share of the connections, and a few are reserved for health checks.
"""

from __future__ import annotations

import asyncio
import enum
import functools
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from firn.api.http.exchange import PLACE_KEY
from firn.api.http.upgrades import RequestParser
from firn.core.shares import Share, Shares

SWEEP_S = 1.0
"""How often deadlines are checked."""


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """max_open: connections at a time, of which one client's requests get a share. n_spare: further
    ones, for health checks only. max_heads: connections whose head has not arrived yet. head_s: time
    limit for a head; head_nbytes: the most that may arrive as a head, or of a body without any of its
    content. body_s: time limit for a body, plus one second for every body_nbytes_per_s that have
    arrived. silence_s: time limit between two pieces of a body. drain_s: time limit for the rest of a
    body whose request has already been answered. stall_s: time limit for a client that does not
    read."""

    max_open: int = 1024
    n_spare: int = 16
    max_heads: int = 256
    head_s: float = 10.0
    head_nbytes: int = 64 * 1024
    body_s: float = 20.0
    body_nbytes_per_s: int = 16 * 1024
    silence_s: float = 60.0
    drain_s: float = 5.0
    stall_s: float = 60.0


class Phase(enum.Enum):
    """What the client has to send next."""

    HEAD = "head"
    BODY = "body"
    NOTHING = "nothing"


class Connections:
    """All open connections of a server. Owner: the app, on the asyncio thread."""

    def __init__(
        self, limits: ConnectionLimits | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.limits = limits or ConnectionLimits()
        self.clock = clock
        self._open: set[Connection] = set()
        self._heads: dict[Connection, None] = {}
        """Connections whose head has not arrived, the oldest first."""
        self._free: dict[str, dict[Connection, None]] = {}
        """Connections on which no request has its place, by address, the oldest first."""
        self._places = Shares(self.limits.max_open)
        self._sweeping = False

    @property
    def n_open(self) -> int:
        return len(self._open)

    def add(self, connection: Connection) -> bool:
        """Register a new connection; False: there is no room for it."""
        limits = self.limits
        if self.n_open >= limits.max_open + limits.n_spare and not self._make_room():
            return False
        self._open.add(connection)
        self.is_free(connection)
        self.awaits_head(connection)
        if not self._sweeping:
            self._sweeping = True
            connection.loop.call_later(SWEEP_S, self._sweep, connection.loop)
        return True

    def awaits_head(self, connection: Connection) -> None:
        if connection in self._open:
            self._heads[connection] = None
            if len(self._heads) > self.limits.max_heads:
                self._cut_head()

    def has_head(self, connection: Connection) -> None:
        self._heads.pop(connection, None)

    def take_place(self, connection: Connection, client: str) -> Share | None:
        """A place for the client's request; None: it has its share of them."""
        place = self._places.open(client)
        if not place.grow():
            return None
        self._not_free(connection)
        return place

    def is_free(self, connection: Connection) -> None:
        if connection in self._open:
            self._free.setdefault(connection.address, {})[connection] = None

    def _not_free(self, connection: Connection) -> None:
        ours = self._free.get(connection.address, {})
        ours.pop(connection, None)
        if not ours:
            self._free.pop(connection.address, None)

    def remove(self, connection: Connection) -> None:
        self._open.discard(connection)
        self._heads.pop(connection, None)
        self._not_free(connection)

    def _cut_head(self) -> None:
        """Close the connection that has waited longest for its head, of the address that has most of
        them: honest clients have sent theirs."""
        heads = [head for head in self._heads if not head.is_answering]
        if heads:
            most = Counter(head.address for head in heads).most_common(1)[0][0]
            next(head for head in heads if head.address == most).cut()

    def _make_room(self) -> bool:
        """Close a connection without a request that has its place, of the address that has most of them:
        it is idle, has not said what it wants, was refused, or does not read what needs no key."""
        most: dict[Connection, None] = max(self._free.values(), key=len, default={})
        waiting = (c for c in chain(most, *self._free.values()) if not c.is_answering)
        connection = next(waiting, None) or next(iter(most), None)
        if connection is not None:
            connection.cut()
        return connection is not None

    def _sweep(self, loop: asyncio.AbstractEventLoop) -> None:
        now = self.clock()
        for connection in list(self._open):
            if connection.is_late(now):
                connection.give_up()
        self._sweeping = bool(self._open)
        if self._sweeping:
            loop.call_later(SWEEP_S, self._sweep, loop)


class Connection(HttpToolsProtocol):
    """uvicorn's connection, with deadlines. Owner: its transport, on the asyncio thread."""

    def __init__(self, *args: Any, connections: Connections, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parser: RequestParser = RequestParser(self)  # type: ignore[assignment]
        self._all = connections
        self._limits = connections.limits
        self._phase = Phase.HEAD
        self._since = connections.clock()
        self._n_head = 0
        self._n_body = 0
        self._n_empty = 0
        """Bytes since the last that belong to the content of a body: trailers have no other limit."""
        self._arrived_at = self._since
        self._place: Share | None = None
        self._answered_at: float | None = None
        self._stalled_at: float | None = None
        self._running: RequestResponseCycle | None = None
        """The request being answered; uvicorn's `cycle` is the last one that has arrived."""

    @property
    def is_answering(self) -> bool:
        return self._running is not None and not self._running.response_complete

    @property
    def address(self) -> str:
        return self.client[0] if self.client else ""

    def take_place(self, client: str) -> bool:
        """Give the request that has just arrived its place; False: the client has its share."""
        self._place = self._place or self._all.take_place(self, client)
        return self._place is not None

    def is_late(self, now: float) -> bool:
        limits = self._limits
        if self._stalled_at is not None and now - self._stalled_at > limits.stall_s:
            return True
        if self._phase is Phase.HEAD:
            return not self.is_answering and now - self._since > limits.head_s
        if self._phase is Phase.NOTHING:
            return False  # uvicorn's own timer closes idle connections
        if self._answered_at is not None:
            return now - self._answered_at > limits.drain_s
        if self.flow.read_paused:  # the server has stopped reading: not the client's fault
            self._since = self._arrived_at = now
            return False
        if now - self._arrived_at > max(limits.silence_s, limits.body_s):
            return True
        return now - self._since > limits.body_s + self._n_body / limits.body_nbytes_per_s

    def give_up(self) -> None:
        """Close it, with a 408 if no reply has begun."""
        self._refuse(b"408 Request Timeout", b"The request took too long to arrive.")

    def cut(self) -> None:
        self._all.remove(self)
        self.transport.abort()

    def _refuse(self, status: bytes, message: bytes) -> None:
        """Close it with this answer, or without one if a reply has begun."""
        has_begun = self._running is not None and (
            self.is_answering and self._running.response_started
        )
        if has_begun or self._stalled_at is not None or self._answered_at is not None:
            self.cut()
            return
        self._all.remove(self)
        self.transport.write(
            b"HTTP/1.1 %b\r\ncontent-type: text/plain; charset=utf-8\r\ncontent-length: %d\r\n"
            b"connection: close\r\n\r\n%b" % (status, len(message), message)
        )
        self.transport.close()

    # --- asyncio's protocol ------------------------------------------------------------------

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if not self._all.add(self):
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._all.remove(self)
        self._leave_place()
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        began = self._phase
        self._n_empty += len(data)
        super().data_received(data)
        if began is not self._phase or self.transport.is_closing():
            return
        if began is Phase.HEAD:
            self._n_head += len(data)
        n_head = self._n_empty if began is Phase.BODY else self._n_head
        if n_head > self._limits.head_nbytes:
            self._refuse(b"431 Request Header Fields Too Large", b"The head is too large.")

    def pause_writing(self) -> None:
        self._stalled_at = self._all.clock()
        super().pause_writing()

    def resume_writing(self) -> None:
        self._stalled_at = None
        super().resume_writing()

    # --- httptools' callbacks ----------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._phase is not Phase.HEAD:
            self._enter(Phase.HEAD)
            self._all.awaits_head(self)

    def on_headers_complete(self) -> None:
        if self.parser.begins_again:
            return
        self._enter(Phase.BODY)
        self._all.has_head(self)
        self.scope[PLACE_KEY] = self.take_place  # type: ignore[literal-required]
        super().on_headers_complete()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._phase is Phase.HEAD:  # a trailer would join the headers, which are checked by now
            super().on_header(name, value)

    def on_body(self, body: bytes) -> None:
        self._n_body += len(body)
        self._n_empty, self._arrived_at = 0, self._all.clock()
        super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.begins_again:
            return
        self._enter(Phase.NOTHING)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if self._phase is Phase.BODY:  # answered before all of the body had arrived
            self._answered_at = self._all.clock()
        self._leave_place()
        super().on_response_complete()

    def _leave_place(self) -> None:
        if self._place is not None:
            self._place.close()
            self._place = None
            self._all.is_free(self)

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _enter(self, phase: Phase) -> None:
        self._phase = phase
        self._since = self._arrived_at = self._all.clock()
        self._n_head = self._n_body = self._n_empty = 0
        self._answered_at = None


def http_config(app: ASGIApp, connections: Connections, **options: Any) -> uvicorn.Config:
    """uvicorn's settings: no websockets, and a proxy's headers about the caller are not trusted."""
    protocol: Any = functools.partial(Connection, connections=connections)
    return uvicorn.Config(
        app,
        http=protocol,
        ws="none",
        proxy_headers=False,
        server_header=False,
        log_config=None,
        access_log=False,
        **options,
    )
