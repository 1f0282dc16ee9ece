"""/v1/rerank, in Cohere's and Jina's shape: documents sorted by how well they answer a query.

Each document becomes a prompt of its own, and the model's next token decides: "yes" or "no". The
prompts run side by side in the engine's batch. Instruction and query, which they share, are
computed once and cached like any prefix.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

from firn.api.calls.prompting import make_prompt
from firn.api.calls.session import Session
from firn.api.dialects import JsonRoute, RouteRequest
from firn.api.http import fields
from firn.api.http.auth import SHARED, Caller
from firn.api.http.fields import Fields
from firn.api.routes.discovery import RouteParts
from firn.api.services import Services
from firn.core.errors import BadRequest, InvalidValue
from firn.core.events import TextDelta, TextLogprob
from firn.core.values import GenerateRequest, Namespace, RawTokens, Reranker, Sampling
from firn.text.prompt import rerank

PATHS = ("/v1/rerank", "/v2/rerank", "/rerank")
"""Cohere's clients send the version, others do not."""
MAX_DOCUMENTS = 1000
MAX_CHARS = 8 * 2**20
"""In all prompts of a request together: all are tokenized before the first is computed."""
WAVE_DOCUMENTS = 32
"""Documents in the engine at a time: a long list must not fill its queue."""
N_LIKELIEST = 64
"""Likeliest tokens to request: the other answer is nearly always among them."""
FORCED = 1e4
"""A bias that no logit outweighs. Logprobs do not include it."""


def add_rerank(parts: RouteParts) -> None:
    services = parts.services

    async def answer(route_request: RouteRequest) -> Mapping[str, Any]:
        return await _answer(services, Fields(route_request.body), route_request.namespace)

    summary = "Rank documents by how well they answer a query"
    for path in PATHS:
        parts.add(JsonRoute("POST", path, summary, answer, _SCHEMA, computes=True))


ROUTES = add_rerank


async def _answer(services: Services, body: Fields, key_id: Namespace) -> dict[str, Any]:
    services.check_model(body.string("model") or "")
    reranker = services.reranker
    if reranker is None:
        raise BadRequest("This model is not a reranker.", param="model")
    query = fields.string(body.require("query"), "query", empty=False)
    instruction = body.string("instruction") or rerank.INSTRUCTION
    documents = _documents(body.require("documents"))
    top_n = body.integer("top_n", low=1) or len(documents)
    limit = body.integer("max_tokens_per_doc", low=1)
    shows_documents = body.boolean("return_documents", False)
    body.skip("rank_fields", "max_chunks_per_doc", "truncation", "user")
    # Cached like the caller's other prompts.
    namespace = key_id if services.access.keys.private else SHARED
    reranking = _Reranking(services, reranker, Caller(key_id, namespace))
    n_chars = (len(query) + len(instruction)) * len(documents) + sum(map(len, documents))
    if n_chars > MAX_CHARS:  # each document is a prompt with query and instruction
        raise InvalidValue(
            "documents", f"have more than {MAX_CHARS} characters, each with the query; send fewer"
        )
    prompts = await reranking.prompts(query, documents, instruction, limit=limit)
    scores = await reranking.scores(prompts)
    order = sorted(range(len(documents)), key=lambda i: -scores[i])[:top_n]
    n_tokens = sum(map(len, prompts))
    return {
        "id": f"rerank-{uuid.uuid4().hex}",
        "object": "list",
        "model": services.engine.model.name,
        "results": [
            {
                "index": i,
                "relevance_score": scores[i],
                **({"document": {"text": documents[i]}} if shows_documents else {}),
            }
            for i in order
        ],
        "usage": {
            "prompt_tokens": n_tokens,
            "total_tokens": n_tokens,
            "prompt_tokens_details": {"cached_tokens": reranking.n_cached},
        },
        "meta": {
            "api_version": {"version": "2"},
            "billed_units": {"search_units": 1},
            "tokens": {"input_tokens": n_tokens, "output_tokens": 0},
        },
    }


def _documents(given: object) -> list[str]:
    texts = []
    for i, value in enumerate(fields.array(given, "documents", low=1, high=MAX_DOCUMENTS)):
        param = f"documents[{i}]"
        if isinstance(value, dict):
            value, param = Fields(value, param).require("text"), f"{param}.text"
        texts.append(fields.string(value, param))
    return texts


