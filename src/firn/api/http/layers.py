"""The layers around every route, outermost first: log and ids, host names, CORS, errors, API keys,
rate limit. Whoever refuses a request raises a FirnError; only `Errors` and `RequestLog` render it.

They are plain ASGI apps: none of them costs anything per token.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from firn.api.http.affinity import HEADER
from firn.api.http.auth import ANYONE, Keys
from firn.api.http.body import ClientGone
from firn.api.http.body_reader import BodyReader
from firn.api.http.errors import ErrorShapes, InternalFault, error_headers
from firn.api.http.exchange import PLACE_KEY, SCOPE_KEY, Exchange, client_of, exchange_of, send_json
from firn.api.http.hosts import Hosts, is_local
from firn.core.errors import FirnError, HostNotAllowed, Overloaded, TooManyRequests, Unauthorized
from firn.core.lru import Lru
from firn.core.values import Namespace

WINDOW_S = 60.0
MAX_CLIENTS = 10_000
"""Clients that are remembered; beyond that, the least recent one is forgotten."""


logger = logging.getLogger("firn.api")
OPEN_PATHS = frozenset({"/", "/v1", "/v1/", "/health", "/ready"})
"""For supervisors and browsers: they need no key, and are logged at DEBUG."""
POLLED_PATHS = frozenset({"/metrics", "/v1/loads"})
"""Polled by programs every few seconds, so they are logged at DEBUG, too."""
PAGE_FILES = "/page/"
"""Prefix of the dashboard's files. They are the same for everybody and need no key; the page asks
for its data with one."""
EXPOSED_HEADERS = (
    "x-request-id",
    "request-id",
    "retry-after",
    "x-firn-ignored",
    "x-firn-unenforced",
    "x-firn-approximate",
    "x-session",
)
"""Response headers that a page from an allowed origin may read."""
MAX_WHY_CHARS = 300


class RequestRate:
    """When each client's requests of the last minute arrived.

    Owner: its layer, on the asyncio thread.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_minute = per_minute
        self._clock = clock
        self._times: Lru[str, deque[float]] = Lru(MAX_CLIENTS)

    def take(self, client: str) -> float:
        """Count a request and return 0.0; or return the seconds to wait, and count nothing."""
        now = self._clock()
        times = self._times.get(client)
        if times is None:
            times = deque[float]()
            self._times.put(client, times)
        while times and times[0] <= now - WINDOW_S:
            times.popleft()
        if len(times) >= self._per_minute:
            return min(times[0] + WINDOW_S - now, WINDOW_S)
        times.append(now)
        return 0.0


class RateLimit:
    """A layer around the routes, inside Authentication, which identifies the caller. Only POSTs
    count, not queries for models and health."""

    def __init__(self, app: ASGIApp, *, per_minute: int) -> None:
        self._app = app
        self._per_minute = per_minute
        self._rate = RequestRate(per_minute)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            wait_s = self._rate.take(client_of(scope))
            if wait_s > 0:
                raise TooManyRequests(self._per_minute, retry_after_s=math.ceil(wait_s))
        await self._app(scope, receive, send)


def add_layers(
    app: FastAPI,
    *,
    shapes: ErrorShapes,
    metrics: RequestCounts,
    bodies: BodyReader,
    keys: Keys,
    hosts: Hosts,
    allow_origins: Sequence[str],
    requests_per_minute: int | None,
) -> None:
    """Put the layers around an app that has all its routes. The last one added is the outermost."""
    if requests_per_minute:
        app.add_middleware(RateLimit, per_minute=requests_per_minute)
    app.add_middleware(Authentication, keys=keys)
    app.add_middleware(Errors, shapes=shapes)
    if allow_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(allow_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=list(EXPOSED_HEADERS),
        )
    app.add_middleware(HostCheck, hosts=hosts)
    routes = frozenset(route.path for route in app.routes if isinstance(route, Route))
    app.add_middleware(RequestLog, shapes=shapes, metrics=metrics, bodies=bodies, routes=routes)


def is_page_file(path: str) -> bool:
    return path.startswith(PAGE_FILES)


class RequestCounts(Protocol):
    def count_request(self, key_id: Namespace, route: str, status: int, *, gone: bool) -> None: ...


