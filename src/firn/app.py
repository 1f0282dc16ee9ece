"""The composition root: builds the parts, wires them, runs them. No logic of its own."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import uvicorn

from firn import __version__
from firn.api import warm
from firn.api.auth import Keys
from firn.api.mailroom import Mailroom
from firn.api.server import create_app
from firn.api.services import Limits as ApiLimits
from firn.api.services import Services
from firn.cache.admin import CacheAdmin
from firn.cache.layout import Layout
from firn.cache.off import CacheOff
from firn.cache.prefix import CacheSettings, PrefixTree
from firn.config import Config
from firn.core.errors import SetupError, ShuttingDown, UnknownCacheLayer
from firn.core.ports import PrefixCache
from firn.core.values import GenerateRequest
from firn.engine.budget import Budget, RowCost
from firn.engine.engine import Engine, Limits, Parts
from firn.logs import configure as configure_logs
from firn.models import device as devices
from firn.models import loader
from firn.models.runner import Runner
from firn.models.selfcheck import CHUNKS_MATTER
from firn.text.formats import detect
from firn.text.native import NativeParser
from firn.text.prompt import PromptMaker

log = logging.getLogger("firn")

N_TOKENIZER_THREADS = 2
DRAIN_S = 20.0
"""How long a stopping server lets running requests go on before it cuts them."""
MIB, GIB = 1 << 20, 1 << 30
MIN_CAPACITY_NBYTES = 256 * MIB


def serve(config: Config) -> int:
    """Run the server until it is told to stop. Returns the process's exit code."""
    configure_logs(config.log.level)
    sock = _bind(config.server.host, config.server.port)
    prompts = warm.read(config.cache.warm_prompts) if config.cache.warm_prompts else []
    server = build(config)
    try:
        return asyncio.run(_run(server, sock, prompts))
    finally:
        server.close()


@dataclass(eq=False)
class Server:
    """Everything that runs. Owner: `serve`, for as long as the process lives."""

    services: Services
    engine: Engine
    mailroom: Mailroom
    pool: ThreadPoolExecutor
    died: list[str]

    def close(self) -> None:
        self.engine.stop()
        self.pool.shutdown(cancel_futures=True)


def build(config: Config) -> Server:
    """Load the model and wire everything to it. Raises SetupError."""
    folder = _model_folder(config.model.path)
    name = config.server.served_model_name or config.model.path.rstrip("/").split("/")[-1]
    trust = config.model.trust_remote_code
    tokenizer = loader.load_tokenizer(folder, trust_remote_code=trust)
    mailroom = Mailroom()
    died: list[str] = []
    engine = Engine(
        lambda: _build_parts(config, folder, name),
        mailroom.publish,
        on_death=lambda: died.append("engine"),
    )
    log.info("loading %s", config.model.path)
    model = engine.start()
    if model.unbatchable_why:
        log.warning("%s is served row by row: %s", name, model.unbatchable_why)
    found = tokenizer.tool_parser
    native = NativeParser(*found) if found else None
    pool = ThreadPoolExecutor(N_TOKENIZER_THREADS, thread_name_prefix="firn-tokenize")
    services = Services(
        engine=engine,
        tokenizer=tokenizer,
        prompts=PromptMaker(tokenizer, context_length=model.context_length),
        reply_format=detect(tokenizer, native=native),
        mailroom=mailroom,
        pool=pool,
        limits=ApiLimits(max_tokens=config.engine.max_tokens),
        keys=Keys(config.server.api_keys, share=config.cache.share_cache),
        model_aliases=frozenset({config.model.path}),
        cache_admin=CacheAdmin(
            lambda f: engine.call(lambda parts: f(parts.cache)),
            pin_cap_nbytes=config.cache.cache_pin_max_mb * MIB,
        ),
    )
    return Server(services, engine, mailroom, pool, died)


def _model_folder(name: str) -> Path:
    """Built-in models are folders of the package; everything else the loader resolves."""
    builtin = resources.files("firn.demo") / "models" / name
    if "/" not in name and isinstance(builtin, Path) and (builtin / "config.json").exists():
        return builtin
    return loader.resolve(name)


