"""The routes that the front answers itself: models, loading, health, metrics, cache."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.routing import Route

from firn import __version__
from firn.api.dialects import JsonRoute, RouteRequest
from firn.api.http.auth import Keys
from firn.api.http.exchange import exchange_of
from firn.api.http.fields import Fields, keep_alive_s
from firn.api.http.hosts import check_may_change_cache, refuse_foreign_pages
from firn.api.routes.agents import add_agents
from firn.api.routes.models import add_routes, page
from firn.api.routes.ollama import model_routes
from firn.api.routes.openapi import error_responses
from firn.core.errors import BadRequest, ModelNotFound, NotFound
from firn.core.values import Namespace
from firn.fleet import merging
from firn.fleet.files import ModelFacts, folder_of, read_facts
from firn.fleet.fleet import Fleet
from firn.fleet.model import Model
from firn.fleet.placement import NEVER, ModelState
from firn.fleet.relay import Relay, RemoteFault, check_may_load

NOBODY = Namespace("")
"""For what depends on no key."""


class ModelListing:
    """Models as clients see them. Owner: the front."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._facts: dict[str, ModelFacts] = {}
        self._began = int(time.time())

    def listed(self, key_id: Namespace) -> list[dict[str, Any]]:
        self._fleet.catalogue.rescan()
        return [self.shown(self._fleet.model(spec), key_id) for spec in self._fleet.catalogue]

    def shown(self, model: Model, key_id: Namespace) -> dict[str, Any]:
        """What the model's own process reports, with what only the front knows. key_id: who asks; when
        others last used the model is not shown."""
        spec, catalogue, error = model.spec, self._fleet.catalogue, model.attempts.error
        born = datetime.fromtimestamp(self._began, tz=UTC)
        facts = ModelFacts() if model.details else self._read(model)
        default = catalogue.default
        return {
            "id": spec.name,
            "object": "model",
            "type": "model",
            "display_name": spec.name,
            "created": self._began,
            "created_at": born.isoformat().replace("+00:00", "Z"),
            "lifecycle": "active",
            "max_input_tokens": facts.context_length,
            "max_tokens": facts.context_length,
            "owned_by": "firn",
            "architecture": facts.architecture,
            "context_length": facts.context_length,
            "capabilities": list(facts.capabilities),
            **model.details,
            "state": model.shown_state.value,
            "bytes": model.footprint.nbytes,
            "pinned": spec.pinned,
            "expires_at": _expires_at(model, key_id),
            "aliases": list(catalogue.aliases_of(spec)),
            "default": default is not None and spec.name == default.name,
            "error": error.message if error else None,
        }

    def _read(self, model: Model) -> ModelFacts:
        name = model.spec.name
        if self._facts.get(name, ModelFacts()) == ModelFacts():  # it may have been downloaded since
            self._facts[name] = read_facts(folder_of(model.spec))
        return self._facts[name]


