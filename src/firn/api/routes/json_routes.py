"""Serves routes that do not generate, JSON in and JSON out: those of the dialects and of `routes`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from firn.api.calls.quotas import FixedMeter
from firn.api.dialects import JsonRoute, RouteRequest
from firn.api.http import large_json
from firn.api.http.body import decoded, while_connected
from firn.api.http.body_reader import BodyReader
from firn.api.http.exchange import exchange_of
from firn.api.http.hosts import refuse_foreign_pages
from firn.api.routes.openapi import error_responses
from firn.api.services import Services

PIECE_ITEMS = 16
"""An answer with a longer array is encoded in the pool, this many items at a time, since each may
be a vector of thousands of numbers."""


def add_json_route(app: FastAPI, route: JsonRoute, services: Services, bodies: BodyReader) -> None:
    async def endpoint(request: Request) -> Response:
        key_id = exchange_of(request.scope).caller.key_id
        path, query = request.path_params, dict(request.query_params)
        if route.schema is None:
            if route.method != "GET":
                refuse_foreign_pages(request.scope, services.access.allow_origins)
            answer = await route.answer(RouteRequest(key_id, path, query))
            return _response(answer)
        raw = await bodies.read(request.scope, request.receive)
        meter = FixedMeter()
        with services.access.quotas.call(key_id, meter, n_requests=0):
            body = await decoded(raw, services.pool.of(key_id), lambda given: given)
            asked = RouteRequest(key_id, path, query, body)
            answer = await while_connected(request.receive, lambda: route.answer(asked))
            if isinstance(answer, bytes):
                return _response(answer)
            meter.n_computed = _n_computed(answer) if route.computes else 0
        is_long = any(isinstance(v, list) and len(v) > PIECE_ITEMS for v in answer.values())
        written = await services.offload(
            key_id,
            lambda: large_json.dumps(answer, large_json.COMPACT, piece_items=PIECE_ITEMS),
            when=is_long,
        )
        return _response(written)

    app.add_api_route(
        route.path,
        endpoint,
        methods=[route.method],
        response_class=JSONResponse,
        summary=route.summary,
        operation_id=re.sub(r"\W+", "_", f"{route.method.lower()}{route.path}"),
        responses=error_responses(),
        openapi_extra=_openapi_extra(route),
    )


def _response(answer: Mapping[str, Any] | bytes) -> Response:
    if isinstance(answer, bytes):
        return Response(answer, media_type="application/json")
    return JSONResponse(answer)


def _n_computed(answer: Mapping[str, Any]) -> int:
    """The tokens an answer reports, in OpenAI's usage or Ollama's counts, minus cached ones."""
    usage = answer.get("usage")
    if usage is None:
        return int(answer.get("prompt_eval_count", 0))
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    return int(usage["total_tokens"] - details.get("cached_tokens", 0))


def _openapi_extra(route: JsonRoute) -> dict[str, Any]:
    """What FastAPI cannot tell from an endpoint that takes the whole request."""
    extra: dict[str, Any] = {}
    names = re.findall(r"{(\w+)}", route.path)
    if names:
        extra["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    if route.schema is not None:
        content = {"application/json": {"schema": dict(route.schema)}}
        extra["requestBody"] = {"required": True, "content": content}
    return extra
