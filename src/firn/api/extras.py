"""Routes that generate nothing: JSON in, JSON out. Those of the dialects, and a few of our own.

Answers may be long, too: a thousand vectors are written out in the pool, in pieces, for a piece holds
Python's lock from its first byte to its last.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse

from firn.api.body import decoded
from firn.api.dialects import Asked, Extra
from firn.api.exchange import exchange_of
from firn.api.intake import Intake
from firn.api.openapi import error_responses
from firn.api.origins import refuse_pages
from firn.api.services import Services

MANY = 16
"""Members of an array that are written at once."""


def add_extra(app: FastAPI, extra: Extra, services: Services, intake: Intake) -> None:
    async def endpoint(request: Request) -> Response:
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
        if not any(isinstance(v, list) and len(v) > MANY for v in answer.values()):
            return JSONResponse(answer)
        loop = asyncio.get_running_loop()
        written = await loop.run_in_executor(services.pool, _written, answer)
        return Response(written, media_type="application/json")

    app.add_api_route(
        extra.path,
        endpoint,
        methods=[extra.method],
        response_class=JSONResponse,
        summary=extra.summary,
        operation_id=re.sub(r"\W+", "_", f"{extra.method.lower()}{extra.path}"),
        responses=error_responses(),
        openapi_extra=_described(extra),
    )


def _n_computed(answer: Mapping[str, Any]) -> int:
    """As OpenAI's API says it, or as Ollama's does."""
    usage = answer.get("usage")
    return int(answer.get("prompt_eval_count", 0) if usage is None else usage["total_tokens"])


def _written(answer: Mapping[str, Any]) -> bytes:
    """In the tokenize pool."""
    members = (f"{_dumps(name)}:{''.join(_pieces(value))}" for name, value in answer.items())
    return f"{{{','.join(members)}}}".encode()


def _pieces(value: Any) -> Iterator[str]:
    if not isinstance(value, list):
        yield _dumps(value)
        return
    for start in range(0, len(value), MANY):
        yield "," if start else "["
        yield _dumps(value[start : start + MANY])[1:-1]
    yield "]" if value else "[]"


def _dumps(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


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
