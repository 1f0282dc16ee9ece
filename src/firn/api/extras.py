"""Routes that generate nothing: JSON in, JSON out. Those of the dialects, and a few of our own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from firn.api.body import decoded
from firn.api.dialects import Asked, Extra
from firn.api.exchange import exchange_of
from firn.api.intake import Intake
from firn.api.openapi import error_responses
from firn.api.origins import refuse_pages
from firn.api.services import Services


def add_extra(app: FastAPI, extra: Extra, services: Services, intake: Intake) -> None:
    async def endpoint(request: Request) -> JSONResponse:
        own = exchange_of(request.scope).caller.own
        path, query = request.path_params, dict(request.query_params)
        if extra.schema is None:
            if extra.method != "GET":
                refuse_pages(request.scope, services.allow_origins)
            return JSONResponse(await extra.answer(Asked(own, path, query)))
        raw = await intake.read(request.scope, request.receive)
        work = _Counted()
        with services.quotas.call(own, work, n_requests=0):
            body = await decoded(raw, services.pool, lambda given: given)
            answer = await extra.answer(Asked(own, path, query, body))
            work.n_computed = _n_computed(answer) if extra.computes else 0
        return JSONResponse(answer)

    app.add_api_route(
        extra.path,
        endpoint,
        methods=[extra.method],
        summary=extra.summary,
        operation_id=re.sub(r"\W+", "_", f"{extra.method.lower()}{extra.path}"),
        responses=error_responses(),
        openapi_extra=_described(extra),
    )


def _n_computed(answer: Mapping[str, Any]) -> int:
    """As OpenAI's API says it, or as Ollama's does."""
    usage = answer.get("usage")
    return int(answer.get("prompt_eval_count", 0) if usage is None else usage["total_tokens"])


class _Counted:
    """What such a call counts for: its place, and its tokens where it says how many it computed."""

    n_waiting = 0
    n_computed = 0


def _described(extra: Extra) -> dict[str, Any]:
    """What FastAPI cannot read off an endpoint that takes the whole request."""
    found: dict[str, Any] = {}
    names = re.findall(r"{(\w+)}", extra.path)
    if names:
        found["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}}
            for name in names
        ]
    if extra.schema is not None:
        content = {"application/json": {"schema": dict(extra.schema)}}
        found["requestBody"] = {"required": True, "content": content}
    return found
