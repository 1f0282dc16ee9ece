"""Clients of /v1/activity inside the server's process: a test says when they take what is sent."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message

from firn.api.observe.activity import MAX_WATCHERS

SHARE = MAX_WATCHERS // 2
"""Of one client, while there is no other."""
SCOPE = {
    "type": "http",
    "asgi": {"version": "3.0", "spec_version": "2.3"},
    "http_version": "1.1",
    "method": "GET",
    "scheme": "http",
    "path": "/v1/activity",
    "raw_path": b"/v1/activity",
    "root_path": "",
    "query_string": b"",
    "headers": [(b"host", b"127.0.0.1")],
    "client": ("127.0.0.1", 1),
    "server": ("127.0.0.1", 2),
}


class Watcher:
    """Takes nothing but the head of the answer until it leaves. Owner: the app's event loop."""

    def __init__(self, app: ASGIApp) -> None:
        self.status: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._left = asyncio.Event()
        self._task = asyncio.ensure_future(app(dict(SCOPE), self._receive, self._send))

    async def _receive(self) -> Message:
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status.set_result(message["status"])
        await self._left.wait()

    async def leave(self) -> None:
        self._left.set()
        await self._task


async def check_that_watchers_are_limited(app: ASGIApp) -> None:
    """A watcher counts before its stream has begun, and no longer than it stays."""
    for _ in range(2):
        watchers = [Watcher(app) for _ in range(SHARE)]
        assert {await watcher.status for watcher in watchers} == {200}
        watchers.append(Watcher(app))
        status = await watchers[-1].status
        for watcher in watchers:
            await watcher.leave()
        assert status == 429
