"""/v1/cache: what is stored, what would hit, what to keep and what to forget.

A caller sees and touches its own namespace only; without private namespaces it sees everything.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing
from dataclasses import replace
from typing import Any

from fastapi import FastAPI, Request

from firn.api.body import check_content_type, parse_object, read_body
from firn.api.dialects import Dialect
from firn.api.exchange import exchange_of
from firn.api.prompting import prompt_of
from firn.api.services import Services
from firn.api.session import Session
from firn.core.errors import InvalidValue, NotFound
from firn.core.events import Failed
from firn.core.ports import CacheAdmin
from firn.core.values import GenerateRequest, Namespace, Prompt

Ask = Callable[[Prompt, Namespace], "Future[dict[str, Any]]"]


class CacheRoutes:
    """One per app. `dialects` decode the bodies of probe and pin: each is a body of its API."""

    def __init__(self, services: Services, admin: CacheAdmin, dialects: list[Dialect]) -> None:
        self._services = services
        self._admin = admin
        self._dialects = dialects

    def add_to(self, app: FastAPI) -> None:
        add = app.add_api_route
        add("/v1/cache/stats", self.stats, methods=["GET"], summary="What the cache holds and did")
        add("/v1/cache/probe", self.probe, methods=["POST"], summary="What a request would reuse")
        add("/v1/cache/pin", self.pin, methods=["POST"], summary="Keep a request's prefix")
        add("/v1/cache/unpin", self.unpin, methods=["POST"], summary="Let a prefix go again")
        add("/v1/cache", self.clear, methods=["DELETE"], summary="Forget what is stored")

    async def stats(self, request: Request) -> dict[str, Any]:
        return await asyncio.wrap_future(self._admin.stats(self._scope(request)))

    async def probe(self, request: Request) -> dict[str, Any]:
        prompt = await prompt_of(self._services, await self._decode(request))
        asked = self._admin.probe(prompt, exchange_of(request.scope).namespace)
        return await asyncio.wrap_future(asked)

    async def pin(self, request: Request) -> dict[str, Any]:
        """Computes the prompt first, where it is not stored yet."""
        wanted = await self._decode(request)
        await self._compute(wanted, request)
        prompt = await prompt_of(self._services, wanted)
        asked = self._admin.pin(prompt, exchange_of(request.scope).namespace)
        return await asyncio.wrap_future(asked)

    async def unpin(self, request: Request) -> dict[str, Any]:
        prompt = await prompt_of(self._services, await self._decode(request))
        asked = self._admin.unpin(prompt, exchange_of(request.scope).namespace)
        return await asyncio.wrap_future(asked)

    async def clear(
        self, request: Request, namespace: str | None = None, model: str | None = None
    ) -> dict[str, Any]:
        """`namespace` (a digest, as `firn cache ls` shows it) must be the caller's own."""
        if model is not None and not self._services.serves(model):
            raise NotFound(f"The model {model!r} is not served here.", param="model")
        own = exchange_of(request.scope).namespace
        if namespace is not None and namespace != own:
            raise NotFound("There is no such namespace of yours.", param="namespace")
        scope = own if namespace is not None else self._scope(request)
        return await asyncio.wrap_future(self._admin.clear(scope))

    def _scope(self, request: Request) -> Namespace | None:
        """None: everything, where nobody has anything private."""
        return exchange_of(request.scope).namespace if self._services.keys.private else None

    async def _decode(self, request: Request) -> GenerateRequest:
        check_content_type(request.scope["headers"])
        raw = await read_body(
            request.scope["headers"],
            request.receive,
            limit_nbytes=self._services.limits.body_nbytes,
        )
        body = parse_object(raw)
        key = "messages" if "messages" in body else "prompt"
        path = "/v1/chat/completions" if key == "messages" else "/v1/completions"
        dialect = next(d for d in self._dialects if d.path == path)
        call = dialect.decode(body, namespace=exchange_of(request.scope).caller.own)
        if len(call.requests) != 1:
            raise InvalidValue(key, "one prompt at a time")
        self._services.check_model(call.requests[0].model)
        return call.requests[0]

    async def _compute(self, wanted: GenerateRequest, request: Request) -> None:
        exchange = exchange_of(request.scope)
        one = replace(wanted, max_tokens=1, n=1, top_logprobs=None, grammar=None)
        session = Session(
            self._services, [one], id=f"{exchange.id}-pin", namespace=exchange.namespace
        )
        with closing(session):
            await session.start()
            async for batch in session:
                if batch and isinstance(batch[-1], Failed):
                    raise batch[-1].error
