"""The services that the HTTP side of a server uses, as configured."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from firn.api.calls.event_router import EventRouter
from firn.api.calls.quotas import KeyLimits, Quotas
from firn.api.http.auth import Keys
from firn.api.http.hosts import Hosts, machine_names
from firn.api.observe.cache_metrics import CacheMetrics, MemoryMetrics
from firn.api.observe.metrics import SpeculationMetrics
from firn.api.services import Access, ApiLimits, Gather, PageOptions, Services, Telemetry
from firn.assembly.extras import Extra
from firn.assembly.model import ServerSpec
from firn.assembly.parts import ServerParts
from firn.assembly.text import TextParts
from firn.backends.memory import allocated_nbytes
from firn.cache.admin.control import admin_of
from firn.config import Config
from firn.core.fair_pool import FairPool
from firn.core.units import MIB
from firn.engine import Engine
from firn.models.grammar.compiler import Compiler

log = logging.getLogger("firn")


def build_services(
    spec: ServerSpec,
    text: TextParts,
    engine: Engine[ServerParts],
    *,
    event_router: EventRouter,
    pool: FairPool,
    extras: Sequence[Extra],
) -> Services:
    """engine: must be running, so that its model is known."""
    config, model, parts = spec.config, engine.model, engine.parts
    admin = admin_of(
        parts.cache,
        lambda f: engine.call(lambda parts: f(parts.budget.view())),
        pin_cap_nbytes=config.cache.cache_pin_max_mb * MIB,
    )
    grammars = Compiler(text.tokenizer, vocab_size=model.vocab_size)
    pool.submit("", grammars.prepare)
    services = Services(
        engine=engine,
        tokenizer=text.tokenizer,
        prompts=text.prompt_maker(config, model),
        reply_format=text.reply_format,
        event_router=event_router,
        pool=pool,
        limits=_limits(config),
        defaults=replace(config.sampling.defaults(), stores=admin.health()["reuse"]),
        access=Access(
            keys=keys_of(config),
            hosts=Hosts((*config.server.allowed_hosts, *machine_names(config.server.host))),
            allow_origins=config.server.allow_origins,
            quotas=_quotas(config),
        ),
        model_aliases=frozenset({config.model.path}),
        gathers=_fetchers(config) if model.vision else (),
        grammars=grammars,
        cache_admin=admin,
        page=PageOptions(served=not config.page.no_dashboard, show_text=config.page.show_text),
        telemetry=Telemetry(
            allocated=allocated_nbytes,
            health=lambda: {
                "cache": admin.health(),
                "speculation": parts.speculator.counters(),
                "ranks": spec.sharding.n_ranks,
            },
            collectors=(
                CacheMetrics(admin.snapshot),
                MemoryMetrics(allocated_nbytes),
                SpeculationMetrics(lambda: parts.speculator.counters()),
            ),
        ),
    )
    for extra in extras:
        services = extra.add_to(services, spec, engine)
    return services


def keys_of(config: Config) -> Keys:
    server = config.server
    return Keys(server.api_keys, admin=server.admin_keys, share=config.cache.share_cache)


def _limits(config: Config) -> ApiLimits:
    return ApiLimits(
        max_tokens=config.engine.max_tokens,
        max_request_tokens=config.engine.max_request_tokens or None,
        timeout_s=config.server.timeout or None,
        requests_per_minute=config.server.rate_limit or None,
        max_rows=config.engine.max_concurrency,
        max_requests=max(config.engine.max_queue, config.engine.max_concurrency),
    )


def _quotas(config: Config) -> Quotas:
    server = config.server
    limits = KeyLimits(
        concurrency=server.key_max_concurrency,
        queue_share=server.key_queue_share,
        tokens_per_minute=server.key_tokens_per_minute,
    )
    return Quotas(limits, max_queue=config.engine.max_queue)


def _fetchers(config: Config) -> tuple[Gather, ...]:
    """Empty: pictures given by URL are refused."""
    options = config.images
    if not options.allow_image_urls:
        return ()
    from firn.media.fetch import Fetcher, FetchLimits

    limits = FetchLimits(
        nbytes=options.max_image_mb * MIB,
        timeout_s=options.image_fetch_timeout_s,
        plain_http=options.allow_plain_http_images,
    )
    return (Fetcher(limits).gather,)
