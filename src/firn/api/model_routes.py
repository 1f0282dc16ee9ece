"""/v1/models, as OpenAI's clients ask for it and as Anthropic's do, page by page."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from fastapi import FastAPI, Request

from firn.api.openapi import error_responses
from firn.api.services import Services
from firn.core.bounds import SAMPLING
from firn.core.errors import InvalidValue, ModelNotFound

PAGE = 20
MAX_PAGE = 1000


def add_models(app: FastAPI, services: Services) -> None:
    async def models(request: Request) -> dict[str, Any]:
        listed = [_model_object(services)]
        return _page(services, listed, request.query_params)

    async def model(model_id: str) -> dict[str, Any]:
        if not services.serves(model_id):
            raise ModelNotFound(model_id, services.engine.model.name)
        return _model_object(services)

    for method in ("GET", "HEAD"):
        app.add_api_route(
            "/v1/models",
            models,
            methods=[method],
            summary="What is served",
            responses=error_responses(),
            include_in_schema=method == "GET",
            openapi_extra={"parameters": _PARAMETERS},
        )
    missing: dict[int | str, dict[str, Any]] = {404: {"description": "Not served here"}}
    app.add_api_route("/v1/models/{model_id:path}", model, summary="One model", responses=missing)


def _page(
    services: Services, listed: list[dict[str, Any]], query: Mapping[str, str]
) -> dict[str, Any]:
    """Anthropic's way of paging: `limit` of them behind after_id, or in front of before_id."""
    limit = query.get("limit", str(PAGE))
    if not (limit.isascii() and limit.isdigit() and 1 <= int(limit[:9]) <= MAX_PAGE):
        raise InvalidValue("limit", f"must be between 1 and {MAX_PAGE}")
    after, before = (_place(services, listed, query, name) for name in ("after_id", "before_id"))
    if after is not None and before is not None:
        raise InvalidValue("before_id", "cannot be combined with after_id")
    n_wanted = int(limit)
    # after_id: [after + 1, ...) in this order   before_id: [..., before), the last of them
    rest = listed[:before] if after is None else listed[after + 1 :]
    page = rest[-n_wanted:] if before is not None else rest[:n_wanted]
    return {
        "object": "list",
        "data": page,
        "first_id": page[0]["id"] if page else None,
        "last_id": page[-1]["id"] if page else None,
        "has_more": len(rest) > len(page),
    }


def _place(
    services: Services, listed: list[dict[str, Any]], query: Mapping[str, str], name: str
) -> int | None:
    if name not in query:
        return None
    if not services.serves(query[name]):
        raise InvalidValue(name, "no such model is served here")
    served = services.engine.model.name
    return next(i for i, each in enumerate(listed) if each["id"] == served)


def _model_object(services: Services) -> dict[str, Any]:
    """As OpenAI's clients know it and as Anthropic's do, and what we have to say besides."""
    model, defaults, limits = services.engine.model, services.defaults, services.limits
    born = datetime.fromtimestamp(model.created, tz=UTC)
    sampling = asdict(defaults.sampling)
    return {
        "id": model.name,
        "object": "model",
        "type": "model",
        "display_name": model.name,
        "created": model.created,
        "created_at": born.isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": model.context_length,
        "max_tokens": limits.max_request_tokens or model.context_length,
        "owned_by": "firn",
        "architecture": model.architecture,
        "context_length": model.context_length,
        "dtype": model.dtype,
        "vision": model.vision,
        "layer_kinds": list(model.layer_kinds),
        "batched": model.batchable,
        "unbatched_why": model.unbatchable_why,
        "sampling_defaults": {name: sampling[name] for name in SAMPLING},
    }


_PARAMETERS = [
    {"name": name, "in": "query", "required": False, "schema": schema}
    for name, schema in (
        ("after_id", {"type": "string"}),
        ("before_id", {"type": "string"}),
        ("limit", {"type": "integer", "minimum": 1, "maximum": MAX_PAGE, "default": PAGE}),
    )
]
