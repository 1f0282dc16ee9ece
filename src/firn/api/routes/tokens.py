"""/v1/tokenize and /v1/detokenize."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from firn.api.calls.prompting import decoded_request, prompt_of
from firn.api.dialects import JsonRoute, RouteRequest
from firn.api.http.fields import Fields, array, integer, string
from firn.api.routes.discovery import RouteParts
from firn.api.services import Services
from firn.core.errors import BadRequest, InvalidValue

MAX_TEXT_CHARS = 4 * 2**20
"""More than any model's context. Tokenizing takes a hundred times the memory of the text."""


def add_tokens(parts: RouteParts) -> None:
    services = parts.services
    chat = next(d for d in parts.dialects if d.path == "/v1/chat/completions")

    async def tokenize(route_request: RouteRequest) -> Mapping[str, Any]:
        body, key_id = Fields(route_request.body), route_request.namespace
        services.check_model(body.string("model") or "")
        text = body.get("text") if body.get("text") is not None else body.get("prompt")
        if text is None and body.get("messages") is None:
            raise InvalidValue("text", "is required, unless messages are given")
        if text is None:
            request = await decoded_request(services, chat, route_request)
            prompt = await prompt_of(services, request, key_id)
            return await services.in_pool(
                key_id, lambda: _token_list(services, prompt.ids.tolist())
            )
        checked = string(text, "text", max_chars=MAX_TEXT_CHARS)
        special = body.boolean("add_special_tokens", True)
        return await services.in_pool(
            key_id,
            lambda: _token_list(services, _encode(services, checked, add_special=special)),
        )

    async def detokenize(route_request: RouteRequest) -> Mapping[str, Any]:
        body = Fields(route_request.body)
        services.check_model(body.string("model") or "")
        name = "ids" if body.get("ids") is not None else "tokens"
        ids = body.get(name)
        if ids is None:
            raise InvalidValue("ids", "is required")
        return await services.in_pool(
            route_request.namespace, lambda: _text_of(services, ids, name)
        )

    parts.add(
        JsonRoute("POST", "/v1/tokenize", "Tokens of a text or a chat", tokenize, _TOKENIZE),
        JsonRoute("POST", "/v1/detokenize", "Text of tokens", detokenize, _DETOKENIZE),
    )


ROUTES = add_tokens


def _encode(services: Services, text: str, *, add_special: bool) -> list[int]:
    try:
        return services.tokenizer.encode(text, add_special=add_special)
    except UnicodeEncodeError:
        raise BadRequest(
            "text: contains an unpaired surrogate, which is not valid text.", param="text"
        ) from None


def _text_of(services: Services, given: Any, name: str) -> dict[str, Any]:
    last = services.engine.model.vocab_size - 1
    ids = [
        integer(token, f"{name}[{i}]", low=0, high=last)
        for i, token in enumerate(array(given, name))
    ]
    text = services.tokenizer.decode(ids)
    return {"text": text, "prompt": text, "count": len(ids)}


def _token_list(services: Services, ids: list[int]) -> dict[str, Any]:
    raw = services.tokenizer.token_bytes
    return {
        "ids": ids,
        "tokens": [raw(token).decode("utf-8", "replace") for token in ids],
        "count": len(ids),
        "max_model_len": services.engine.model.context_length,
    }


_TOKENIZE: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "model": {"type": ["string", "null"]},
        "text": {"type": ["string", "null"]},
        "messages": {"type": ["array", "null"], "items": {"type": "object"}},
        "tools": {"type": ["array", "null"], "items": {"type": "object"}},
        "add_special_tokens": {"type": ["boolean", "null"]},
    },
    "example": {"text": "Hello"},
}
_DETOKENIZE: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "model": {"type": ["string", "null"]},
        "ids": {"type": "array", "items": {"type": "integer", "minimum": 0}},
    },
    "example": {"ids": [1, 2, 3]},
}
