"""Builds the HTTP app from routes and layers. No logic of its own."""

from __future__ import annotations

from functools import partial
from typing import NoReturn

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.routing import Route

from firn import __version__
from firn.api.calls.generate import Generate
from firn.api.calls.observers import observers_of_client
from firn.api.dialects import discover
from firn.api.http.body_reader import BodyReader
from firn.api.http.errors import ErrorShapes, HttpFault, no_route
from firn.api.http.layers import add_layers
from firn.api.observe.activity import Activity, add_activity
from firn.api.observe.dashboard import add_page
from firn.api.observe.metrics import Metrics
from firn.api.routes.cache import CacheRoutes
from firn.api.routes.discovery import RouteParts
from firn.api.routes.discovery import discover as discover_routes
from firn.api.routes.docs_page import add_docs
from firn.api.routes.models import add_models
from firn.api.routes.openapi import describe
from firn.api.routes.probes import add_probes
from firn.api.routes.tree import TreeRoutes
from firn.api.routes.tree_answers import TreeAnswers, excerpt
from firn.api.services import Services


def create_app(services: Services) -> FastAPI:
    app = new_app()
    dialects = discover(services.defaults)
    shapes = ErrorShapes(dialects)
    limits, access = services.limits, services.access
    bodies = BodyReader(limit_nbytes=limits.body_nbytes, total_nbytes=limits.bodies_nbytes)
    metrics = Metrics(
        services.engine,
        services.event_router,
        n_calls=access.quotas.n_calls,
        extra=services.telemetry.collectors,
    )
    activity = Activity(
        services.engine.model.name,
        excerpt=partial(excerpt, services) if services.page.show_text else None,
    )
    observers = partial(observers_of_client, services=services, metrics=metrics, activity=activity)
    for dialect in dialects:
        endpoint = Generate(dialect, services, bodies, observers)
        app.router.routes.append(Route(dialect.path, endpoint, methods=["POST"]))
    parts = RouteParts(app, services, dialects, metrics, bodies)
    for dialect in dialects:
        parts.add(*dialect.routes(services))
    for add_routes in discover_routes():
        add_routes(parts)
    if services.cache_admin is not None:
        answers = TreeAnswers()
        CacheRoutes(services, services.cache_admin, dialects, bodies, answers).add_to(app)
        TreeRoutes(services, services.cache_admin, answers).add_to(app)
    add_models(app, services)
    add_activity(app, services, activity)
    add_page(app, shown=services.page.served)
    add_probes(app, services, metrics)
    add_route_errors(app)
    add_layers(
        app,
        shapes=shapes,
        metrics=metrics,
        bodies=bodies,
        keys=access.keys,
        hosts=access.hosts,
        allow_origins=access.allow_origins,
        requests_per_minute=limits.requests_per_minute,
    )
    describe(app, dialects, with_keys=access.keys.required)
    return app


def new_app() -> FastAPI:
    """An app that has only the routes that describe it."""
    app = FastAPI(
        title="firn", version=__version__, redirect_slashes=False, docs_url=None, redoc_url=None
    )
    add_docs(app)
    return app


def add_route_errors(app: FastAPI) -> None:
    """A path or method that no route has is an error like any other, see `layers.Errors`."""

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> NoReturn:
        allow = (error.headers or {}).get("Allow")
        message = str(error.detail)
        if error.status_code == 404:
            message = no_route(app.routes, request)
        elif error.status_code == 405:
            message = f"{request.method} {request.url.path} is not allowed; use {allow}."
        raise HttpFault(error.status_code, message, allow=allow)
