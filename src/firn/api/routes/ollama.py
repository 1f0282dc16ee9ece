"""The rest of Ollama's API: models and embeddings.

Models are made from the objects of /v1/models, so that a server of several models can show them too.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from firn import __version__
from firn.api.dialects import JsonRoute, RouteRequest
from firn.api.http import fields
from firn.api.http.fields import Fields, keep_alive_s
from firn.api.routes.discovery import RouteParts
from firn.api.routes.embeddings import embed
from firn.api.routes.models import model_object
from firn.api.routes.ollama_fields import RENAMED, TAG, durations, model_name
from firn.api.services import Services
from firn.core.errors import InvalidValue
from firn.core.values import Namespace

API_VERSION = "0.12.0"
"""The version of Ollama that this API corresponds to: clients refuse older ones."""
NEVER = "2318-01-01T00:00:00Z"
"""The expiry of a model that stays loaded."""
CAPABILITIES = {
    "completion": "completion",
    "tools": "tools",
    "thinking": "thinking",
    "vision": "vision",
    "embeddings": "embedding",
}
"""Ollama's names for the capabilities in /v1/models."""

ModelObject = Mapping[str, Any]


def add_ollama(parts: RouteParts) -> None:
    """For a server of one model."""
    services = parts.services

    def listed(key_id: Namespace) -> list[ModelObject]:
        return [model_object(services)]

    def find(name: str, key_id: Namespace) -> ModelObject:
        services.check_model(name)
        return model_object(services)

    async def embed_all(route_request: RouteRequest) -> Mapping[str, Any]:
        return await _embed_all(services, Fields(route_request.body), route_request.namespace)

    async def embed_one(route_request: RouteRequest) -> Mapping[str, Any]:
        return await _embed_one(services, Fields(route_request.body), route_request.namespace)

    parts.add(
        *model_routes(listed, find),
        JsonRoute("POST", "/api/embed", "Texts as vectors", embed_all, _EMBED, computes=True),
        JsonRoute(
            "POST", "/api/embeddings", "A text as a vector", embed_one, _PROMPT, computes=True
        ),
    )


ROUTES = add_ollama


def model_routes(
    listed: Callable[[Namespace], Sequence[ModelObject]],
    find: Callable[[str, Namespace], ModelObject],
) -> tuple[JsonRoute, ...]:
    """listed: all models, as in /v1/models, for this key. find: one of them, or raises ModelNotFound."""

    async def tags(route_request: RouteRequest) -> Mapping[str, Any]:
        return {"models": [tag(model) for model in listed(route_request.namespace)]}

    async def running(route_request: RouteRequest) -> Mapping[str, Any]:
        loaded = [
            model
            for model in listed(route_request.namespace)
            if model["state"] in ("loaded", "draining")
        ]
        return {"models": [_running(model) for model in loaded]}

    async def show(route_request: RouteRequest) -> Mapping[str, Any]:
        body = Fields(route_request.body)
        name = body.string("model") or body.string("name")
        if not name:
            raise InvalidValue("model", "is required")
        return _shown(find(name.removesuffix(TAG), route_request.namespace))

    async def version(route_request: RouteRequest) -> Mapping[str, Any]:
        return {"version": API_VERSION, "firn": __version__}

    return (
        JsonRoute("GET", "/api/tags", "Models served here, for Ollama's clients", tags),
        JsonRoute("GET", "/api/ps", "Models loaded now, for Ollama's clients", running),
        JsonRoute("GET", "/api/version", "Version of Ollama's API", version),
        JsonRoute("POST", "/api/show", "One model, for Ollama's clients", show, _SHOW),
    )


def tag(model: ModelObject) -> dict[str, Any]:
    name = _tag(model["id"])
    return {
        "name": name,
        "model": name,
        "modified_at": model["created_at"],
        "size": model["bytes"],
        "digest": hashlib.sha256(name.encode()).hexdigest(),
        "details": _details(model),
    }


def _tag(name: str) -> str:
    return name if ":" in name else f"{name}{TAG}"


def _details(model: ModelObject) -> dict[str, Any]:
    family = model.get("architecture") or ""
    return {
        "parent_model": "",
        "format": "mlx",
        "family": family,
        "families": [family] if family else [],
        "parameter_size": "",
        "quantization_level": model.get("dtype") or "",
    }


def _running(model: ModelObject) -> dict[str, Any]:
    return {
        **tag(model),
        "expires_at": model.get("expires_at") or NEVER,
        "size_vram": model["bytes"],
        "context_length": model.get("context_length") or 0,
    }


def _shown(model: ModelObject) -> dict[str, Any]:
    family = model.get("architecture") or "unknown"
    context = model.get("context_length")
    info: dict[str, Any] = {"general.architecture": family, "general.basename": model["id"]}
    if context:
        info[f"{family}.context_length"] = context
    sampling = model.get("sampling_defaults") or {}
    return {
        "modelfile": "",
        "parameters": "\n".join(f"{RENAMED.get(k, k)} {value}" for k, value in sampling.items()),
        "template": "",
        "modified_at": model["created_at"],
        "details": _details(model),
        "model_info": info,
        "capabilities": [CAPABILITIES[c] for c in model["capabilities"] if c in CAPABILITIES],
    }


# --- embeddings ----------------------------------------------------------------------------


async def _embed_all(services: Services, body: Fields, key_id: Namespace) -> dict[str, Any]:
    began_ns = time.perf_counter_ns()
    services.check_model(model_name(body))
    keep_alive_s(body)
    truncate = body.boolean("truncate", True)
    vectors, n_tokens = await embed(services, body, key_id, truncate=truncate)
    took = durations(began_ns, None)
    return {
        "model": services.engine.model.name,
        "embeddings": vectors,
        "total_duration": took["total_duration"],
        "load_duration": 0,
        "prompt_eval_count": n_tokens,
    }


async def _embed_one(services: Services, body: Fields, key_id: Namespace) -> dict[str, Any]:
    """/api/embeddings, which older clients use."""
    services.check_model(model_name(body))
    keep_alive_s(body)
    prompt = fields.string(body.require("prompt"), "prompt", empty=False)
    vectors, n_tokens = await embed(services, Fields({"input": prompt}), key_id, truncate=True)
    return {"embedding": vectors[0], "prompt_eval_count": n_tokens}


_MODEL = {"type": ["string", "null"]}
_KEEP_ALIVE = {"type": ["string", "number", "null"]}
_SHOW: Mapping[str, Any] = {
    "type": "object",
    "properties": {"model": _MODEL, "name": _MODEL},
    "example": {"model": "gpt-oss"},
}
_EMBED: Mapping[str, Any] = {
    "type": "object",
    "required": ["input"],
    "properties": {
        "model": _MODEL,
        "input": {
            "oneOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "minItems": 1, "items": {"type": "string", "minLength": 1}},
            ]
        },
        "truncate": {"type": ["boolean", "null"]},
        "dimensions": {"type": ["integer", "null"], "minimum": 1},
        "keep_alive": _KEEP_ALIVE,
    },
    "example": {"input": "Hello"},
}
_PROMPT: Mapping[str, Any] = {
    "type": "object",
    "required": ["prompt"],
    "properties": {
        "model": _MODEL,
        "prompt": {"type": "string", "minLength": 1},
        "keep_alive": _KEEP_ALIVE,
    },
    "example": {"prompt": "Hello"},
}
