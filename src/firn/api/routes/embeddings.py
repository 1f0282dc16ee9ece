"""/v1/embeddings, in OpenAI's dialect.

Embeddings are computed between the engine's steps, in batches of bounded size, so that running
replies are hardly delayed.
"""

from __future__ import annotations

import asyncio
import base64
import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from firn.api.dialects import JsonRoute, RouteRequest
from firn.api.http import fields
from firn.api.http.fields import Fields
from firn.api.routes.discovery import RouteParts
from firn.api.services import Services
from firn.core.errors import BadRequest, InvalidValue
from firn.core.ports import Embedder
from firn.core.values import Namespace

MAX_TEXTS = 2048
MAX_CHARS = 8 * 2**20
"""In all texts of a request together: all are tokenized before the first is computed."""
BATCH_TOKENS = 4096
"""Padding included; a longer text is computed alone."""


def add_embeddings(parts: RouteParts) -> None:
    services = parts.services

    async def answer(route_request: RouteRequest) -> Mapping[str, Any]:
        return await _answer(services, Fields(route_request.body), route_request.namespace)

    parts.add(
        JsonRoute("POST", "/v1/embeddings", "Texts as vectors", answer, _SCHEMA, computes=True)
    )


ROUTES = add_embeddings


async def _answer(services: Services, body: Fields, key_id: Namespace) -> dict[str, Any]:
    services.check_model(body.string("model") or "")
    encoding = body.get("encoding_format")
    if encoding is not None:
        encoding = fields.one_of(encoding, "encoding_format", ("float", "base64"))
    truncate = body.boolean("truncate", False)
    vectors, n_tokens = await embed(services, body, key_id, truncate=truncate)
    return {
        "object": "list",
        "model": services.engine.model.name,
        "data": [
            {
                "object": "embedding",
                "index": i,
                "embedding": _pack(vector) if encoding == "base64" else vector,
            }
            for i, vector in enumerate(vectors)
        ],
        "usage": {"prompt_tokens": n_tokens, "total_tokens": n_tokens},
    }


async def embed(
    services: Services, body: Fields, key_id: Namespace, *, truncate: bool
) -> tuple[list[list[float]], int]:
    """The vectors of the body's `input`, and how many tokens it has. Raises BadRequest."""
    embedder = services.embedder
    if embedder is None:
        raise BadRequest(
            "This model does not compute embeddings: its folder has no pooling configuration "
            "(modules.json, 1_Pooling/config.json).",
            param="model",
        )
    n_dims = body.integer("dimensions", low=1, high=embedder.n_dims)
    given = body.require("input")
    texts = await services.in_pool(
        key_id, lambda: _tokens(services, embedder, _texts_or_ids(given), truncate=truncate)
    )
    vectors: dict[int, list[float]] = {}
    for batch in batches([len(text) for text in texts]):
        future = embedder.embed([texts[i] for i in batch], n_dims=n_dims)
        computed = await asyncio.wrap_future(future)
        vectors.update(zip(batch, computed, strict=True))
    return [vectors[i] for i in range(len(texts))], sum(map(len, texts))


def _texts_or_ids(given: object) -> list[str | list[int]]:
    """The texts of `input`: a string, strings, token ids, or lists of token ids."""
    if isinstance(given, str):
        return [fields.string(given, "input", max_chars=MAX_CHARS, empty=False)]
    if not isinstance(given, list):
        raise InvalidValue("input", f"must be a string or an array, not {fields.kind(given)}")
    if given and type(given[0]) is int:
        return [_ids(given, "input")]
    texts: list[str | list[int]] = []
    for i, value in enumerate(fields.array(given, "input", low=1, high=MAX_TEXTS)):
        param = f"input[{i}]"
        texts.append(_ids(value, param) if isinstance(value, list) else _text(value, param))
    if sum(len(text) for text in texts if isinstance(text, str)) > MAX_CHARS:
        raise InvalidValue("input", f"must have at most {MAX_CHARS} characters in all")
    return texts


def _text(value: object, param: str) -> str:
    return fields.string(value, param, empty=False)


def _ids(value: list[object], param: str) -> list[int]:
    return [
        fields.integer(token, f"{param}[{i}]", low=0)
        for i, token in enumerate(fields.array(value, param, low=1))
    ]


def _tokens(
    services: Services, embedder: Embedder, given: Sequence[str | list[int]], *, truncate: bool
) -> list[list[int]]:
    """In the tokenize pool."""
    texts = []
    n_ids, limit = services.engine.model.n_ids, embedder.max_tokens
    for i, value in enumerate(given):
        if isinstance(value, str):
            try:
                ids = services.tokenizer.encode(value, add_special=True)
            except UnicodeEncodeError:
                raise InvalidValue("input", f"text {i} has an unpaired surrogate") from None
        else:
            ids = value
        if not ids:
            raise InvalidValue("input", f"text {i} has no tokens")
        if max(ids) >= n_ids:
            raise InvalidValue("input", f"the model has no token {max(ids)}")
        if len(ids) > limit and not truncate:
            raise InvalidValue(
                "input",
                f"text {i} has {len(ids)} tokens, the model accepts at most {limit}; shorten it, "
                "or set truncate",
            )
        texts.append(cut(ids, limit, special=services.tokenizer.special))
    return texts


def cut(ids: list[int], limit: int, *, special: frozenset[int]) -> list[int]:
    """The first `limit` tokens. A control token at the end stays at the end, as in training."""
    if len(ids) <= limit:
        return ids
    return [*ids[: limit - 1], ids[-1]] if ids[-1] in special else ids[:limit]


def batches(lengths: Sequence[int]) -> Iterator[list[int]]:
    """Indices of texts to compute together: of similar length, so that there is little padding."""
    batch: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: lengths[i]):
        if batch and lengths[i] * (len(batch) + 1) > BATCH_TOKENS:
            yield batch
            batch = []
        batch.append(i)
    if batch:
        yield batch


def _pack(vector: Sequence[float]) -> str:
    return base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


_SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "required": ["input"],
    "properties": {
        "model": {"type": ["string", "null"]},
        "input": {
            "oneOf": [
                {"type": "string", "minLength": 1},
                {"type": "array", "minItems": 1, "items": {"type": "string", "minLength": 1}},
                {"type": "array", "minItems": 1, "items": {"type": "integer", "minimum": 0}},
            ]
        },
        "encoding_format": {"enum": ["float", "base64", None]},
        "dimensions": {"type": ["integer", "null"], "minimum": 1},
        "truncate": {
            "type": ["boolean", "null"],
            "description": "Cut off texts that are too long; otherwise they are an error.",
        },
    },
    "example": {"input": "Hello"},
}
