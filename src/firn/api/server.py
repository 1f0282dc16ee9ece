"""The HTTP app: routes, layers, error shapes. Builds; the logic is elsewhere."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from firn import __version__
from firn.api.activity import Activity, add_activity
from firn.api.auth import Caller
from firn.api.body_reader import BodyReader
from firn.api.cache_metrics import CacheMetrics, own_snapshot
from firn.api.dashboard import add_page
from firn.api.dialects import discover
from firn.api.errors import ErrorShapes, HttpFault, error_headers
from firn.api.excerpts import first_difference
from firn.api.exchange import exchange_of
from firn.api.generate import Generate
from firn.api.json_routes import add_json_route
from firn.api.layers import Authentication, HostCheck, RequestLog
from firn.api.metrics import Metrics
from firn.api.openapi import describe
from firn.api.rate_limit import RateLimit
from firn.api.routes.cache import CacheRoutes
from firn.api.routes.embeddings import embedding_routes
from firn.api.routes.load import LoadRoutes
from firn.api.routes.models import add_models
from firn.api.routes.ollama import ollama_routes
from firn.api.routes.rerank import rerank_routes
from firn.api.routes.tokens import token_routes
from firn.api.routes.tree import TreeRoutes
from firn.api.services import Services
from firn.core.errors import FirnError


def create_app(services: Services) -> FastAPI:
    app = FastAPI(title="firn", version=__version__, redirect_slashes=False)
    dialects = discover(services.defaults)
    shapes = ErrorShapes(dialects)
    limits = services.limits
    bodies = BodyReader(limit_nbytes=limits.body_nbytes, total_nbytes=limits.bodies_nbytes)
    metrics = Metrics(
        services.engine,
        services.event_router,
        n_calls=services.quotas.n_calls,
        extra=services.extra_collectors,
    )
    differs = partial(first_difference, services)
    activity = Activity(services.engine.model.name, differs)
    for dialect in dialects:
        endpoint = Generate(dialect, services, metrics, bodies, activity)
        app.router.routes.append(Route(dialect.path, endpoint, methods=["POST"]))
        for extra in dialect.routes(services):
            add_json_route(app, extra, services, bodies)
    further = (
        *token_routes(services, dialects),
        *embedding_routes(services),
        *ollama_routes(services),
        *rerank_routes(services),
    )
    for extra in further:
        add_json_route(app, extra, services, bodies)
    if services.cache_admin is not None:
        CacheRoutes(services, services.cache_admin, dialects, bodies).add_to(app)
        TreeRoutes(services, services.cache_admin).add_to(app)
    LoadRoutes(services, metrics, max_rows=limits.max_rows).add_to(app)
    add_models(app, services)
    add_activity(app, services, activity)
    add_page(app, shown=services.dashboard)
    _add_probes(app, services, metrics)
    add_error_shapes(app, shapes)
    # The last one added is the outermost.
    if services.limits.requests_per_minute is not None:
        per_minute = services.limits.requests_per_minute
        app.add_middleware(RateLimit, per_minute=per_minute, shapes=shapes)
    app.add_middleware(Authentication, keys=services.keys, shapes=shapes)
    if services.allow_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(services.allow_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=[
                "x-request-id",
                "request-id",
                "retry-after",
                "x-firn-unenforced",
                "x-session",
            ],
        )
    app.add_middleware(HostCheck, hosts=services.hosts, shapes=shapes)
    routes = frozenset(route.path for route in app.routes if isinstance(route, Route))
    app.add_middleware(RequestLog, shapes=shapes, metrics=metrics, bodies=bodies, routes=routes)
    describe(app, dialects, with_keys=services.keys.required)
    return app


def _add_probes(app: FastAPI, services: Services, metrics: Metrics) -> None:
    async def health(request: Request) -> dict[str, Any]:
        engine = services.engine.health()
        calls: dict[str, Any] = {}
        stages: dict[str, Any] = {}
        # Where callers have keys, how busy the server is tells each of them what others do.
        if exchange_of(request.scope).caller.operator or not services.keys.required:
            calls = {"calls": services.event_router.n_calls}
            stages = {
                "waiting": engine.n_waiting,
                "prefilling": engine.n_prefilling,
                "decoding": engine.n_decoding,
            }
        return {
            "status": "ok" if engine.alive else "engine dead",
            "version": __version__,
            "model": services.engine.model.name,
            "draining": services.event_router.draining,
            **calls,
            "engine": {
                "alive": engine.alive,
                "last_step_age_s": round(engine.last_step_age_s, 3),
                **stages,
            },
            **services.health_details(),
        }

    async def ready() -> JSONResponse:
        engine = services.engine.health()
        why = None
        if services.event_router.draining:
            why = "shutting down"
        elif not engine.alive:
            why = "the engine has stopped"
        elif engine.last_step_age_s > services.limits.stale_after_s:
            why = f"the engine has taken no step for {engine.last_step_age_s:.0f} s"
        body = {"ready": why is None, "why": why}
        return JSONResponse(body, status_code=200 if why is None else 503)

    not_now: dict[int | str, dict[str, Any]] = {503: {"description": "Not now"}}
    for method in ("GET", "HEAD"):  # agents and load balancers ask by HEAD whether anybody is there
        add = partial(app.add_api_route, methods=[method], include_in_schema=method == "GET")
        add("/health", health, summary="The process is alive")
        add("/ready", ready, summary="The engine answers", responses=not_now)

    @app.get("/metrics", summary="For Prometheus", response_class=Response)
    async def prometheus(request: Request) -> Response:
        caller = exchange_of(request.scope).caller
        if caller.operator:
            shown = metrics.render()
        else:
            shown = metrics.render_own(caller.own, extra=await _own_cache(services, caller))
        return Response(shown, media_type=CONTENT_TYPE_LATEST)


async def _own_cache(services: Services, caller: Caller) -> tuple[Collector, ...]:
    """The cache's counters for one caller."""
    if services.cache_admin is None:
        return ()
    found = await asyncio.wrap_future(services.cache_admin.stats(caller.namespace))
    return (CacheMetrics(lambda: own_snapshot(found)),)


def add_error_shapes(app: FastAPI, shapes: ErrorShapes) -> None:
    def render(request: Request, error: FirnError) -> JSONResponse:
        exchange_of(request.scope).fault = error
        body = shapes.of(request.url.path)(error)
        headers = {name.decode(): value.decode("latin-1") for name, value in error_headers(error)}
        return JSONResponse(body, status_code=error.status, headers=headers)

    @app.exception_handler(FirnError)
    async def firn_error(request: Request, error: FirnError) -> JSONResponse:
        return render(request, error)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        allow = (error.headers or {}).get("Allow")
        what = f"{request.method} {request.url.path}"
        message = {404: f"There is no {what} here.", 405: f"{what} is not allowed."}.get(
            error.status_code, str(error.detail)
        )
        return render(request, HttpFault(error.status_code, message, allow=allow))