def _build_parts(config: Config, folder: Path, name: str) -> Parts:
    """On the engine thread, which owns every array from the start."""
    machine = devices.device()
    loaded = loader.load(
        folder,
        served_name=name,
        adapter=config.model.adapter,
        trust_remote_code=config.model.trust_remote_code,
    )
    info = loaded.info
    limits = Limits(
        max_rows=config.engine.max_concurrency,
        max_queue=config.engine.max_queue,
        prefill_chunk=config.engine.prefill_chunk or machine.prefill_chunk,
    )
    runner = Runner(
        loaded.model, info, make_layers=loaded.make_layers, max_rows=config.engine.max_concurrency
    )
    headroom = int(config.engine.scheduler_headroom_gb * GIB)
    capacity = machine.memory_nbytes - info.weights_nbytes - headroom
    cost = _row_cost(loaded)
    budget = Budget(cost, capacity_nbytes=max(capacity, MIN_CAPACITY_NBYTES))
    cache = _build_cache(config, loaded, machine, limits.prefill_chunk)
    return Parts(runner, cache, budget, limits)


def _row_cost(loaded: loader.LoadedModel) -> RowCost:
    try:
        return RowCost(*Layout.of(loaded.probe).row_cost(loaded.probe))
    except UnknownCacheLayer:
        nbytes = sum(layer.nbytes for layer in loaded.probe)
        return RowCost(nbytes // 256, nbytes)


def _build_cache(
    config: Config, loaded: loader.LoadedModel, machine: devices.Device, chunk: int
) -> PrefixCache:
    wanted = config.cache
    if wanted.disable_prefix_cache:
        log.info("the prefix cache is off")
        return CacheOff()
    bits = wanted.kv_cache_quantization_bits if wanted.kv_cache_quantization else 0
    if bits and wanted.reuse == "exact":
        raise SetupError("--kv-cache-quantization changes what is restored: not with --reuse exact")
    try:
        layout = Layout.of(
            loaded.probe, kv_bits=bits, kv_group_size=wanted.kv_cache_quantization_group_size
        )
    except UnknownCacheLayer as e:
        log.warning("%s is served without prefix reuse: %s", loaded.info.name, e)
        return CacheOff(str(e))
    limit = wanted.cache_memory_mb * MIB or devices.free_nbytes(machine) // 5
    exact = wanted.reuse == "exact"
    if loaded.info.architecture in CHUNKS_MATTER:
        why = CHUNKS_MATTER[loaded.info.architecture]
        log.warning("%s is reused on prefill chunks only: %s", loaded.info.name, why)
        exact = True
    settings = CacheSettings(
        limit_nbytes=limit,
        block=wanted.cache_block_tokens,
        exact_chunk=chunk if exact else 0,
    )
    log.info("prefix cache: %d MiB of memory, blocks of %d tokens", limit // MIB, settings.block)
    return PrefixTree(
        layout, settings, fingerprint=loaded.info.fingerprint, dtype=loaded.info.dtype
    )


# --- running -------------------------------------------------------------------------------


def _bind(host: str, port: int) -> socket.socket:
    """Take the address before the model is loaded: an address in use is a matter of one line."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as e:
        sock.close()
        raise SetupError(f"cannot listen on {host} port {port}: {e.strerror or e}") from e
    return sock


class _Uvicorn(uvicorn.Server):
    """Signals are ours: uvicorn would raise them again after a clean stop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _run(server: Server, sock: socket.socket, prompts: Sequence[GenerateRequest]) -> int:
    app = create_app(server.services)
    web = _Uvicorn(
        uvicorn.Config(
            app,
            log_config=None,
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=int(DRAIN_S) + 2,
        )
    )
    loop = asyncio.get_running_loop()

    def stop() -> None:
        if web.should_exit:
            os._exit(130)  # asked twice: at once, whatever is lost
        log.info("stopping; running requests have %.0f s to end", DRAIN_S)
        server.mailroom.drain()
        loop.call_later(DRAIN_S, server.mailroom.fail_all, ShuttingDown())
        web.should_exit = True

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    watch = asyncio.create_task(_watch(server, web))
    await warm.compute(server.services, prompts)
    host, port = sock.getsockname()[:2]
    shown = f"[{host}]" if ":" in host else host
    model = server.engine.model
    log.info("firn %s serves %s at http://%s:%d/v1", __version__, model.name, shown, port)
    await web.serve(sockets=[sock])
    watch.cancel()
    return 1 if server.died else 0


async def _watch(server: Server, web: uvicorn.Server) -> None:
    """An engine that died takes the process down, so that a supervisor starts a new one."""
    while not server.died:
        await asyncio.sleep(0.2)
    log.critical("the engine is gone: exiting")
    web.force_exit = web.should_exit = True
