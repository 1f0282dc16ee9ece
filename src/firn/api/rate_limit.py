"""--rate-limit: how many requests a client may send in a minute."""

from __future__ import annotations

import math
import time
from collections import OrderedDict, deque
from collections.abc import Callable

from starlette.types import ASGIApp, Receive, Scope, Send

from firn.api.errors import ErrorShapes
from firn.api.exchange import client_of, exchange_of, send_error
from firn.core.errors import TooManyRequests

WINDOW_S = 60.0
MAX_CLIENTS = 10_000
"""Clients that are remembered; beyond that, the least recent one is forgotten."""


class RequestRate:
    """When each client's requests of the last minute arrived.

    Owner: its layer, on the asyncio thread.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._per_minute = per_minute
        self._clock = clock
        self._times: OrderedDict[str, deque[float]] = OrderedDict()

    def take(self, client: str) -> float:
        """Count a request and return 0.0; or return the seconds to wait, and count nothing."""
        now = self._clock()
        times = self._times.setdefault(client, deque())
        self._times.move_to_end(client)
        while len(self._times) > MAX_CLIENTS:
            self._times.popitem(last=False)
        while times and times[0] <= now - WINDOW_S:
            times.popleft()
        if len(times) >= self._per_minute:
            return min(times[0] + WINDOW_S - now, WINDOW_S)
        times.append(now)
        return 0.0


class RateLimit:
    """A layer around the routes, inside Authentication, which identifies the caller. Only POSTs
    count, not queries for models and health."""

    def __init__(self, app: ASGIApp, *, per_minute: int, shapes: ErrorShapes) -> None:
        self._app = app
        self._per_minute = per_minute
        self._rate = RequestRate(per_minute)
        self._shapes = shapes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            wait_s = self._rate.take(client_of(scope))
            if wait_s > 0:
                error = TooManyRequests(self._per_minute, retry_after_s=math.ceil(wait_s))
                exchange_of(scope).fault = error
                await send_error(send, error, self._shapes.of(scope["path"]))
                return
        await self._app(scope, receive, send)
