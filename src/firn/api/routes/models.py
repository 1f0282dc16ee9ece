"""/v1/models, for OpenAI's clients and, in pages, for Anthropic's."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from fastapi import FastAPI, Request

from firn.api.http.fields import page_limit
from firn.api.routes.agents import add_agents
from firn.api.routes.openapi import error_responses
from firn.api.services import Services
from firn.core.bounds import SAMPLING
from firn.core.errors import InvalidValue, ModelNotFound

PAGE = 20
MAX_PAGE = 1000
ANTHROPIC = "anthropic-version"
"""The header that every client of Anthropic's API sends."""
EFFORTS = ("low", "medium", "high", "xhigh", "max")
Route = Callable[..., Awaitable[dict[str, Any]]]


def add_models(app: FastAPI, services: Services) -> None:
    async def models(request: Request) -> dict[str, Any]:
        listed = [model_object(services)]
        return page(listed, request.query_params, find=lambda name: _served(services, name))

    def find(model_id: str | None) -> dict[str, Any]:
        if model_id is not None and not services.serves(model_id):
            raise ModelNotFound(model_id, services.engine.model.name)
        return model_object(services)

    async def model(request: Request, model_id: str) -> dict[str, Any]:
        return find(model_id)

    add_routes(app, models, model)
    add_agents(app, find)


def add_routes(app: FastAPI, models: Route, model: Route) -> None:
    """models: returns all of them, in pages. model: returns the one with a given id."""

    async def all_models(request: Request) -> dict[str, Any]:
        listed = await models(request)
        return listed | {"data": [_as_read_by(request, shown) for shown in listed["data"]]}

    async def one_model(request: Request, model_id: str) -> dict[str, Any]:
        return _as_read_by(request, await model(request, model_id))

    for method in ("GET", "HEAD"):
        app.add_api_route(
            "/v1/models",
            all_models,
            methods=[method],
            summary="Models served here",
            responses=error_responses(),
            include_in_schema=method == "GET",
            openapi_extra={"parameters": PARAMETERS},
        )
    missing: dict[int | str, dict[str, Any]] = {404: {"description": "Not served here"}}
    app.add_api_route(
        "/v1/models/{model_id:path}", one_model, summary="One model", responses=missing
    )


def _as_read_by(request: Request, shown: dict[str, Any]) -> dict[str, Any]:
    """The model, with its capabilities in the form of Anthropic's API for a client of that API."""
    if ANTHROPIC not in request.headers:
        return shown
    return shown | {"capabilities": _support(frozenset(shown["capabilities"]))}


def _support(can: frozenset[str]) -> dict[str, Any]:
    """What firn and the model can do, under the names of Anthropic's API."""
    yes, no = {"supported": True}, {"supported": False}
    chats = yes if "chat" in can else no
    thinks = yes if "thinking" in can else no
    modes = ("adaptive", "between_tools", "disabled", "enabled")
    return {
        "batch": no,
        "citations": no,
        "code_execution": no,
        "context_management": no,
        "effort": thinks | dict.fromkeys(EFFORTS, thinks),
        "image_input": yes if "vision" in can else no,
        "pdf_input": chats,
        "server_tools": no | {"code_execution": no, "web_search": no},
        "structured_outputs": chats,
        "thinking": thinks | {"types": dict.fromkeys(modes, thinks)},
    }


def _served(services: Services, name: str) -> str | None:
    return services.engine.model.name if services.serves(name) else None


def page(
    listed: list[dict[str, Any]],
    query: Mapping[str, str],
    *,
    find: Callable[[str], str | None],
) -> dict[str, Any]:
    """Pages as in Anthropic's API: up to `limit` models after after_id, or before before_id.

    find: the id of the model that a name stands for; None: there is none.
    """
    limit = page_limit(query, default=PAGE, high=MAX_PAGE)
    after, before = (_index(listed, query, name, find) for name in ("after_id", "before_id"))
    if after is not None and before is not None:
        raise InvalidValue("before_id", "cannot be combined with after_id")
    # after_id: [after + 1, ...) in this order   before_id: [..., before), the last of them
    rest = listed[:before] if after is None else listed[after + 1 :]
    shown = rest[-limit:] if before is not None else rest[:limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(rest) > len(shown),
    }


def _index(
    listed: list[dict[str, Any]],
    query: Mapping[str, str],
    name: str,
    find: Callable[[str], str | None],
) -> int | None:
    if name not in query:
        return None
    model_id = find(query[name])
    if model_id is None:
        raise InvalidValue(name, "no such model is served here")
    return next(i for i, model in enumerate(listed) if model["id"] == model_id)


def model_object(services: Services) -> dict[str, Any]:
    """The model, with the members that OpenAI's and Anthropic's clients read, and firn's own."""
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
        "state": "loaded",
        "bytes": model.weights_nbytes,
        "capabilities": capabilities(services),
    }


def capabilities(services: Services) -> list[str]:
    """What the model can be used for."""
    model, format = services.engine.model, services.reply_format
    chats = model.generates and services.tokenizer.chat_template is not None
    can = {
        "completion": model.generates,
        "chat": chats,
        "vision": model.vision,
        "tools": chats and format.tool is not None,
        "thinking": chats and format.closing != "",
        "embeddings": services.embedder is not None,
        "rerank": services.reranker is not None,
    }
    return [name for name, able in can.items() if able]


PARAMETERS = [
    {"name": name, "in": "query", "required": False, "schema": schema}
    for name, schema in (
        ("after_id", {"type": "string"}),
        ("before_id", {"type": "string"}),
        ("limit", {"type": "integer", "minimum": 1, "maximum": MAX_PAGE, "default": PAGE}),
    )
]
