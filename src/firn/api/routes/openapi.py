"""/openapi.json: FastAPI's own description of the routes, with the dialects added.

The dialects decode their bodies themselves, for speed and for errors that name the parameter. So their
schemas are written next to their decoders, and added here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI

from firn.api.dialects import Dialect

ERRORS = {
    400: "A parameter is wrong, or the prompt is too long.",
    401: "The API key is missing or unknown.",
    403: "Not allowed for this host name or this caller.",
    404: "No such model or route.",
    405: "This route does not support this method.",
    413: "The body is too large.",
    429: "Too many requests, from this client or in total; see Retry-After.",
    500: "Internal error of the server.",
    503: "The server is stopping, or overloaded.",
    504: "The request took longer than allowed.",
}


def describe(app: FastAPI, dialects: Sequence[Dialect], *, with_keys: bool) -> None:
    """Make the app describe the dialects along with its other routes."""
    fastapi_openapi = app.openapi

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            spec = fastapi_openapi()
            for dialect in dialects:
                spec["paths"][dialect.path] = {"post": _operation(dialect)}
            schemas = spec.setdefault("components", {}).setdefault("schemas", {})
            schemas["Error"] = _error_schema()
            if with_keys:
                spec["components"]["securitySchemes"] = {
                    "bearer": {"type": "http", "scheme": "bearer"},
                    "x-api-key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
                }
                spec["security"] = [{"bearer": []}, {"x-api-key": []}]
            app.openapi_schema = spec
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]  # as FastAPI documents it


STREAMED = {
    "text/event-stream": {
        "type": "object",
        "description": "One event of the stream. Its data is JSON, or [DONE] at the end.",
        "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
        "required": ["data"],
    }
}
"""Schemas of streams by media type; before OpenAPI 3.2, the schema is that of a single event."""


def error_responses() -> dict[int | str, dict[str, Any]]:
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {status: {"description": text, "content": content} for status, text in ERRORS.items()}


def _operation(dialect: Dialect) -> dict[str, Any]:
    stream = dict(dialect.stream_headers)[b"content-type"].decode().partition(";")[0]
    responses: dict[str, Any] = {
        "200": {
            "description": "The reply, whole or as a stream.",
            "content": {
                "application/json": {"schema": {"type": "object"}},
                stream: {"schema": STREAMED.get(stream, {"type": "string"})},
            },
        },
        **{str(status): response for status, response in error_responses().items()},
    }
    return {
        "summary": dialect.summary,
        "operationId": dialect.path.strip("/").replace("/", "_"),
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": dialect.schema()}},
        },
        "responses": responses,
    }


def _error_schema() -> dict[str, Any]:
    nullable = {"type": ["string", "null"]}
    return {
        "type": "object",
        "required": ["error"],
        "properties": {
            "error": {
                "type": ["object", "string"],
                "description": "A string in Ollama's API, an object in all others.",
                "required": ["message", "type"],
                "properties": {
                    "message": {"type": "string"},
                    "type": {"type": "string"},
                    "param": nullable,
                    "code": nullable,
                },
            }
        },
    }
