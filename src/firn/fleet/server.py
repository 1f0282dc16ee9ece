"""The front process: builds its parts and runs them. It loads neither MLX nor a model."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import socket
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import uvloop
from fastapi import FastAPI
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from firn.api.calls.quotas import KeyLimits, Quotas
from firn.api.dialects import discover
from firn.api.http.auth import Keys
from firn.api.http.body_reader import BodyReader
from firn.api.http.connections import http_config
from firn.api.http.errors import ErrorShapes
from firn.api.http.hosts import Hosts, machine_names
from firn.api.http.layers import add_layers
from firn.api.observe.dashboard import add_page
from firn.api.routes.openapi import describe
from firn.api.routes.rerank import PATHS as RERANK_PATHS
from firn.api.server import add_route_errors, new_app
from firn.api.services import ApiLimits
from firn.config import Config
from firn.core.errors import SetupError
from firn.core.fair_pool import FairPool
from firn.core.units import GIB
from firn.fleet import routes
from firn.fleet.activity import add_activity
from firn.fleet.catalogue import ModelCatalogue
from firn.fleet.downloads import Downloads
from firn.fleet.files import check, folder_of
from firn.fleet.fleet import Fleet
from firn.fleet.placement import PlacementRules
from firn.fleet.process import Launch, launch
from firn.fleet.relay import Relay, WaitLimits
from firn.fleet.router import add_router, add_tree
from firn.host.machine import raise_descriptor_limit
from firn.host.shutdown import exit_or_return, kill_after
from firn.listener import Uvicorn, bind, connections, listen
from firn.logs import configure as configure_logs
from firn.welcome import announce

log = logging.getLogger("firn.fleet")

DRAIN_S = 20.0
"""How long running requests may continue when the server stops, before they are cut off."""
LEAVE_S = 75.0
"""The front is killed if it has not ended by then; models' processes end earlier."""
SOCKET_PATH_NBYTES = 103
"""The longest path of a Unix socket on macOS; on Linux it is 107."""
SOCKET_NAME_NBYTES = len("/firn-12345678/99999.sock")
N_DECODERS = 3
"""One of them is always left to other keys."""
BY_BODY = (
    "/v1/messages/count_tokens", "/v1/responses/input_tokens", "/v1/responses/compact",
    "/v1/embeddings", "/v1/tokenize", "/v1/detokenize", "/v1/cache/probe", "/v1/cache/pin",
    "/v1/cache/unpin", "/api/embed", "/api/embeddings", *RERANK_PATHS,
)  # fmt: skip
"""POSTs whose body names the model, other than those of the dialects."""
BY_ID = (
    ("/v1/responses/{response_id}", ("GET", "DELETE")),
    ("/v1/responses/{response_id}/input_items", ("GET",)),
    ("/v1/responses/{response_id}/cancel", ("POST",)),
)
"""Requests for the model that made a stored response."""


def serve(config: Config) -> int:
    """Run the front until it is told to stop. Returns the process's exit code."""
    configure_logs(config.log.level)
    raise_descriptor_limit()
    catalogue = ModelCatalogue(config)
    for spec in catalogue:
        check(spec)
    sock = bind(config.server.host, config.server.port)
    with _private_folder() as folder:
        return exit_or_return(uvloop.run(_run(config, catalogue, folder, sock)))


@contextlib.contextmanager
def _private_folder() -> Iterator[Path]:
    """A folder for the sockets that only this user can open (0700)."""
    folder = Path(tempfile.mkdtemp(prefix="firn-", dir=socket_base(os.environ)))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def socket_base(environ: Mapping[str, str]) -> str:
    """A writable folder in which the paths of sockets stay within the system's limit."""
    places = (environ.get("XDG_RUNTIME_DIR", ""), tempfile.gettempdir(), "/tmp")
    for place in places:
        fits = len(os.fsencode(place)) + SOCKET_NAME_NBYTES <= SOCKET_PATH_NBYTES
        if place and fits and os.path.isdir(place) and os.access(place, os.W_OK):
            return place
    raise SetupError(
        f"No socket can be created in any of {', '.join(filter(None, places))}: set TMPDIR to a "
        "writable folder with a short path."
    )


@dataclass(frozen=True, slots=True)
class FrontParts:
    """The parts of the front. pool: decodes large bodies."""

    fleet: Fleet
    relay: Relay
    app: FastAPI
    pool: FairPool


