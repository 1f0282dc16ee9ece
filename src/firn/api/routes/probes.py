"""/health, /ready and /metrics: for supervisors, load balancers and Prometheus.

If callers have keys, only the operator sees how busy the server is: a key must not learn about others.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from firn import __version__
from firn.api.http.auth import Caller
from firn.api.http.exchange import exchange_of
from firn.api.observe.cache_metrics import CacheMetrics, own_snapshot
from firn.api.observe.metrics import Metrics
from firn.api.services import Services


def add_probes(app: FastAPI, services: Services, metrics: Metrics) -> None:
    async def health(request: Request) -> dict[str, Any]:
        return _health(services, exchange_of(request.scope).caller)

    async def ready() -> JSONResponse:
        why = _why_not_ready(services)
        body = {"ready": why is None, "why": why}
        return JSONResponse(body, status_code=200 if why is None else 503)

    async def prometheus(request: Request) -> Response:
        caller = exchange_of(request.scope).caller
        if caller.operator:
            text = metrics.render()
        else:
            text = metrics.render_own(caller.key_id, extra=await _own_cache(services, caller))
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    not_now: dict[int | str, dict[str, Any]] = {503: {"description": "Not ready"}}
    for method in ("GET", "HEAD"):  # agents and load balancers probe with HEAD
        add = partial(app.add_api_route, methods=[method], include_in_schema=method == "GET")
        add("/health", health, summary="The process is alive")
        add("/ready", ready, summary="The engine answers", responses=not_now)
    app.add_api_route(
        "/metrics", prometheus, summary="Metrics, for Prometheus", response_class=Response
    )


def _health(services: Services, caller: Caller) -> dict[str, Any]:
    engine = services.engine.health()
    calls: dict[str, Any] = {}
    stages: dict[str, Any] = {}
    details = services.telemetry.health()
    if caller.operator or not services.access.keys.required:
        calls = {"calls": services.event_router.n_calls}
        stages = {
            "last_step_age_s": round(engine.last_step_age_s, 3),
            "waiting": engine.n_waiting,
            "prefilling": engine.n_prefilling,
            "decoding": engine.n_decoding,
        }
    else:
        details = _for_anyone(details)
    return {
        "status": "ok" if engine.alive else "engine dead",
        "version": __version__,
        "model": services.engine.model.name,
        "draining": services.event_router.draining,
        **calls,
        "engine": {
            "alive": engine.alive,
            **stages,
        },
        **details,
    }


def _for_anyone(details: Mapping[str, Any]) -> dict[str, Any]:
    """Only what works: no counts of what others do, no folder, bucket or host named by a fault."""
    cache = {
        name: {"state": part["state"]} if isinstance(part, Mapping) else part
        for name, part in details.get("cache", {}).items()
    }
    return {"cache": cache} | {k: v for k, v in details.items() if k == "ranks"}


def _why_not_ready(services: Services) -> str | None:
    """Why the server is not ready; None: it is."""
    engine = services.engine.health()
    if services.event_router.draining:
        return "shutting down"
    if not engine.alive:
        return "the engine has stopped"
    if engine.last_step_age_s > services.limits.stale_after_s:
        return f"the engine has taken no step for {engine.last_step_age_s:.0f} s"
    return None


async def _own_cache(services: Services, caller: Caller) -> tuple[Collector, ...]:
    """The cache's counters for one caller's namespace."""
    if services.cache_admin is None:
        return ()
    stats = await asyncio.wrap_future(services.cache_admin.stats(caller.namespace))
    return (CacheMetrics(lambda: own_snapshot(stats)),)
