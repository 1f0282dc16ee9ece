"""Routes that generate nothing: JSON in, JSON out. Those of the dialects, and a few of our own."""

from __future__ import annotations

import re
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from firn.api.body import check_content_type, parse_object, read_body
from firn.api.dialects import Asked, Extra
from firn.api.exchange import exchange_of
from firn.api.openapi import error_responses
from firn.api.services import Services


def add_extra(app: FastAPI, extra: Extra, services: Services) -> None:
    async def endpoint(request: Request) -> JSONResponse:
        body: dict[str, Any] = {}
        if extra.schema is not None:
            headers = request.scope["headers"]
            check_content_type(headers)
            limit = services.limits.body_nbytes
            body = parse_object(await read_body(headers, request.receive, limit_nbytes=limit))
        asked = Asked(
            namespace=exchange_of(request.scope).caller.own,
            path=request.path_params,
            query=dict(request.query_params),
            body=body,
        )
        return JSONResponse(await extra.answer(asked))

    app.add_api_route(
        extra.path,
        endpoint,
        methods=[extra.method],
        summary=extra.summary,
        operation_id=re.sub(r"\W+", "_", f"{extra.method.lower()}{extra.path}"),
        responses=error_responses(),
        openapi_extra=_described(extra),
    )


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