def build(
    config: Config,
    catalogue: ModelCatalogue,
    folder: Path,
    *,
    start: Launch = launch,
    rules: PlacementRules | None = None,
    waits: WaitLimits | None = None,
) -> FrontParts:
    """On the asyncio thread. start: how to start a model's process."""
    server = config.server
    quotas = _quotas(config)
    fleet = Fleet(
        catalogue,
        start,
        folder,
        memory_nbytes=int(config.fleet.model_memory_gb * GIB),
        max_waiting=config.fleet.model_queue,
        rules=rules,
        folder_of=folder_of,
        charge=quotas.charge,
    )
    _check_pinned(fleet)
    dialects = discover(config.sampling.defaults())
    bodies = _body_reader(ApiLimits())
    pool = FairPool(N_DECODERS, name="firn-decode")
    waits = waits or WaitLimits(wait_s=config.fleet.model_wait_s)
    keys = Keys(server.api_keys, admin=server.admin_keys, share=config.cache.share_cache)
    relay = Relay(fleet, dialects, bodies, pool, keys=keys, quotas=quotas, limits=waits)
    shapes = ErrorShapes(dialects)
    app = new_app()
    metrics = routes.FrontMetrics(fleet)
    for path in (*(dialect.path for dialect in dialects), *BY_BODY):
        app.router.routes.append(_RelayRoute(path, relay.by_body, ("POST",)))
    for path, methods in BY_ID:
        app.router.routes.append(_RelayRoute(path, relay.by_id, methods))
    listing = routes.ModelListing(fleet)
    routes.add_loading(app, fleet, listing, relay, keys, server.allow_origins)
    routes.add_models(app, listing, relay)
    routes.add_ollama(app, listing, relay)
    Downloads(fleet, relay, config).add_to(app)
    add_page(app, shown=not config.page.no_dashboard)
    routes.add_probes(app, fleet, relay, keys)
    routes.add_metrics(app, fleet, metrics)
    routes.add_cache(app, fleet, relay)
    add_tree(app, fleet, relay)
    add_router(app, fleet, relay)
    add_activity(app, fleet, relay)
    add_route_errors(app)
    add_layers(
        app,
        shapes=shapes,
        metrics=metrics,
        bodies=bodies,
        keys=keys,
        hosts=Hosts((*server.allowed_hosts, *machine_names(server.host))),
        allow_origins=server.allow_origins,
        requests_per_minute=server.rate_limit,
    )
    describe(app, dialects, with_keys=keys.required)
    return FrontParts(fleet, relay, app, pool)


def _quotas(config: Config) -> Quotas:
    server = config.server
    return Quotas(
        KeyLimits(
            concurrency=server.key_max_concurrency,
            tokens_per_minute=server.key_tokens_per_minute,
        )
    )


def _body_reader(limits: ApiLimits) -> BodyReader:
    return BodyReader(limit_nbytes=limits.body_nbytes, total_nbytes=limits.bodies_nbytes)


def _check_pinned(fleet: Fleet) -> None:
    pinned = [m for m in fleet.models.values() if m.spec.pinned]
    need, budget = sum(m.footprint.nbytes for m in pinned), fleet.room.budget_nbytes
    if need > budget:
        names = ", ".join(m.spec.name for m in pinned)
        raise SetupError(
            f"the pinned models ({names}) need about {need / GIB:.1f} GiB together, but models may "
            f"use only {budget / GIB:.1f} GiB (--model-memory-gb)"
        )


class _RelayRoute(Route):
    """A route to an ASGI app, with exactly these methods.

    Starlette would add HEAD, and the relay would wait for the body that a reply to HEAD only
    announces.
    """

    def __init__(
        self,
        path: str,
        app: Callable[[Scope, Receive, Send], Awaitable[None]],
        methods: tuple[str, ...],
    ) -> None:
        super().__init__(path, _AsgiEndpoint(app))
        self.methods = set(methods)


class _AsgiEndpoint:
    """An ASGI app as an endpoint: Starlette would treat a plain function as a request handler."""

    def __init__(self, app: Callable[[Scope, Receive, Send], Awaitable[None]]) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, receive, send)


async def _run(config: Config, catalogue: ModelCatalogue, folder: Path, sock: socket.socket) -> int:
    listen(sock)
    parts = build(config, catalogue, folder)
    web = Uvicorn(
        http_config(
            parts.app, connections(), lifespan="off", timeout_graceful_shutdown=int(DRAIN_S) + 2
        )
    )
    loop = asyncio.get_running_loop()

    def begin_stop() -> None:
        log.info("stopping; running requests have %.0f s to finish", DRAIN_S)
        kill_after(LEAVE_S)
        parts.relay.draining = True
        parts.fleet.drain()
        loop.call_later(DRAIN_S, parts.fleet.abort_replies)

    web.stop_at_signals(begin_stop)  # a second one ends the process; the models' notice it and end
    running = asyncio.create_task(parts.fleet.run())
    names = ", ".join(spec.name for spec in catalogue)
    announce(names, sock, config)
    try:
        await web.serve(sockets=[sock])
    finally:
        await parts.fleet.close()
        running.cancel()
        parts.pool.close()
    return 0