def _expires_at(model: Model, key_id: Namespace) -> str | None:
    """When this key's use lets it be unloaded, unless it is used earlier."""
    use, now = model.traffic.uses.get(key_id), time.monotonic()
    if model.expires_at == NEVER or use is None or not now <= use.expires_at < NEVER:
        return None
    at = time.time() + use.expires_at - now
    return datetime.fromtimestamp(at, tz=UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def add_models(app: FastAPI, listing: ModelListing, relay: Relay) -> None:
    async def models(request: Request) -> dict[str, Any]:
        return page(listing.listed(_key_id(request)), request.query_params, find=_name)

    def _name(name: str) -> str | None:
        try:
            return relay.find(name).spec.name
        except ModelNotFound:
            return None

    def find(model_id: str | None) -> dict[str, Any]:
        if model_id is not None:
            return listing.shown(relay.find(model_id), NOBODY)
        listed = listing.listed(NOBODY)
        if not listed:
            raise ModelNotFound("", "none")
        return next((entry for entry in listed if entry["default"]), listed[0])

    async def model(request: Request, model_id: str) -> dict[str, Any]:
        return listing.shown(relay.find(model_id), _key_id(request))

    add_routes(app, models, model)
    add_agents(app, find)


def add_loading(
    app: FastAPI,
    fleet: Fleet,
    listing: ModelListing,
    relay: Relay,
    keys: Keys,
    allow_origins: tuple[str, ...],
) -> None:
    """POST /v1/models/{id}/load and /unload, which answer when the model is loaded or unloaded."""

    def check(request: Request) -> None:
        refuse_foreign_pages(request.scope, allow_origins)
        check_may_load(exchange_of(request.scope).caller, keys)

    async def load(request: Request, model_id: str) -> dict[str, Any]:
        check(request)
        model = relay.find(model_id)
        stay_s = await _keep_alive_s(request, relay)
        lease = fleet.try_enter(model)
        if lease is None:
            waiter = fleet.wait_for(model, _key_id(request))
            try:
                lease = await asyncio.wait_for(asyncio.shield(waiter.lease), relay.limits.wait_s)
            except TimeoutError:
                why = f"it took longer than {relay.limits.wait_s:g} s"
                raise fleet.not_ready(model, why) from None
            finally:
                if lease is None:
                    fleet.leave(model, waiter)
        lease.release(_key_id(request), keep_alive_s=stay_s)
        return listing.shown(model, _key_id(request))

    async def unload(request: Request, model_id: str) -> dict[str, Any]:
        check(request)
        model = relay.find(model_id)
        await relay.unload(model, exchange_of(request.scope).caller)
        return listing.shown(model, _key_id(request))

    add = partial(app.add_api_route, methods=["POST"], responses=error_responses())
    add("/v1/models/{model_id:path}/load", load, summary="Load a model")
    add("/v1/models/{model_id:path}/unload", unload, summary="Unload a model")


def _key_id(request: Request) -> Namespace:
    return exchange_of(request.scope).caller.key_id


async def _keep_alive_s(request: Request, relay: Relay) -> float | None:
    """The body's keep_alive in seconds; None: not given."""
    headers = request.headers
    if headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers:
        return None
    read = await relay.body(request.scope, request.receive, lambda body: keep_alive_s(Fields(body)))
    return read[0]


def add_ollama(app: FastAPI, listing: ModelListing, relay: Relay) -> None:
    """Requests of Ollama's clients about models. They load no model."""
    for route in model_routes(
        listing.listed, lambda name, key_id: listing.shown(relay.find(name), key_id)
    ):

        async def endpoint(request: Request, route: JsonRoute = route) -> JSONResponse:
            body: Mapping[str, Any] = {}
            if route.schema is not None:
                body, _ = await relay.body(request.scope, request.receive, lambda given: given)
            return JSONResponse(await route.answer(RouteRequest(_key_id(request), body=body)))

        app.router.routes.append(Route(route.path, endpoint, methods=[route.method]))


# --- health --------------------------------------------------------------------------------


def add_probes(app: FastAPI, fleet: Fleet, relay: Relay, keys: Keys) -> None:
    async def health(request: Request) -> dict[str, Any]:
        default = fleet.catalogue.default
        shown: dict[str, Any] = {
            "status": "ok",
            "version": __version__,
            "model": default.name if default else None,
            "draining": relay.draining,
        }
        # A key must not learn how busy other keys keep the server.
        if exchange_of(request.scope).caller.operator or not keys.required:
            shown["models"] = {m.spec.name: m.shown_state.value for m in fleet.models.values()}
            shown["calls"] = relay.n_calls
            shown["waiting"] = sum(len(m.traffic.waiters) for m in fleet.models.values())
        return shown

    async def ready() -> JSONResponse:
        missing = [
            m.spec.name
            for m in fleet.models.values()
            if m.spec.pinned and m.state is not ModelState.LOADED
        ]
        why = "shutting down" if relay.draining else None
        if missing and why is None:
            why = f"not loaded yet: {', '.join(missing)}"
        return JSONResponse({"ready": why is None, "why": why}, status_code=503 if why else 200)

    not_now: dict[int | str, dict[str, Any]] = {503: {"description": "Not ready"}}
    for method in ("GET", "HEAD"):
        add = partial(app.add_api_route, methods=[method], include_in_schema=method == "GET")
        add("/health", health, summary="The process is alive")
        add("/ready", ready, summary="Pinned models are loaded", responses=not_now)


# --- metrics -------------------------------------------------------------------------------


class FrontMetrics:
    """Owner of the front's own counters."""

    def __init__(self, fleet: Fleet) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "firn_front_requests",
            "HTTP requests at the front, by route and status.",
            ["route", "status"],
            registry=self._registry,
        )
        self._registry.register(_FleetCollector(fleet))

    def count_request(self, key_id: Namespace, route: str, status: int, *, gone: bool) -> None:
        self._requests.labels(route, str(status)).inc()

    def render(self) -> str:
        return generate_latest(self._registry).decode()


