"""What app.py hands to the HTTP side. Built complete, never changed."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from prometheus_client.registry import Collector

from firn.api.auth import Keys
from firn.api.event_router import EventRouter
from firn.api.hosts import Hosts
from firn.api.quotas import Quotas
from firn.core.errors import ModelNotFound
from firn.core.ports import CacheAdmin, Embedder, Engine, Recorder, Tokenizer
from firn.core.sparse import SparseRules
from firn.core.values import (
    Defaults,
    GenerateRequest,
    Grammar,
    Namespace,
    Prompt,
    Reasoning,
    SoftenedSchema,
    Source,
)
from firn.text.formats import ReplyFormat
from firn.text.rerank import Reranker

T = TypeVar("T")

STAND_INS = ("claude", "gpt-")
"""Model ids that begin like this are answered by the served model, whatever it is."""

Gather = Callable[[GenerateRequest, Namespace], Awaitable[GenerateRequest]]
"""Fetches what a request refers to, on the asyncio thread; what is kept of it belongs to the owner."""


class Prompts(Protocol):
    """Makes prompts in the tokenize pool; implemented by `firn.text.prompt.PromptMaker`."""

    def make(self, source: Source, *, reasoning: Reasoning = ...) -> Prompt: ...

    def tail(self, prompt: Prompt) -> str: ...

    def ends(self, source: Source) -> frozenset[int]: ...


@dataclass(frozen=True, slots=True)
class ApiLimits:
    """None: no limit.

    max_tokens: of a reply whose request names no length. max_request_tokens: the most that a request
    may name. timeout_s: of one request. requests_per_minute: of one client. max_calls: accepted at
    once, in whatever stage. max_rows: requests that generate at once. max_requests: of one call.
    body_nbytes: of one request; bodies_nbytes: of all together. keep_alive_s: silence after which a
    stream gets a comment line. stale_after_s: an engine that took no step for so long is not ready.
    """

    max_tokens: int = 4096
    max_request_tokens: int | None = None
    timeout_s: float | None = None
    requests_per_minute: int | None = None
    max_calls: int = 1024
    max_rows: int = 32
    max_requests: int = 1024
    body_nbytes: int = 64 * 2**20
    bodies_nbytes: int = 1024 * 2**20
    keep_alive_s: float = 5.0
    stale_after_s: float = 30.0


@dataclass(frozen=True, slots=True)
class Services:
    """`pool` is the tokenize pool. What is None is not available, and requests for it are refused:
    `compile_grammar` is for constrained output, `fetch_pictures` for images by address."""

    engine: Engine
    tokenizer: Tokenizer
    prompts: Prompts
    reply_format: ReplyFormat
    event_router: EventRouter
    pool: Executor
    limits: ApiLimits = ApiLimits()
    defaults: Defaults = Defaults()
    sparse: SparseRules = SparseRules()
    keys: Keys = field(default_factory=Keys)
    hosts: Hosts = field(default_factory=Hosts)
    quotas: Quotas = field(default_factory=Quotas)
    allow_origins: tuple[str, ...] = ()
    model_aliases: frozenset[str] = frozenset()
    any_name: bool = False
    """Answer to every model name: a server of several models has chosen this one already."""
    compile_grammar: Callable[[Grammar, Namespace], Any] | None = None
    softener: Callable[[Namespace], Callable[[Mapping[str, Any]], SoftenedSchema]] = lambda owner: (
        SoftenedSchema
    )
    cache_admin: CacheAdmin | None = None
    embedder: Embedder | None = None
    reranker: Reranker | None = None
    fetch_pictures: Gather | None = None
    read_documents: Gather | None = None
    recorder: Recorder | None = None
    """None: no trace is kept."""
    dashboard: bool = True
    """Serve the page at /."""
    show_text: bool = False
    """The dashboard shows text of prompts, to each caller its own."""
    allocated: Callable[[], Mapping[str, int]] = dict
    """Bytes of device memory by kind, from any thread."""
    health_details: Callable[[], Mapping[str, Any]] = dict
    extra_collectors: tuple[Collector, ...] = ()

    @property
    def keeps_prompts(self) -> bool:
        """Whether sessions keep the tokens of their prompts, for a trace or for the dashboard."""
        return self.recorder is not None or self.show_text

    async def offload(self, work: Callable[[], T], *, when: bool) -> T:
        """Do the work in the pool when there is much of it: other streams must not wait."""
        if not when:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self.pool, work)

    def serves(self, name: str) -> bool:
        """Whether a request for this model is answered. Agents ask for several of OpenAI's or
        Anthropic's models by name: the served model answers to all of them."""
        known = {self.engine.model.name, *self.model_aliases}
        return self.any_name or name in known or name.startswith(STAND_INS)

    def check_model(self, name: str) -> None:
        """Raises ModelNotFound. An empty name is the served model."""
        if name and not self.serves(name):
            raise ModelNotFound(name, self.engine.model.name)
