"""The HTTP app: routes, layers, error shapes. Builds; the logic is elsewhere."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route

from firn import __version__
from firn.api.cache_routes import CacheRoutes
from firn.api.dialects import discover
from firn.api.embedding_routes import embedding_routes
from firn.api.exchange import HttpFault, Shapes, error_headers
from firn.api.extras import add_extra
from firn.api.front import Front, Gate
from firn.api.generate import Generate
from firn.api.metrics import Metrics
from firn.api.openapi import describe
from firn.api.services import Services
from firn.api.token_routes import token_routes
from firn.core.errors import FirnError, ModelNotFound
from firn.core.values import ModelInfo


def create_app(services: Services) -> FastAPI:
    app = FastAPI(title="firn", version=__version__, redirect_slashes=False)
    dialects = discover()
    shapes = Shapes(dialects)
    metrics = Metrics(services.engine, services.mailroom, extra=services.extra_collectors)
    for dialect in dialects:
        endpoint = Generate(dialect, services, metrics)
        app.router.routes.append(Route(dialect.path, endpoint, methods=["POST"]))
        for extra in dialect.routes(services):
            add_extra(app, extra, services)
    for extra in (*token_routes(services, dialects), *embedding_routes(services)):
        add_extra(app, extra, services)
    if services.cache_admin is not None:
        CacheRoutes(services, services.cache_admin, dialects).add_to(app)
    _add_models(app, services)
    _add_probes(app, services, metrics)
    _add_error_shapes(app, shapes)
    # The last one added is the outermost.
    app.add_middleware(Gate, keys=services.keys, shapes=shapes)
    if services.allow_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(services.allow_origins),
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "request-id", "retry-after", "x-firn-unenforced"],
        )
    routes = frozenset(route.path for route in app.routes if isinstance(route, Route))
    app.add_middleware(Front, shapes=shapes, metrics=metrics, routes=routes)
    describe(app, dialects, with_keys=services.keys.required)
    return app


def _add_models(app: FastAPI, services: Services) -> None:
    @app.get("/v1/models", summary="What is served")
    async def models() -> dict[str, Any]:
        model = services.engine.model
        ends = {"first_id": model.name, "last_id": model.name, "has_more": False}
        return {"object": "list", "data": [_model_object(model)], **ends}

    missing: dict[int | str, dict[str, Any]] = {404: {"description": "Not served here"}}

    @app.get("/v1/models/{model_id:path}", summary="One model", responses=missing)
    async def model(model_id: str) -> dict[str, Any]:
        served = services.engine.model
        if model_id != served.name and model_id not in services.model_aliases:
            raise ModelNotFound(model_id, served.name)
        return _model_object(served)


def _model_object(model: ModelInfo) -> dict[str, Any]:
    """As OpenAI's clients know it and as Anthropic's do, and what we have to say besides."""
    born = datetime.fromtimestamp(model.created, tz=UTC)
    return {
        "id": model.name,
        "object": "model",
        "type": "model",
        "display_name": model.name,
        "created": model.created,
        "created_at": born.isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": model.context_length,
        "owned_by": "firn",
        "architecture": model.architecture,
        "context_length": model.context_length,
        "dtype": model.dtype,
        "vision": model.vision,
        "layer_kinds": list(model.layer_kinds),
        "batched": model.batchable,
        "unbatched_why": model.unbatchable_why,
    }


def _add_probes(app: FastAPI, services: Services, metrics: Metrics) -> None:
    @app.get("/health", summary="The process is alive")
    async def health() -> dict[str, Any]:
        engine = services.engine.health()
        return {
            "status": "ok" if engine.alive else "engine dead",
            "version": __version__,
            "model": services.engine.model.name,
            "draining": services.mailroom.draining,
            "calls": services.mailroom.n_calls,
            "engine": {
                "alive": engine.alive,
                "last_step_age_s": round(engine.last_step_age_s, 3),
                "waiting": engine.n_waiting,
                "prefilling": engine.n_prefilling,
                "decoding": engine.n_decoding,
            },
            **services.health_details(),
        }

    @app.get("/ready", summary="The engine answers", responses={503: {"description": "Not now"}})
    async def ready() -> JSONResponse:
        engine = services.engine.health()
        why = None
        if services.mailroom.draining:
            why = "shutting down"
        elif not engine.alive:
            why = "the engine has stopped"
        elif engine.last_step_age_s > services.limits.stale_after_s:
            why = f"the engine has taken no step for {engine.last_step_age_s:.0f} s"
        body = {"ready": why is None, "why": why}
        return JSONResponse(body, status_code=200 if why is None else 503)

    @app.get("/metrics", summary="For Prometheus", response_class=Response)
    async def prometheus() -> Response:
        return Response(metrics.render(), media_type=CONTENT_TYPE_LATEST)


def _add_error_shapes(app: FastAPI, shapes: Shapes) -> None:
    def render(request: Request, error: FirnError) -> JSONResponse:
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
