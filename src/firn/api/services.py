"""What the HTTP side needs from the rest of the server. Built by `assembly`, never changed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from prometheus_client.registry import Collector

from firn.api.calls.event_router import EventRouter
from firn.api.calls.quotas import Quotas
from firn.api.http.auth import Keys
from firn.api.http.errors import Headers
from firn.api.http.hosts import Hosts
from firn.core.errors import ModelNotFound
from firn.core.events import Admitted
from firn.core.fair_pool import FairPool
from firn.core.ports import CacheAdmin, Embedder, Engine, Recorder, Tokenizer
from firn.core.units import MIB
from firn.core.values import (
    Defaults,
    GenerateRequest,
    Grammar,
    Namespace,
    Prompt,
    Reasoning,
    Reranker,
    Source,
)
from firn.text.grammar.constraint import Relax
from firn.text.reply.formats import ReplyFormat

T = TypeVar("T")
STAND_INS = ("claude", "gpt-")
"""Prefixes of model ids that the served model answers to, whatever it is."""
Gather = Callable[[GenerateRequest, Namespace], AbstractAsyncContextManager[GenerateRequest]]
"""Adds what a request refers to, on the asyncio thread, for as long as the context lasts. What it holds
and what it caches belong to the owner."""


class Preparations(Protocol):
    """Any thread."""

    def check(self, request: GenerateRequest) -> None:
        """Raises InvalidValue if the request asks for what is not possible here."""
        ...

    def of(self, request: GenerateRequest) -> Any:
        """The job's `preparation`; None: its prompt is read as it is."""
        ...

    def headers(self, admitted: Sequence[Admitted]) -> Headers:
        """What a client should know of these prompts before it reads the reply."""
        ...


class AsSent:
    """Every prompt is read as it was sent."""

    def check(self, request: GenerateRequest) -> None:
        pass

    def of(self, request: GenerateRequest) -> Any:
        return None

    def headers(self, admitted: Sequence[Admitted]) -> Headers:
        return ()


class Prompts(Protocol):
    """Makes prompts, in the tokenize pool. `firn.text.prompt.maker.PromptMaker` implements it."""

    def make(self, source: Source, *, reasoning: Reasoning = ...) -> Prompt: ...

    def tail(self, prompt: Prompt) -> str: ...

    def ends(self, source: Source) -> frozenset[int]: ...


@dataclass(frozen=True, slots=True)
class ApiLimits:
    """None: no limit.

    max_tokens: for a reply whose request sets no max_tokens. max_request_tokens: the most that a
    request may set. timeout_s: for one call. requests_per_minute: per client. max_rows: requests that
    generate at a time. max_requests: per call. body_nbytes: size of one body; bodies_nbytes: of all
    bodies together. keep_alive_s: silence on a stream after which something is sent to keep it alive.
    stale_after_s: time without a step after which the engine counts as not ready.
    """

    max_tokens: int = 4096
    max_request_tokens: int | None = None
    timeout_s: float | None = None
    requests_per_minute: int | None = None
    max_rows: int = 32
    max_requests: int = 1024
    body_nbytes: int = 64 * MIB
    bodies_nbytes: int = 1024 * MIB
    keep_alive_s: float = 5.0
    stale_after_s: float = 30.0


class Grammars(Protocol):
    """For constrained output, in the tokenize pool. `models.grammar.compiler.Compiler` implements it."""

    def compile(self, grammar: Grammar, owner: Namespace) -> object: ...

    def relaxer(self, owner: Namespace) -> Relax:
        """What of a schema can be enforced."""
        ...


@dataclass(frozen=True, slots=True)
class Access:
    """Who may call the server, from where, and how much."""

    keys: Keys = field(default_factory=Keys)
    hosts: Hosts = field(default_factory=Hosts)
    allow_origins: tuple[str, ...] = ()
    quotas: Quotas = field(default_factory=Quotas)


@dataclass(frozen=True, slots=True)
class PageOptions:
    """show_text: of prompts, to each caller its own."""

    served: bool = True
    show_text: bool = False


@dataclass(frozen=True, slots=True)
class Telemetry:
    """What other parts of the server report of themselves. allocated: bytes of device memory by kind,
    on any thread. recorder: None: no trace is kept."""

    allocated: Callable[[], Mapping[str, int]] = dict
    health: Callable[[], Mapping[str, Any]] = dict
    collectors: tuple[Collector, ...] = ()
    recorder: Recorder | None = None


@dataclass(frozen=True, slots=True)
class Services:
    """pool: the tokenize pool. A service that is None is not available, and requests for it are
    refused. gathers: in this order."""

    engine: Engine
    tokenizer: Tokenizer
    prompts: Prompts
    reply_format: ReplyFormat
    event_router: EventRouter
    pool: FairPool
    limits: ApiLimits = ApiLimits()
    defaults: Defaults = Defaults()
    preparations: Preparations = field(default_factory=AsSent)
    access: Access = field(default_factory=Access)
    model_aliases: frozenset[str] = frozenset()
    any_name: bool = False
    """Answer to every model name: the front of several models has already chosen this one."""
    gathers: tuple[Gather, ...] = ()
    grammars: Grammars | None = None
    cache_admin: CacheAdmin | None = None
    embedder: Embedder | None = None
    reranker: Reranker | None = None
    page: PageOptions = PageOptions()
    telemetry: Telemetry = Telemetry()

    async def in_pool(self, key_id: Namespace, work: Callable[[], T]) -> T:
        """Do this key's work in the tokenize pool, so that no stream waits for it."""
        return await asyncio.wrap_future(self.pool.submit(key_id, work))

    async def offload(self, key_id: Namespace, work: Callable[[], T], *, when: bool) -> T:
        """Do the work in the pool if it is large, else right here: the pool costs time, too."""
        return await self.in_pool(key_id, work) if when else work()

    def serves(self, name: str) -> bool:
        """Whether a request for this model is answered. Agents ask for OpenAI's or Anthropic's
        models by name; the served model answers to all of those."""
        known = {self.engine.model.name, *self.model_aliases}
        return self.any_name or name in known or name.startswith(STAND_INS)

    def check_model(self, name: str) -> None:
        """Raises ModelNotFound. An empty name means the served model."""
        if name and not self.serves(name):
            raise ModelNotFound(name, self.engine.model.name)