class _FleetCollector(Collector):
    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterable[Metric]:
        def gauge(name: str, text: str) -> GaugeMetricFamily:
            return GaugeMetricFamily(f"firn_model_{name}", text, labels=["model"])

        loaded = gauge("loaded", "1 while the model is loaded.")
        nbytes = gauge("bytes", "Memory that the model needs while it is loaded.")
        active = gauge("active", "Requests that the model is answering.")
        waiting = gauge("waiting", "Requests waiting for the model to be loaded.")
        loads = CounterMetricFamily("firn_model_loads", "Times it was loaded.", labels=["model"])
        unloads = CounterMetricFamily(
            "firn_model_unloads", "Times it was unloaded, by reason.", labels=["model", "reason"]
        )
        for model in self._fleet.models.values():
            name = [model.spec.name]
            loaded.add_metric(name, float(model.state is ModelState.LOADED))
            nbytes.add_metric(name, model.footprint.nbytes)
            active.add_metric(name, model.traffic.n_active)
            waiting.add_metric(name, len(model.traffic.waiters))
            loads.add_metric(name, model.n_loads)
            for reason, n in model.n_unloads.items():
                unloads.add_metric([*name, reason], n)
        yield from (loaded, nbytes, active, waiting, loads, unloads)


def add_metrics(app: FastAPI, fleet: Fleet, metrics: FrontMetrics) -> None:
    @app.get("/metrics", summary="For Prometheus", response_class=Response)
    async def prometheus(request: Request) -> Response:
        answers = await merging.ask_loaded(fleet, request.scope, b"/metrics")
        text = merging.merge_metrics({a.model: a.body.decode() for a in answers if a.status == 200})
        if exchange_of(request.scope).caller.operator:
            text = metrics.render() + text
        return Response(text, media_type=CONTENT_TYPE_LATEST)


# --- the cache -----------------------------------------------------------------------------


def add_cache(app: FastAPI, fleet: Fleet, relay: Relay) -> None:
    def models_named(model: str | None) -> list[Model] | None:
        """None: all of them."""
        return None if model is None else [relay.find(model)]

    async def stats(request: Request, model: str | None = None) -> dict[str, Any]:
        answers = await merging.ask_loaded(
            fleet, request.scope, b"/v1/cache/stats", models_named(model)
        )
        return {"models": _by_model(answers)}

    async def clear(
        request: Request, namespace: str | None = None, model: str | None = None
    ) -> dict[str, Any]:
        """Clear the caches of all loaded models, or of one, which must be loaded. namespace: the
        caller's own."""
        check_may_change_cache(request.scope)
        if namespace is not None and namespace != exchange_of(request.scope).namespace:
            raise NotFound("This namespace is not yours, or does not exist.", param="namespace")
        models = models_named(model)
        if models and fleet.peek(models[0]) is None:
            raise fleet.not_ready(models[0], "its cache can be cleared only while it is loaded")
        target = "/v1/cache" if namespace is None else f"/v1/cache?namespace={namespace}"
        loaded = [m for m in models or fleet.models.values() if fleet.peek(m) is not None]
        answers = await merging.ask_loaded(fleet, request.scope, target.encode(), loaded)
        for each in loaded:  # an answer says that what was cleared stays cleared
            answer = next((a for a in answers if a.model == each.spec.name), None)
            if answer is None:
                raise fleet.not_ready(each, "its process did not say that its cache is cleared")
            if answer.status >= BadRequest.status:
                raise RemoteFault(answer.status, answer.body)
        return {"models": _by_model(answers)}

    add = partial(app.add_api_route, responses=error_responses())
    add("/v1/cache/stats", stats, methods=["GET"], summary="Statistics of the caches")
    add("/v1/cache", clear, methods=["DELETE"], summary="Clear the caches")


def _by_model(answers: Iterable[merging.ModelAnswer]) -> Mapping[str, Any]:
    return {answer.model: answer.json() for answer in answers}
