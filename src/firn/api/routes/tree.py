"""/v1/cache/tree: the stored prefixes as a tree. Each can be pinned, unpinned or forgotten.

A caller sees and changes its own namespace only; the operator sees everything. However large the tree
is, answers are bounded, and the engine reads it in slices short enough to delay no step.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from fastapi import FastAPI, Request

from firn.api.http.exchange import exchange_of
from firn.api.http.fields import page_limit
from firn.api.routes.openapi import error_responses
from firn.api.routes.tree_answers import TreeAnswers, excerpt
from firn.api.services import Services
from firn.core.ports import CacheAdmin, SlicedQuery
from firn.core.values import Namespace

DEFAULT_RUNS, MAX_RUNS = 500, 5000
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


class TreeRoutes:
    """One per app, on the asyncio thread."""

    def __init__(self, services: Services, admin: CacheAdmin, answers: TreeAnswers) -> None:
        self._services = services
        self._admin = admin
        self._answers = answers

    def add_to(self, app: FastAPI) -> None:
        add = functools.partial(app.add_api_route, responses=error_responses())
        add(
            PATH,
            self.tree,
            methods=["GET"],
            summary="The stored prefixes as a tree",
            openapi_extra={"parameters": PARAMETERS},
        )
        add(
            f"{PATH}/{{node}}",
            self.node,
            methods=["GET"],
            summary="Size and savings of one prefix",
        )
        add(f"{PATH}/{{node}}/pin", self.pin, methods=["POST"], summary="Pin a stored prefix")
        add(f"{PATH}/{{node}}/unpin", self.unpin, methods=["POST"], summary="Unpin a stored prefix")
        add(
            f"{PATH}/{{node}}/forget",
            self.forget,
            methods=["POST"],
            summary="Forget a prefix and all that continues it",
        )

    async def tree(self, request: Request) -> dict[str, Any]:
        limit = limit_of(request.query_params)
        query = (exchange_of(request.scope).visible, request.query_params.get("node"), limit)
        with_tokens = self._services.page.show_text

        async def read() -> dict[str, Any]:
            visible, node, limit = query
            answer = self._admin.browse(visible, node, limit=limit, with_tokens=with_tokens)
            return await self._collect(request, answer)

        return await self._answers.get(query, read)

    async def _collect(self, request: Request, slices: SlicedQuery) -> dict[str, Any]:
        while not await asyncio.wrap_future(slices.step()):
            pass
        key_id = exchange_of(request.scope).caller.key_id
        return await self._services.in_pool(key_id, lambda: self._with_texts(slices.answer()))

    def _with_texts(self, answer: dict[str, Any]) -> dict[str, Any]:
        for run in answer.get("runs", ()):
            tokens = run.pop("tokens", ())
            if tokens:
                run["text"] = excerpt(self._services, tokens)
        return answer

    async def node(self, request: Request, node: str) -> dict[str, Any]:
        return await asyncio.wrap_future(self._admin.node(exchange_of(request.scope).visible, node))

    async def pin(self, request: Request, node: str) -> dict[str, Any]:
        return await self._change(request, lambda visible: self._admin.pin_node(visible, node))

    async def unpin(self, request: Request, node: str) -> dict[str, Any]:
        return await self._change(request, lambda visible: self._admin.unpin_node(visible, node))

    async def forget(self, request: Request, node: str) -> dict[str, Any]:
        with self._answers.changing(request.scope):
            return await self._collect(
                request, self._admin.forget_node(exchange_of(request.scope).visible, node)
            )

    async def _change(
        self,
        request: Request,
        change: Callable[[Namespace | None], Future[dict[str, Any]]],
    ) -> dict[str, Any]:
        with self._answers.changing(request.scope):
            return await asyncio.wrap_future(change(exchange_of(request.scope).visible))


def limit_of(query: Mapping[str, str]) -> int:
    return page_limit(query, default=DEFAULT_RUNS, high=MAX_RUNS)
