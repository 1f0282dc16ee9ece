"""Serves the routes that generate nothing: JSON in, JSON out, from the dialects and from `routes`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from firn.api import large_json
from firn.api.body import decoded
from firn.api.body_reader import BodyReader
from firn.api.dialects import JsonRoute, RouteRequest
from firn.api.exchange import exchange_of
from firn.api.openapi import error_responses
from firn.api.origins import refuse_pages
from firn.api.services import Services

PIECE_ITEMS = 16
"""An answer with a longer array is written in the pool, in pieces of so many members: each of them may
be a vector of thousands of numbers."""


def add_json_route(app: FastAPI, route: JsonRoute, services: Services, bodies: BodyReader) -> None:
    async def endpoint(request: Request) -> Response:
        own = exchange_of(request.scope).caller.own
        path, query = request.path_params, dict(request.query_params)
        if route.schema is None:
            if route.method != "GET":
                refuse_pages(request.scope, services.allow_origins)
            return JSONResponse(await route.answer(RouteRequest(own, path, query)))
        raw = await bodies.read(request.scope, request.receive)
        work = _Metered()
        with services.quotas.call(own, work, n_requests=0):
            body = await decoded(raw, services.pool, lambda given: given)
            answer = await route.answer(RouteRequest(own, path, query, body))
            work.n_computed = _n_computed(answer) if route.computes else 0
        is_long = any(isinstance(v, list) and len(v) > PIECE_ITEMS for v in answer.values())
        written = await services.offload(
            lambda: large_json.dumps(answer, large_json.COMPACT, piece_items=PIECE_ITEMS),
            when=is_long,
        )
        return Response(written, media_type="application/json")

    app.add_api_route(
        route.path,
        endpoint,
        methods=[route.method],
        response_class=JSONResponse,
        summary=route.summary,
        operation_id=re.sub(r"\W+", "_", f"{route.method.lower()}{route.path}"),
        responses=error_responses(),
        openapi_extra=_described(route),
    )


def _n_computed(answer: Mapping[str, Any]) -> int:
    """As OpenAI's API says it, or as Ollama's does."""
    usage = answer.get("usage")
    return int(answer.get("prompt_eval_count", 0) if usage is None else usage["total_tokens"])


class _Metered:
    """What such a call counts for in a quota: one place, and the tokens that its answer names."""

    n_waiting = 0
    n_computed = 0


def _described(route: JsonRoute) -> dict[str, Any]:
    """What FastAPI cannot read off an endpoint that takes the whole request."""
    described: dict[str, Any] = {}
    names = re.findall(r"{(\w+)}", route.path)
    if names:
        described["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    if route.schema is not None:
        content = {"application/json": {"schema": dict(route.schema)}}
        described["requestBody"] = {"required": True, "content": content}
    return described