class RequestLog:
    """The outermost layer: gives an exchange its id, catches all faults, logs a line at its end.

    What is refused outside of CORS is answered here, and so are bugs.

    routes: paths with a metric of their own; all other paths, which clients may make up, share one.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        shapes: ErrorShapes,
        metrics: RequestCounts,
        bodies: BodyReader,
        routes: frozenset[str],
    ) -> None:
        self._app = app
        self._shapes = shapes
        self._metrics = metrics
        self._bodies = bodies
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        # The front of several models has already made one, and vouches for the caller.
        exchange = scope.setdefault(SCOPE_KEY, Exchange())
        # OpenAI's clients read the first, Anthropic's the second.
        tags = [(name, exchange.id.encode()) for name in (b"x-request-id", b"request-id")]

        async def tagged(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                added = [*tags, *_affinity_header(exchange)]
                message = {**message, "headers": [*message.get("headers", ()), *added]}
            await send(message)

        try:
            await self._app(scope, receive, tagged)
        except ClientGone:
            exchange.gone = True
        except Exception as error:
            fault = error if isinstance(error, FirnError) else InternalFault(exchange.id)
            if exchange.status or fault is not error:
                what = scope["method"], scope["path"][:200]
                logger.exception("%s %s %a failed", exchange.id, *what)
            if exchange.status:
                raise  # too late for an error status: the server closes the connection
            await refuse(scope, tagged, fault, self._shapes)
        finally:
            self._bodies.release(exchange)
            self._log(exchange, scope)

    def _log(self, exchange: Exchange, scope: Scope) -> None:
        path, is_known = scope["path"], scope["path"] in self._routes
        route, key_id = path if is_known else "other", exchange.caller.key_id
        self._metrics.count_request(key_id, route, exchange.status, gone=exchange.gone)
        quiet = path in OPEN_PATHS | POLLED_PATHS or exchange.passed_on or is_page_file(path)
        logger.log(
            logging.DEBUG if quiet else logging.INFO,
            "%s %s %s %s %.3fs%s%s%s",
            exchange.id,
            scope["method"],
            path if is_known else ascii(path[:200]),  # it may contain line breaks
            exchange.status or "-",
            time.perf_counter() - exchange.began_at,
            exchange.summary,
            _why(exchange.fault),
            " client gone" if exchange.gone else "",
        )


def _affinity_header(exchange: Exchange) -> list[tuple[bytes, bytes]]:
    return [(HEADER, exchange.conversation.encode())] if exchange.conversation else []


def _why(fault: FirnError | None) -> str:
    """What the client was told. It may quote what the client sent, so escape and shorten it."""
    return "" if fault is None else f" error={fault.code} {fault.message[:MAX_WHY_CHARS]!a}"


async def refuse(scope: Scope, send: Send, error: FirnError, shapes: ErrorShapes) -> None:
    """Answer with this error, in the shape of the API that the path belongs to."""
    exchange_of(scope).fault = error
    body = shapes.of(scope["path"])(error)
    await send_json(send, body, status=error.status, headers=error_headers(error))


class Errors:
    """Answers what is refused inside CORS, so that a browser may read why."""

    def __init__(self, app: ASGIApp, *, shapes: ErrorShapes) -> None:
        self._app = app
        self._shapes = shapes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        except FirnError as error:
            if exchange_of(scope).status:
                raise
            await refuse(scope, send, error, self._shapes)


class HostCheck:
    """Refuses requests for other host names. Outside CORS, so that no page can read the answer."""

    def __init__(self, app: ASGIApp, *, hosts: Hosts) -> None:
        self._app = app
        self._hosts = hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        try:
            self._hosts.check(scope["headers"])
        except HostNotAllowed:
            if scope["type"] == "http":
                raise
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] == "http" and exchange_of(scope).own_page is None:
            exchange_of(scope).own_page = self._hosts.is_own_page(scope["headers"])
        await self._app(scope, receive, send)


class Authentication:
    """Admits callers by their API key. Inside CORS, so that a browser may read the refusal."""

    def __init__(self, app: ASGIApp, *, keys: Keys) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            is_open = scope["path"] in OPEN_PATHS
            address = scope["client"][0] if scope.get("client") else ""
            exchange_of(scope).caller = replace(ANYONE, address=address)
            try:
                caller = self._keys.admit(scope["headers"], local=is_local(scope))
                exchange_of(scope).caller = replace(caller, address=caller.address or address)
                take_place = scope.get(PLACE_KEY)
                if take_place and not is_open and not take_place(client_of(scope)):
                    raise Overloaded("You have too many connections to this server; close some.")
            except Unauthorized:
                if not is_open and not is_page_file(scope["path"]):
                    raise
        await self._app(scope, receive, send)
