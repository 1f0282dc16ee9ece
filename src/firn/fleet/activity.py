"""/v1/activity with several models: the streams of all loaded models, merged into one.

    event: hello     once: the server's version and clock
    event: models    all models and their states, when they have changed
    event: calls, event: state     from the models' own processes; each names its model

Watching loads no model, and keeps none loaded.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi import FastAPI, Request
from starlette.types import Scope

from firn.api.http import sse
from firn.api.http.exchange import exchange_of
from firn.api.observe.activity import MAX_WATCHERS, QUIET_TICKS, TICK_S, ActivityResponse, hello
from firn.core.shares import Shares
from firn.fleet import proxy
from firn.fleet.fleet import Fleet
from firn.fleet.model import Model
from firn.fleet.relay import Relay
from firn.fleet.vouching import vouch

MAX_WAITING = 256
"""Frames that may be queued for one watcher; beyond that, the models' processes wait."""


def add_activity(app: FastAPI, fleet: Fleet, relay: Relay) -> None:
    watchers = Shares(MAX_WATCHERS)

    async def watch(request: Request) -> ActivityResponse:
        stream = _ActivityStream(fleet, relay, request.scope)
        return ActivityResponse(stream.frames(), watchers)

    app.add_api_route(
        "/v1/activity", watch, response_class=ActivityResponse, include_in_schema=False
    )


class _ActivityStream:
    """One watcher's stream. Owner: the task that answers it."""

    def __init__(self, fleet: Fleet, relay: Relay, scope: Scope) -> None:
        self._fleet = fleet
        self._relay = relay
        self._scope = scope
        self._frames: asyncio.Queue[bytes] = asyncio.Queue(MAX_WAITING)
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def frames(self) -> AsyncIterator[bytes]:
        shown, quiet = b"", 0
        try:
            yield hello().encode()
            while not self._relay.draining:
                self._attach()
                models = _frame("models", self._models())
                frames = [models] if models != shown else []
                shown = models
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(TICK_S):
                        frames.append(await self._frames.get())
                while not self._frames.empty():
                    frames.append(self._frames.get_nowait())
                quiet = 0 if frames else quiet + 1
                if quiet >= QUIET_TICKS:
                    frames, quiet = [sse.KEEP_ALIVE.encode()], 0
                if frames:
                    yield b"".join(frames)
        finally:
            for task in self._tasks.values():
                task.cancel()

    def _models(self) -> list[dict[str, Any]]:
        """Only the operator sees how busy models are: a key must not learn about other keys."""
        operator = exchange_of(self._scope).caller.operator
        models = []
        for name, model in self._fleet.models.items():
            traffic, state = model.traffic, model.shown_state.value
            busy = {"active": traffic.n_active, "waiting": len(traffic.waiters)}
            shown = {"id": name, "state": state, "bytes": model.footprint.nbytes}
            models.append(shown | busy if operator else shown)
        return models

    def _attach(self) -> None:
        """Start to listen to models that have been loaded since the last call."""
        self._tasks = {name: task for name, task in self._tasks.items() if not task.done()}
        for name, model in self._fleet.models.items():
            if name not in self._tasks and self._fleet.peek(model) is not None:
                self._tasks[name] = asyncio.create_task(self._listen(model))

    async def _listen(self, model: Model) -> None:
        child = self._fleet.peek(model)
        if child is None:
            return
        exchange = exchange_of(self._scope)
        request = proxy.ForwardedRequest("GET", b"/v1/activity", self._scope["headers"])
        reply: proxy.ForwardedReply | None = None
        try:
            reply = await proxy.send(child.socket, request, vouch(exchange))
            await reply.head()
            rest = b""
            while reply.status == 200 and (piece := await reply.piece()):
                *whole, rest = (rest + piece).split(b"\n\n")
                for frame in whole:
                    if frame.startswith(b"event: hello"):
                        continue  # the front has sent its own
                    await self._frames.put(frame + b"\n\n")
        except proxy.ProcessLost:
            pass  # unloaded or restarted: `_attach` listens again when it is back
        finally:
            if reply is not None:
                reply.close()


def _frame(event: str, value: object) -> bytes:
    return sse.named(event, json.dumps(value)).encode()
