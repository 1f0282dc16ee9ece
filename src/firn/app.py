"""The composition root: builds the parts, wires them, runs them. No logic of its own."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import uvicorn
import uvloop

from firn import __version__
from firn.api import warm
from firn.api.auth import Keys
from firn.api.cache_metrics import CacheMetrics, MemoryMetrics
from firn.api.connections import http_config
from firn.api.event_router import EventRouter
from firn.api.hosts import Hosts, machine_names
from firn.api.quotas import KeyLimits, Quotas
from firn.api.server import create_app
from firn.api.services import ApiLimits, Gather, Services
from firn.api.speculation_metrics import SpeculationMetrics
from firn.assembly import embeddings, sparse, speculation
from firn.assembly.cache import FLUSH_S
from firn.assembly.follower import follow, join_ranks
from firn.assembly.memory import MemoryWatch, Planned
from firn.assembly.model import ServerSpec, find_folder
from firn.assembly.parts import ServerParts, build_parts
from firn.cache.admin import CacheAdmin, health, snapshot
from firn.config import Config, default_cache_dir, of_model, with_model
from firn.core.errors import EngineDead, SetupError, ShuttingDown
from firn.core.memory_plan import MIB
from firn.core.ports import Pictures, Tokenizer
from firn.core.values import GenerateRequest, ModelInfo
from firn.engine import Engine
from firn.host.awake import Awake
from firn.host.machine import raise_descriptor_limit
from firn.host.shutdown import leave, no_later_than
from firn.listener import Uvicorn, address, bind, connections
from firn.logs import configure as configure_logs
from firn.media.documents import Documents
from firn.models import device as devices
from firn.models import loader
from firn.models.grammar import Compiler
from firn.models.processor import VisionProcessor
from firn.models.recognise import score_of
from firn.ranks.leader import Leader
from firn.ranks.leading import Leading
from firn.ranks.team import Team, end_start, options_digest
from firn.text import rerank
from firn.text.formats import detect_format
from firn.text.native import NativeParser
from firn.text.prompt import PromptMaker
from firn.text.template import Template
from firn.traces.record import Recorder, open_trace, user_salt

log = logging.getLogger("firn")

N_TOKENIZER_THREADS = 2
SWITCH_S = 0.001
"""How long a thread that computes in Python keeps another one waiting (Python's default: 5 ms)."""
DRAIN_S = 20.0
"""How long a stopping server lets running requests go on before it cuts them."""
STOP_S = 10.0
LOOK_S = 60.0
"""How long a look at the memory waits for the engine."""
LEAVE_S = DRAIN_S + FLUSH_S + STOP_S + 5.0
"""When a process that was told to stop is ended, if it has not ended by itself."""


def serve(config: Config) -> int:
    """Run the server until it is told to stop. Returns the process's exit code."""
    configure_logs(config.log.level)
    raise_descriptor_limit()
    team = None
    if config.model.tensor_parallel:
        config, team = join_ranks(config)
        if team.follower is not None:
            return leave(follow(config, team))
    sock = bind(config.server.host, config.server.port)
    prompts = warm_prompts(config)
    try:
        server = build(config, team=team)
    except SetupError as e:
        if team is not None:
            end_start(e)
        raise
    server.own_process()
    try:
        code = uvloop.run(_run(server, sock, prompts))
    finally:
        server.close()
    return leave(code)


def warm_prompts(config: Config) -> list[GenerateRequest]:
    path = config.cache.warm_prompts
    return [] if path is None else warm.read(path, config.sampling.defaults())


@dataclass(eq=False)
class Server:
    """Everything that runs. Owner: `serve`, for as long as the process lives."""

    services: Services
    engine: Engine[ServerParts]
    event_router: EventRouter
    pool: ThreadPoolExecutor
    died: list[str]
    memory: MemoryWatch | None = None
    awake: Awake = field(default_factory=Awake)
    recorder: Recorder | None = None
    ranks: Leader | None = None
    """The others, where the model is shared out."""

    def own_process(self) -> None:
        """This server is all that the process is for, and its engine what must not wait."""
        sys.setswitchinterval(SWITCH_S)
        self.engine.call(lambda parts: parts.own_process())

    def lose_rank(self) -> None:
        """The engine may hang in what the lost one has no part in any more: clients are told here."""
        self.event_router.drain()
        self.event_router.fail_all(EngineDead())
        self.died.append("rank")

    def close(self) -> None:
        if self.recorder is not None:
            self.recorder.close()
        self.awake.close()
        if self.memory is not None:
            self.memory.stop()
        self.engine.stop(timeout_s=FLUSH_S + STOP_S)
        if self.ranks is not None:
            self.ranks.end()
        self.pool.shutdown(wait=False, cancel_futures=True)  # whatever its threads are at


def build(config: Config, *, front: int | None = None, team: Team | None = None) -> Server:
    """Load the model and wire everything to it. Raises SetupError.

    front: the process that shares memory out among its models, where there is one. team: the ranks that
    share the model; this one speaks for all.
    """
    leading = None
    if team is not None and team.leader is not None:
        leading = Leading(team, team.leader, options=options_digest(config))
    folder = find_folder(config.model)
    config = _heed_model(config, folder)
    trace = config.log.record_trace
    trace_fd = None if trace is None else open_trace(trace)
    name = config.server.served_model_name or config.model.path.rstrip("/").split("/")[-1]
    trust = config.model.trust_remote_code
    tokenizer = loader.load_tokenizer(folder, trust_remote_code=trust)
    template = None if tokenizer.chat_template is None else Template.read(tokenizer)
    found = tokenizer.tool_parser
    # Before the engine starts: an unknown parser must not leave a thread behind.
    reply_format = detect_format(
        tokenizer,
        tool_override=config.model.tool_call_parser,
        reasoning_override=config.model.reasoning_parser,
        native=NativeParser(*found) if found else None,
        takes_tools=template is None or template.rules.tools,
    )
    processor = None
    if not config.model.text_only and leading is None:
        processor = loader.load_processor(folder, tokenizer, trust_remote_code=trust)
    event_router = EventRouter()
    died: list[str] = []
    spec = ServerSpec(config, folder, name, _keys(config).namespaces, processor, front, leading)
    engine: Engine[ServerParts] = Engine(
        lambda: build_parts(spec, lambda: engine.wake()),
        event_router.publish,
        on_death=lambda: died.append("engine"),
    )
    log.info("loading %s", config.model.path)
    model = engine.start()
    if model.unbatchable_why:
        log.warning("%s is served row by row: %s", name, model.unbatchable_why)
    pool = ThreadPoolExecutor(N_TOKENIZER_THREADS, thread_name_prefix="firn-tokenize")
    recorder = None if trace_fd is None else _recorder(config, engine, trace_fd)
    grammars = Compiler(tokenizer, vocab_size=model.vocab_size)
    pool.submit(grammars.prepare)
    services = Services(
        engine=engine,
        tokenizer=tokenizer,
        prompts=PromptMaker(
            tokenizer,
            context_length=model.context_length,
            n_ids=model.n_ids,
            pictures=_pictures(config, model, processor),
            tool_format=reply_format.tool,
            template=template,
        ),
        reply_format=reply_format,
        event_router=event_router,
        pool=pool,
        limits=ApiLimits(
            max_tokens=config.engine.max_tokens,
            max_request_tokens=config.engine.max_request_tokens or None,
            timeout_s=config.server.timeout or None,
            requests_per_minute=config.server.rate_limit or None,
            max_rows=config.engine.max_concurrency,
        ),
        defaults=config.sampling.defaults(),
        sparse=sparse.rules(config),
        keys=_keys(config),
        hosts=Hosts((*config.server.allowed_hosts, *machine_names(config.server.host))),
        quotas=_quotas(config),
        allow_origins=config.server.allow_origins,
        model_aliases=frozenset({config.model.path}),
        embedder=embeddings.for_any_thread(
            engine.parts.embedder, lambda f: engine.call(lambda parts: f())
        ),
        reranker=_reranker(folder, name, tokenizer) if model.generates else None,
        fetch_pictures=_fetcher(config) if model.vision else None,
        read_documents=Documents().gather,
        compile_grammar=grammars.compile,
        softener=grammars.softener,
        cache_admin=CacheAdmin(
            lambda f: engine.call(lambda parts: f(parts.tree, parts.budget.view())),
            pin_cap_nbytes=config.cache.cache_pin_max_mb * MIB,
        ),
        recorder=recorder,
        dashboard=not config.page.no_dashboard,
        show_text=config.page.show_text,
        allocated=devices.allocated_nbytes,
        health_details=lambda: {
            "cache": health(engine.parts.tree),
            "speculation": speculation.view(engine.parts.speculation),
            "ranks": 1 if team is None else team.group.size,
        },
        extra_collectors=(
            CacheMetrics(lambda: snapshot(engine.parts.tree)),
            MemoryMetrics(devices.allocated_nbytes),
            SpeculationMetrics(lambda: speculation.view(engine.parts.speculation)),
        ),
    )
    planned = engine.parts.planned
    watch = _watch(engine, planned, front, fixed=team is not None) if planned else None
    ranks = leading.leader if leading else None
    return Server(services, engine, event_router, pool, died, watch, recorder=recorder, ranks=ranks)


def _watch(
    engine: Engine[ServerParts], planned: Planned, front: int | None, *, fixed: bool
) -> MemoryWatch:
    """fixed: the capacity is what all ranks have agreed on."""
    device = devices.device()
    fixed |= front is not None

    def set_capacity(nbytes: int) -> None:
        engine.call(lambda parts: parts.set_capacity(nbytes))

    watch = MemoryWatch(
        planned,
        look=lambda: devices.look(device),
        used_nbytes=devices.used_nbytes,
        held_nbytes=lambda: engine.call(lambda parts: parts.budget.held_nbytes).result(LOOK_S),
        capacity_nbytes=lambda: engine.parts.budget.capacity_nbytes,
        # Whether a CUDA driver says anew what is free is not known: the first look stands.
        set_capacity=None if fixed or device.kind == "cuda" else set_capacity,
        group=front,
    )
    watch.start()
    return watch


def _recorder(config: Config, engine: Engine[ServerParts], trace_fd: int) -> Recorder:
    log.info("recording a trace: %s", config.log.record_trace)
    return Recorder(
        trace_fd,
        model=engine.model.name,
        block=config.cache.cache_block_tokens,
        token_nbytes=engine.parts.budget.cost.per_token_nbytes,
        salt=user_salt(default_cache_dir()),
    )


def _keys(config: Config) -> Keys:
    server = config.server
    return Keys(server.api_keys, admin=server.admin_keys, share=config.cache.share_cache)


def _quotas(config: Config) -> Quotas:
    server = config.server
    limits = KeyLimits(
        concurrency=server.key_max_concurrency,
        queue_share=server.key_queue_share,
        tokens_per_minute=server.key_tokens_per_minute,
    )
    return Quotas(limits, max_queue=config.engine.max_queue)


def _heed_model(config: Config, folder: Path) -> Config:
    found = of_model(folder)
    for line in found.warnings:
        log.warning("%s", line)
    return with_model(config, found)


def _pictures(
    config: Config, model: ModelInfo, processor: VisionProcessor | None
) -> Pictures | None:
    if processor is None or not model.vision:
        return None
    from firn.media.pictures import ImageLimits
    from firn.media.pictures import Pictures as Album

    wanted = config.images
    limits = ImageLimits(
        nbytes=wanted.max_image_mb * MIB, pixels=int(wanted.max_image_megapixels * 1e6)
    )
    return Album(processor, whole=model.whole_pictures, limits=limits)


def _fetcher(config: Config) -> Gather | None:
    wanted = config.images
    if not wanted.allow_image_urls:
        return None
    from firn.media.fetch import Fetcher, FetchLimits

    limits = FetchLimits(
        nbytes=wanted.max_image_mb * MIB,
        timeout_s=wanted.image_fetch_timeout_s,
        plain_http=wanted.allow_plain_http_images,
    )
    return Fetcher(limits).gather


def _reranker(folder: Path, name: str, tokenizer: Tokenizer) -> rerank.Reranker | None:
    found = rerank.detect_reranker(f"{name} {folder.name}", tokenizer, score_of(folder))
    if found is not None:
        log.info("%s reranks documents (/v1/rerank)", name)
    return found


# --- running -------------------------------------------------------------------------------


async def _run(server: Server, sock: socket.socket, prompts: Sequence[GenerateRequest]) -> int:
    web = Uvicorn(
        http_config(
            create_app(server.services),
            connections(),
            lifespan="off",
            timeout_graceful_shutdown=int(DRAIN_S) + 2,
        )
    )
    loop = asyncio.get_running_loop()

    def stop() -> None:
        if web.should_exit:
            os._exit(130)  # asked twice: at once, whatever is lost
        log.info("stopping; running requests have %.0f s to end", DRAIN_S)
        no_later_than(LEAVE_S)
        server.event_router.drain()
        loop.call_later(DRAIN_S, server.event_router.fail_all, ShuttingDown())
        web.should_exit = True

    def stop_once() -> None:
        if not web.should_exit:
            stop()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    if server.ranks is not None:
        server.ranks.watch(
            lost=lambda: loop.call_soon_threadsafe(server.lose_rank),
            asked=lambda: loop.call_soon_threadsafe(stop_once),
        )
    watching = asyncio.create_task(watch(server, web))
    await warm.compute(server.services, prompts)
    log.info("firn %s serves %s at %s/v1", __version__, server.engine.model.name, address(sock))
    await web.serve(sockets=[sock])
    watching.cancel()
    return 1 if server.died else 0


async def watch(server: Server, web: uvicorn.Server) -> None:
    """An engine that died takes the process down, so that a supervisor starts a new one.

    Meanwhile, the machine stays awake while there are requests.
    """
    while not server.died:
        await asyncio.sleep(0.2)
        server.awake.note(busy=server.event_router.n_calls > 0)
    log.critical("the engine is gone: exiting")
    web.force_exit = web.should_exit = True
