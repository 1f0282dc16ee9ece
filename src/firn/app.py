"""The composition root: builds the parts, wires them, runs them. The rules are in assembly/."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import uvicorn
import uvloop

from firn.api.calls import warm
from firn.api.calls.event_router import EventRouter
from firn.api.http.connections import http_config
from firn.api.server import create_app
from firn.api.services import Services
from firn.assembly import speculation
from firn.assembly.cache import FLUSH_S, check_settings
from firn.assembly.extras import Extra, find_encoder, needs_draft_model, open_extras
from firn.assembly.memory import MemoryWatch
from firn.assembly.model import ServerSpec, find_folder, served_name, with_model_defaults
from firn.assembly.parts import ServerParts, build_parts, watch_engine
from firn.assembly.services import build_services, keys_of
from firn.assembly.sharding import ONE_PROCESS, Sharding
from firn.assembly.text import load_text
from firn.config import Config
from firn.core.errors import EngineDead, ShuttingDown
from firn.core.fair_pool import FairPool
from firn.core.values import GenerateRequest
from firn.engine import Engine
from firn.host.awake import Awake
from firn.host.mac import put_first
from firn.host.machine import raise_descriptor_limit
from firn.host.shutdown import (
    end_at_next_signal,
    exit_or_return,
    kill_after,
)
from firn.listener import Uvicorn, bind, connections, listen
from firn.logs import configure as configure_logs
from firn.models.load import loader
from firn.welcome import announce

log = logging.getLogger("firn")

N_TOKENIZER_THREADS = 3
"""One of them is always left to other keys."""
SWITCH_S = 0.001
"""How long a thread that runs Python code may keep others waiting (Python's default is 5 ms)."""
DRAIN_S = 20.0
"""How long running requests may continue when the server stops, before they are cut off."""
STOP_S = 10.0
LEAVE_S = DRAIN_S + FLUSH_S + STOP_S + 5.0
"""A process that was told to stop is killed after this time."""


def serve(config: Config, *, sharding: Sharding = ONE_PROCESS) -> int:
    """Run the server until it is told to stop. Returns the process's exit code. Raises SetupError."""
    begin_process(config)
    sock = bind(config.server.host, config.server.port)
    prompts = warm_prompts(config)
    server = build(config, sharding=sharding)
    server.own_process()
    try:
        code = uvloop.run(_run(server, sock, prompts, config))
    finally:
        end_at_next_signal()
        server.close()
    return exit_or_return(code)


def begin_process(config: Config) -> None:
    """What a process that serves a model needs before it does anything else."""
    configure_logs(config.log.level)
    raise_descriptor_limit()


def warm_prompts(config: Config) -> list[GenerateRequest]:
    path = config.cache.warm_prompts
    return [] if path is None else warm.read(path, config.sampling.defaults())


@dataclass(eq=False)
class Server:
    """Everything that runs. Owner: `serve`, for as long as the process runs."""

    services: Services
    engine: Engine[ServerParts]
    event_router: EventRouter
    pool: FairPool
    died: list[str]
    memory: MemoryWatch | None = None
    awake: Awake = field(default_factory=Awake)
    extras: Sequence[Extra] = ()
    sharding: Sharding = ONE_PROCESS

    def own_process(self) -> None:
        """The process runs only this server: its engine must not wait long for other threads."""
        sys.setswitchinterval(SWITCH_S)
        self.engine.call(_own_thread)

    def lose_rank(self) -> None:
        """Fail all requests: the engine may hang in a collective that the lost rank has left."""
        self.event_router.drain()
        self.event_router.fail_all(EngineDead())
        self.died.append("rank")

    def close(self) -> None:
        for extra in self.extras:
            extra.close()
        self.awake.close()
        if self.memory is not None:
            self.memory.stop()
        self.engine.stop(timeout_s=FLUSH_S + STOP_S)
        self.sharding.end()
        self.pool.close()


def _own_thread(parts: ServerParts) -> None:
    """On the engine's thread."""
    parts.own_process()
    put_first()


def check(config: Config) -> None:
    """Find out whether `build` could load the model, without reading its weights. Raises SetupError."""
    extras = open_extras(config)
    _check_settings(config, extras)
    folder = find_folder(config.model)
    text = load_text(with_model_defaults(config, folder), folder, with_pictures=True)
    if find_encoder(extras, folder) is None:
        loader.check(
            folder,
            adapter=config.model.adapter,
            trust_remote_code=config.model.trust_remote_code,
            vision=text.processor is not None,
        )


def _check_settings(config: Config, extras: Sequence[Extra]) -> None:
    check_settings(config.cache)
    speculation.check_settings(config, is_needed=needs_draft_model(extras))
    for extra in extras:
        extra.check()


def build(config: Config, *, front: int | None = None, sharding: Sharding = ONE_PROCESS) -> Server:
    """Load the model and wire everything to it. Raises SetupError.

    front: the id of the process that divides memory among its models, if there is one.
    """
    extras = open_extras(config)
    _check_settings(config, extras)
    folder = find_folder(config.model)
    config = with_model_defaults(config, folder)
    for extra in extras:
        extra.begin()
    name, namespaces = served_name(config), keys_of(config).namespaces
    text = load_text(config, folder, with_pictures=not sharding.is_shared)
    spec = ServerSpec(config, folder, name, namespaces, text.processor, front, sharding)
    event_router = EventRouter()
    died: list[str] = []
    engine: Engine[ServerParts] = Engine(
        lambda: build_parts(spec, lambda: engine.wake(), extras=extras),
        event_router.publish,
        on_death=lambda: died.append("engine"),
    )
    log.info("loading %s", config.model.path)
    model = engine.start()
    if model.unbatchable_why:
        log.warning("%s is served without batching: %s", name, model.unbatchable_why)
    pool = FairPool(N_TOKENIZER_THREADS, name="firn-tokenize")
    services = build_services(
        spec,
        text,
        engine,
        event_router=event_router,
        pool=pool,
        extras=extras,
    )
    memory = watch_engine(engine, front=front, is_sharded=sharding.is_shared)
    return Server(
        services, engine, event_router, pool, died, memory, extras=extras, sharding=sharding
    )


# --- running -------------------------------------------------------------------------------


async def _run(
    server: Server, sock: socket.socket, prompts: Sequence[GenerateRequest], config: Config
) -> int:
    web = Uvicorn(
        http_config(
            create_app(server.services),
            connections(),
            lifespan="off",
            timeout_graceful_shutdown=int(DRAIN_S) + 2,
        )
    )
    loop = asyncio.get_running_loop()

    def begin_stop() -> None:
        log.info("stopping; running requests have %.0f s to finish", DRAIN_S)
        kill_after(LEAVE_S)
        server.event_router.drain()
        loop.call_later(DRAIN_S, server.event_router.fail_all, ShuttingDown())

    stop = web.stop_at_signals(begin_stop)
    server.sharding.watch(
        lost=lambda: loop.call_soon_threadsafe(server.lose_rank),
        asked=lambda: loop.call_soon_threadsafe(stop),
    )
    watching = asyncio.create_task(watch(server, web))
    await warm.compute(server.services, prompts)
    if not web.should_exit:  # it may have been told to stop meanwhile
        listen(sock)
        announce(server.engine.model.name, sock, config)
        await web.serve(sockets=[sock])
    watching.cancel()
    return 1 if server.died else 0


async def watch(server: Server, web: uvicorn.Server) -> None:
    """If the engine dies, end the process, so that a supervisor starts a new one. Until then, keep the
    machine awake while requests are running."""
    while not server.died:
        await asyncio.sleep(0.2)
        server.awake.note(busy=server.event_router.n_calls > 0)
    log.critical("the engine has died: exiting, so that a supervisor can start a new process")
    web.force_exit = web.should_exit = True
