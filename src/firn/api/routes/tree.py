"""/v1/cache/tree: the stored prefixes as a tree, and what may be done with each of them.

A caller sees and touches its own namespace only; the operator sees everything. However large the tree
is, an answer is bounded, and made of slices that hold no step of the engine up.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI, Request

from firn.api.excerpts import excerpt
from firn.api.exchange import exchange_of
from firn.api.fields import page_limit
from firn.api.openapi import error_responses
from firn.api.origins import check_may_change_cache
from firn.api.services import Services
from firn.core.ports import CacheAdmin, InSlices
from firn.core.values import Namespace

DEFAULT_RUNS, MAX_RUNS = 500, 5000
FRESH_S = 1.0
"""Several who look at the same tree share a look that is no older."""
MAX_LOOKS = 16
PATH = "/v1/cache/tree"
PARAMETERS = [
    {"name": "node", "in": "query", "required": False, "schema": {"type": "string"}},
    {
        "name": "limit",
        "in": "query",
        "required": False,
        "schema": {"type": "integer", "minimum": 1, "maximum": MAX_RUNS, "default": DEFAULT_RUNS},
    },
]


@dataclass(frozen=True, slots=True)
class _Look:
    at: float
    answer: dict[str, Any]


class TreeRoutes:
    """One per app, on the asyncio thread."""

    def __init__(self, services: Services, admin: CacheAdmin) -> None:
        self._services = services
        self._admin = admin
        self._one_at_a_time = asyncio.Lock()
        self._looks: dict[tuple[Namespace | None, str | None, int], _Look] = {}

    def add_to(self, app: FastAPI) -> None:
        add = functools.partial(app.add_api_route, responses=error_responses())
        add(
            PATH,
            self.tree,
            methods=["GET"],
            summary="What is stored, as a tree",
            openapi_extra={"parameters": PARAMETERS},
        )
        add(f"{PATH}/{{node}}", self.node, methods=["GET"], summary="What a prefix takes and saves")
        add(f"{PATH}/{{node}}/pin", self.pin, methods=["POST"], summary="Keep a stored prefix")
        add(f"{PATH}/{{node}}/unpin", self.unpin, methods=["POST"], summary="Let it go again")
        add(
            f"{PATH}/{{node}}/forget",
            self.forget,
            methods=["POST"],
            summary="Forget a prefix and all that goes on from it",
        )

    async def tree(self, request: Request) -> dict[str, Any]:
        limit = limit_of(request.query_params)
        which = (_scope(request), request.query_params.get("node"), limit)
        async with self._one_at_a_time:
            look = self._looks.get(which)
            if look is None or time.monotonic() - look.at > FRESH_S:
                look = _Look(time.monotonic(), await self._read(*which))
                self._looks.pop(which, None)
                self._looks[which] = look
                while len(self._looks) > MAX_LOOKS:
                    del self._looks[next(iter(self._looks))]
        return look.answer

    async def _read(
        self, namespace: Namespace | None, node: str | None, limit: int
    ) -> dict[str, Any]:
        with_tokens = self._services.show_text
        asked = self._admin.browse(namespace, node, limit=limit, with_tokens=with_tokens)
        return await self._answer(asked)

    async def _answer(self, asked: InSlices) -> dict[str, Any]:
        while not await asyncio.wrap_future(asked.step()):
            pass
        return await self._services.offload(lambda: self._with_texts(asked.answer()), when=True)

    def _with_texts(self, answer: dict[str, Any]) -> dict[str, Any]:
        for run in answer.get("runs", ()):
            tokens = run.pop("tokens", ())
            if tokens:
                run["text"] = excerpt(self._services, tokens)
        return answer

    async def node(self, request: Request, node: str) -> dict[str, Any]:
        return await asyncio.wrap_future(self._admin.node(_scope(request), node))

    async def pin(self, request: Request, node: str) -> dict[str, Any]:
        return await self._change(request, lambda s: self._admin.pin_node(s, node))

    async def unpin(self, request: Request, node: str) -> dict[str, Any]:
        return await self._change(request, lambda s: self._admin.unpin_node(s, node))

    async def forget(self, request: Request, node: str) -> dict[str, Any]:
        check_may_change_cache(request.scope)
        try:
            return await self._answer(self._admin.forget_node(_scope(request), node))
        finally:
            self._looks.clear()

    async def _change(self, request: Request, change: Any) -> dict[str, Any]:
        check_may_change_cache(request.scope)
        try:
            found: dict[str, Any] = await asyncio.wrap_future(change(_scope(request)))
            return found
        finally:
            self._looks.clear()


def limit_of(query: Mapping[str, str]) -> int:
    return page_limit(query, default=DEFAULT_RUNS, high=MAX_RUNS)


def _scope(request: Request) -> Namespace | None:
    """None: everything."""
    caller = exchange_of(request.scope).caller
    return None if caller.operator else caller.namespace
