"""/v1/tokenize and /v1/detokenize."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from firn.api.dialects import Dialect, JsonRoute, RouteRequest
from firn.api.fields import Fields, array, integer, string
from firn.api.prompting import prompt_of
from firn.api.services import Services
from firn.core.errors import BadRequest, InvalidValue

T = TypeVar("T")
MAX_TEXT_CHARS = 4 * 2**20
"""More than any model's context; tokenizing takes a hundred times the memory of the text."""


def token_routes(services: Services, dialects: Sequence[Dialect]) -> tuple[JsonRoute, ...]:
    chat = next(d for d in dialects if d.path == "/v1/chat/completions")

    async def tokenize(asked: RouteRequest) -> Mapping[str, Any]:
        body = Fields(asked.body)
        services.check_model(body.string("model") or "")
        text = body.get("text") if body.get("text") is not None else body.get("prompt")
        if text is None and body.get("messages") is None:
            raise InvalidValue("text", "is required, or messages")
        if text is None:
            (request,) = chat.decode(asked.body, namespace=asked.namespace).requests
            prompt = await prompt_of(services, request, asked.namespace)
            return await _in_pool(services, lambda: _shown(services, prompt.ids.tolist()))
        given = string(text, "text", max_chars=MAX_TEXT_CHARS)
        special = body.boolean("add_special_tokens", True)
        return await _in_pool(
            services, lambda: _shown(services, _encoded(services, given, add_special=special))
        )

    async def detokenize(asked: RouteRequest) -> Mapping[str, Any]:
        body = Fields(asked.body)
        services.check_model(body.string("model") or "")
        name = "ids" if body.get("ids") is not None else "tokens"
        given = body.get(name)
        if given is None:
            raise InvalidValue("ids", "is required")
        return await _in_pool(services, lambda: _text_of(services, given, name))

    return (
        JsonRoute("POST", "/v1/tokenize", "A text's or a chat's tokens", tokenize, _TOKENIZE),
        JsonRoute("POST", "/v1/detokenize", "The text of tokens", detokenize, _DETOKENIZE),
    )


def _encoded(services: Services, text: str, *, add_special: bool) -> list[int]:
    try:
        return services.tokenizer.encode(text, add_special=add_special)
    except UnicodeEncodeError:
        raise BadRequest("text: an unpaired surrogate, which is not text.", param="text") from None


def _text_of(services: Services, given: Any, name: str) -> dict[str, Any]:
    last = services.engine.model.vocab_size - 1
    ids = [
        integer(token, f"{name}[{i}]", low=0, high=last)
        for i, token in enumerate(array(given, name))
    ]
    text = services.tokenizer.decode(ids)
    return {"text": text, "prompt": text, "count": len(ids)}


def _shown(services: Services, ids: list[int]) -> dict[str, Any]:
    raw = services.tokenizer.token_bytes
    return {
        "ids": ids,
        "tokens": [raw(token).decode("utf-8", "replace") for token in ids],
        "count": len(ids),
        "max_model_len": services.engine.model.context_length,
    }


async def _in_pool(services: Services, work: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(services.pool, work)


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