class _Reranking:
    """One request. Owner: its task."""

    def __init__(self, services: Services, reranker: Reranker, caller: Caller) -> None:
        self._services = services
        self._reranker = reranker
        self._caller = caller
        self.n_cached = 0

    async def prompts(
        self, query: str, documents: Sequence[str], instruction: str, *, limit: int | None
    ) -> list[tuple[int, ...]]:
        return await self._services.in_pool(
            self._caller.key_id,
            lambda: [self._prompt(query, text, instruction, limit) for text in documents],
        )

    def _prompt(
        self, query: str, document: str, instruction: str, limit: int | None
    ) -> tuple[int, ...]:
        """In the tokenize pool. limit: how many tokens of the document are used."""
        services = self._services
        if limit is not None:
            document = self._cut(document, limit)
        chat = rerank.question(query, document, instruction)
        request = GenerateRequest("", chat, reasoning=rerank.NO_THINKING)
        prompt = make_prompt(services, request, self._caller.namespace)
        return tuple(prompt.ids.tolist())

    def _cut(self, document: str, limit: int) -> str:
        tokenizer = self._services.tokenizer
        try:
            ids = tokenizer.encode(document, add_special=False)
        except UnicodeEncodeError:
            raise InvalidValue(
                "documents", "contain an unpaired surrogate, which is not valid text"
            ) from None
        return document if len(ids) <= limit else tokenizer.decode(ids[:limit])

    async def scores(self, prompts: Sequence[tuple[int, ...]]) -> list[float]:
        scores: list[float] = []
        wave = min(WAVE_DOCUMENTS, self._services.limits.max_rows)
        for start in range(0, len(prompts), wave):
            scores += await self._wave(prompts[start : start + wave])
        return scores

    async def _wave(self, prompts: Sequence[tuple[int, ...]]) -> list[float]:
        """Ask each prompt for "yes"; if "no" is not among its likeliest tokens, for "no" too."""
        yes, no = self._reranker.yes, self._reranker.no
        first, n_cached = await self._logprobs(prompts, yes)
        self.n_cached += n_cached  # not from the second pass, which reads the same prompts again
        no_bytes = self._services.tokenizer.token_bytes(no)
        others: list[float | None] = [
            next((logprob for _, raw, logprob in token.top if raw == no_bytes), None)
            for token in first
        ]
        missing = [i for i, logprob in enumerate(others) if logprob is None]
        if missing:
            second, _ = await self._logprobs([prompts[i] for i in missing], no)
            for i, token in zip(missing, second, strict=True):
                others[i] = token.logprob
        return [
            rerank.relevance(token.logprob or 0.0, other or 0.0)
            for token, other in zip(first, others, strict=True)
        ]

    async def _logprobs(
        self, prompts: Sequence[tuple[int, ...]], token: int
    ) -> tuple[list[TextLogprob], int]:
        """The logprob of this token after each prompt, and how many tokens were cached."""
        requests = [
            GenerateRequest(
                "",
                RawTokens(ids),
                sampling=Sampling(temperature=0.0, logit_bias=((token, FORCED),)),
                max_tokens=1,
                top_logprobs=N_LIKELIEST,
                ignore_eos=True,
            ).in_full()  # the answer has no way to say that it is approximate
            for ids in prompts
        ]
        by_choice: dict[int, TextLogprob] = {}
        session = Session(
            self._services,
            requests,
            id=f"rerank-{uuid.uuid4().hex}",
            caller=self._caller,
        )
        with closing(session):
            await session.start()
            async for event in session.events():
                if isinstance(event, TextDelta) and event.logprobs:
                    by_choice.setdefault(event.choice, event.logprobs[0])
        return [by_choice[i] for i in range(len(prompts))], session.progress.usage.n_cached


_SCHEMA: Mapping[str, Any] = {
    "type": "object",
    "required": ["query", "documents"],
    "properties": {
        "model": {"type": ["string", "null"]},
        "query": {"type": "string", "minLength": 1},
        "documents": {
            "type": "array",
            "minItems": 1,
            "maxItems": MAX_DOCUMENTS,
            "items": {
                "oneOf": [
                    {"type": "string"},
                    {
                        "type": "object",
                        "required": ["text"],
                        "properties": {"text": {"type": "string"}},
                    },
                ]
            },
        },
        "top_n": {"type": ["integer", "null"], "minimum": 1},
        "return_documents": {"type": ["boolean", "null"]},
        "max_tokens_per_doc": {"type": ["integer", "null"], "minimum": 1},
        "instruction": {"type": ["string", "null"]},
        "keep_alive": {"type": ["string", "number", "null"]},
    },
    "example": {"query": "What is firn?", "documents": ["Old snow.", "A kind of bread."]},
}
