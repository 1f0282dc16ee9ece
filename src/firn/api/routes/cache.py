"""/v1/cache: statistics, probe, pin, unpin and clear.

A caller sees and changes its own namespace only; the operator sees everything.
"""

from __future__ import annotations

import asyncio
import functools
from contextlib import closing
from dataclasses import replace
from typing import Any

from fastapi import FastAPI, Request

from firn.api.calls.prompting import prompt_of
from firn.api.calls.session import Session
from firn.api.dialects import Dialect
from firn.api.http.body import decoded
from firn.api.http.body_reader import BodyReader
from firn.api.http.exchange import exchange_of
from firn.api.routes.openapi import error_responses
from firn.api.routes.tree_answers import TreeAnswers
from firn.api.services import Services
from firn.core.errors import InvalidValue, NotFound
from firn.core.ports import CacheAdmin
from firn.core.values import GenerateRequest, Namespace

OWN_ADMISSION = frozenset({"bytes_per_token", "bytes_per_row"})
"""These depend only on the model, and reveal nothing about other callers."""


class CacheRoutes:
    """One per app. `dialects` decode the bodies of probe and pin."""

    def __init__(
        self,
        services: Services,
        admin: CacheAdmin,
        dialects: list[Dialect],
        bodies: BodyReader,
        answers: TreeAnswers,
    ) -> None:
        self._services = services
        self._admin = admin
        self._dialects = dialects
        self._bodies = bodies
        self._answers = answers

    def add_to(self, app: FastAPI) -> None:
        add = functools.partial(app.add_api_route, responses=error_responses())
        add("/v1/cache/stats", self.stats, methods=["GET"], summary="Statistics of the cache")
        add("/v1/cache/probe", self.probe, methods=["POST"], summary="What a request would reuse")
        add("/v1/cache/pin", self.pin, methods=["POST"], summary="Pin a request's prefix")
        add("/v1/cache/unpin", self.unpin, methods=["POST"], summary="Unpin a request's prefix")
        add("/v1/cache", self.clear, methods=["DELETE"], summary="Clear the cache")

    async def stats(self, request: Request) -> dict[str, Any]:
        stats = await asyncio.wrap_future(self._admin.stats(exchange_of(request.scope).visible))
        caller = exchange_of(request.scope).caller
        if not caller.operator:  # how full the machine is would reveal other callers
            admission = {k: v for k, v in stats.get("admission", {}).items() if k in OWN_ADMISSION}
            admission["calls"] = self._services.access.quotas.n_calls(caller.key_id)
            stats["admission"] = admission
        return stats

    async def probe(self, request: Request) -> dict[str, Any]:
        namespace = exchange_of(request.scope).namespace
        prompt = await prompt_of(self._services, await self._decode(request), namespace)
        return await asyncio.wrap_future(self._admin.probe(prompt, namespace))

    async def pin(self, request: Request) -> dict[str, Any]:
        """Computes the prompt first, if it is not stored yet."""
        namespace = exchange_of(request.scope).namespace
        with self._answers.changing(request.scope):
            generate = await self._decode(request)
            await self._compute(generate, request)
            prompt = await prompt_of(self._services, generate, namespace)
            return await asyncio.wrap_future(self._admin.pin(prompt, namespace))

    async def unpin(self, request: Request) -> dict[str, Any]:
        namespace = exchange_of(request.scope).namespace
        with self._answers.changing(request.scope):
            prompt = await prompt_of(self._services, await self._decode(request), namespace)
            return await asyncio.wrap_future(self._admin.unpin(prompt, namespace))

    async def clear(
        self, request: Request, namespace: str | None = None, model: str | None = None
    ) -> dict[str, Any]:
        """namespace: the whole digest, as `firn cache show` prints it; must be the caller's own."""
        with self._answers.changing(request.scope):
            if model is not None and not self._services.serves(model):
                raise NotFound(f"The model {model!r} is not served here.", param="model")
            own = exchange_of(request.scope).namespace
            if namespace is not None and namespace != own:
                raise NotFound("This namespace is not yours, or does not exist.", param="namespace")
            cleared = own if namespace is not None else exchange_of(request.scope).visible
            return await asyncio.wrap_future(self._admin.clear(cleared))

    async def _decode(self, request: Request) -> GenerateRequest:
        raw = await self._bodies.read(request.scope, request.receive)
        key_id = exchange_of(request.scope).caller.key_id
        return await decoded(
            raw, self._services.pool.of(key_id), lambda body: self._request(body, key_id)
        )

    def _request(self, body: dict[str, Any], key_id: Namespace) -> GenerateRequest:
        key = "messages" if "messages" in body else "prompt"
        path = "/v1/chat/completions" if key == "messages" else "/v1/completions"
        dialect = next(d for d in self._dialects if d.path == path)
        call = dialect.decode(body, namespace=key_id)
        if len(call.requests) != 1:
            raise InvalidValue(key, "must be one prompt, not several")
        self._services.check_model(call.requests[0].model)
        return call.requests[0]

    async def _compute(self, generate: GenerateRequest, request: Request) -> None:
        exchange = exchange_of(request.scope)
        # In full, because no part of a prompt with gaps could be pinned.
        short = replace(generate.in_full(), max_tokens=1, n=1, top_logprobs=None, grammar=None)
        session = Session(self._services, [short], id=f"{exchange.id}-pin", caller=exchange.caller)
        quotas = self._services.access.quotas
        with quotas.call(exchange.caller.key_id, session.progress), closing(session):
            await session.start()
            async for _ in session.events():
                pass
