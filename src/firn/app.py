"""The composition root: builds the parts, wires them, runs them. No logic of its own."""

from __future__ import annotations

import asyncio
import logging
import os
import platform
import re
import signal
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path

import uvicorn
import uvloop

from firn import __version__, named
from firn.api import warm
from firn.api.auth import Keys
from firn.api.cache_metrics import CacheMetrics, MemoryMetrics
from firn.api.connections import http_config
from firn.api.hosts import Hosts, machine_names
from firn.api.mailroom import Mailroom
from firn.api.quotas import KeyLimits, Quotas
from firn.api.server import create_app
from firn.api.services import Gather, Services
from firn.api.services import Limits as ApiLimits
from firn.awake import Awake
from firn.backups import leave_out
from firn.cache.admin import CacheAdmin, health, snapshot
from firn.cache.inventory import ModelNote, note_model
from firn.cache.io import IoThreads, TierIo
from firn.cache.layout import Layout
from firn.cache.off import CacheOff
from firn.cache.prefix import CacheSettings, PrefixTree
from firn.cache.seal import load_seal
from firn.cache.tiers import TierOptions, discover
from firn.config import CacheConfig, Config, default_cache_dir, with_model
from firn.core.errors import SetupError, ShuttingDown, UnknownCacheLayer
from firn.core.memory_plan import MIN_CAPACITY_NBYTES, ModelMemory
from firn.core.ports import Pictures, PrefixCache, Tokenizer
from firn.core.values import GenerateRequest, ModelInfo
from firn.defaults import of_model
from firn.engine.budget import Budget, RowCost
from firn.engine.engine import Engine
from firn.engine.loop import Limits, Parts
from firn.leaving import leave, no_later_than
from firn.listening import Uvicorn, address, bind, connections
from firn.logs import configure as configure_logs
from firn.machine import raise_descriptor_limit
from firn.media.documents import Documents
from firn.memory import MemoryWatch, Planned, beside_others, plan_server
from firn.models import cpu, embedder, loader
from firn.models import device as devices
from firn.models.batch import BUFFER_TOKENS
from firn.models.cpu.blas import Blas
from firn.models.cpu.dtype import Choice as CpuDtype
from firn.models.cpu.threads import Threads
from firn.models.grammar import Compiler
from firn.models.hub import HubRules
from firn.models.processor import VisionProcessor
from firn.models.recognise import score_of
from firn.models.runner import Runner
from firn.models.selfcheck import CHUNKS_MATTER
from firn.models.transient import transient_of
from firn.models.weight_memory import WeightMemory
from firn.text import rerank
from firn.text.formats import detect
from firn.text.native import NativeParser
from firn.text.prompt import PromptMaker
from firn.text.template import Template

log = logging.getLogger("firn")

N_TOKENIZER_THREADS = 2
DRAIN_S = 20.0
"""How long a stopping server lets running requests go on before it cuts them."""
FLUSH_S = 15.0
"""How long a stopping server writes what is still in memory only."""
STOP_S = 10.0
LOOK_S = 60.0
"""How long a look at the memory waits for the engine."""
LEAVE_S = DRAIN_S + FLUSH_S + STOP_S + 5.0
"""When a process that was told to stop is ended, if it has not ended by itself."""
MIB, GIB = 1 << 20, 1 << 30


def serve(config: Config) -> int:
    """Run the server until it is told to stop. Returns the process's exit code."""
    configure_logs(config.log.level)
    raise_descriptor_limit()
    sock = bind(config.server.host, config.server.port)
    prompts = warm_prompts(config)
    server = build(config)
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
    engine: Engine
    mailroom: Mailroom
    pool: ThreadPoolExecutor
    died: list[str]
    memory: MemoryWatch | None = None
    awake: Awake = field(default_factory=Awake)

    def close(self) -> None:
        self.awake.close()
        if self.memory is not None:
            self.memory.stop()
        self.engine.stop(timeout_s=FLUSH_S + STOP_S)
        self.pool.shutdown(wait=False, cancel_futures=True)  # whatever its threads are at


def build(config: Config, *, front: int | None = None) -> Server:
    """Load the model and wire everything to it. Raises SetupError.

    front: the process that shares memory out among its models, where there is one.
    """
    folder = _model_folder(config)
    config = _heed_model(config, folder)
    name = config.server.served_model_name or config.model.path.rstrip("/").split("/")[-1]
    trust = config.model.trust_remote_code
    tokenizer = loader.load_tokenizer(folder, trust_remote_code=trust)
    template = None if tokenizer.chat_template is None else Template.read(tokenizer)
    found = tokenizer.tool_parser
    # Before the engine starts: an unknown parser must not leave a thread behind.
    reply_format = detect(
        tokenizer,
        tool_override=config.model.tool_call_parser,
        reasoning_override=config.model.reasoning_parser,
        native=NativeParser(*found) if found else None,
        takes_tools=template is None or template.rules.tools,
    )
    processor = None
    if not config.model.text_only:
        processor = loader.load_processor(folder, tokenizer, trust_remote_code=trust)
    mailroom = Mailroom()
    died: list[str] = []
    planned: list[Planned] = []
    engine = Engine(
        lambda: _build_parts(
            config, folder, name, processor, lambda: engine.wake(), front=front, planned=planned
        ),
        mailroom.publish,
        on_death=lambda: died.append("engine"),
    )
    log.info("loading %s", config.model.path)
    model = engine.start()
    if model.unbatchable_why:
        log.warning("%s is served row by row: %s", name, model.unbatchable_why)
    pool = ThreadPoolExecutor(N_TOKENIZER_THREADS, thread_name_prefix="firn-tokenize")
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
        mailroom=mailroom,
        pool=pool,
        limits=ApiLimits(
            max_tokens=config.engine.max_tokens,
            max_request_tokens=config.engine.max_request_tokens or None,
            timeout_s=config.server.timeout or None,
            requests_per_minute=config.server.rate_limit or None,
        ),
        defaults=config.sampling.defaults(),
        keys=_keys(config),
        hosts=Hosts((*config.server.allowed_hosts, *machine_names(config.server.host))),
        quotas=_quotas(config),
        allow_origins=config.server.allow_origins,
        model_aliases=frozenset({config.model.path}),
        embedder=_embedder_desk(engine),
        reranker=_reranker(folder, name, tokenizer) if model.generates else None,
        fetch_images=_fetcher(config) if model.vision else None,
        read_documents=Documents().gather,
        compile_grammar=grammars.compile,
        softener=grammars.softener,
        cache_admin=CacheAdmin(
            lambda f: engine.call(lambda parts: f(parts.cache, parts.budget.view())),
            pin_cap_nbytes=config.cache.cache_pin_max_mb * MIB,
        ),
        health_details=lambda: {"cache": health(engine.parts.cache)},
        extra_collectors=(
            CacheMetrics(lambda: snapshot(engine.parts.cache)),
            MemoryMetrics(devices.allocated_nbytes),
        ),
    )
    watch = _watch(engine, planned[0], front) if planned else None
    return Server(services, engine, mailroom, pool, died, watch)


def _watch(engine: Engine, planned: Planned, front: int | None) -> MemoryWatch:
    device = devices.device()

    def set_capacity(nbytes: int) -> None:
        engine.call(lambda parts: parts.set_capacity(nbytes))

    watch = MemoryWatch(
        planned,
        look=lambda: devices.look(device),
        used_nbytes=devices.used_nbytes,
        held_nbytes=lambda: engine.call(lambda parts: parts.budget.held_nbytes).result(LOOK_S),
        capacity_nbytes=lambda: engine.parts.budget.capacity_nbytes,
        # Whether a CUDA driver says anew what is free is not known: the first look stands.
        set_capacity=None if front is not None or device.kind == "cuda" else set_capacity,
        group=front,
    )
    watch.start()
    return watch


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
    return Album(processor, whole=model.whole_images, limits=limits)


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


def _embedder_desk(engine: Engine) -> embedder.EmbedderDesk | None:
    found = engine.parts.embedder
    if found is None:
        return None
    return embedder.EmbedderDesk(
        lambda f: engine.call(lambda parts: f(parts.embedder)),
        n_dims=found.n_dims,
        max_tokens=found.max_tokens,
    )


def _reranker(folder: Path, name: str, tokenizer: Tokenizer) -> rerank.Reranker | None:
    found = rerank.detect(f"{name} {folder.name}", tokenizer, score_of(folder))
    if found is not None:
        log.info("%s reranks documents (/v1/rerank)", name)
    return found


def _model_folder(config: Config) -> Path:
    wanted = config.model
    rules = HubRules(wanted.offline, wanted.download_timeout, wanted.download_retries)
    return named.resolve(wanted.path, rules)


def _build_parts(
    config: Config,
    folder: Path,
    name: str,
    processor: VisionProcessor | None,
    wake: Callable[[], None],
    *,
    front: int | None,
    planned: list[Planned],
) -> Parts:
    """On the engine thread, which owns every array from the start. `planned` gets the memory's plan."""
    machine = devices.device()
    before = beside_others(devices.look(machine), group=front)
    limits = Limits(
        max_rows=config.engine.max_concurrency,
        max_queue=config.engine.max_queue,
        prefill_chunk=config.engine.prefill_chunk or machine.prefill_chunk,
        largest_chunk=_largest_chunk(config, machine),
        max_step_s=config.engine.max_step_ms / 1000,
    )
    settings, recipe = loader.read_config(folder), _embedding_recipe(folder)
    exact = _wants_exact(config, str(settings["model_type"]), name)
    limits = replace(limits, aligned=exact)
    blas = _tune_cpu(config, exact=exact) if machine.kind == "cpu" else None
    cpu_dtype = _cpu_dtype(config, blas)
    if recipe is not None and embedder.needs_encoder(folder, settings):
        return _encoder_parts(folder, recipe, name, limits, cpu_dtype)
    loaded = loader.load(
        folder,
        served_name=name,
        adapter=config.model.adapter,
        trust_remote_code=config.model.trust_remote_code,
        picture=processor.example.inputs if processor else None,
        feature_nbytes=config.images.image_feature_cache_mb * MIB,
        memory=WeightMemory(default_cache_dir()),
        cpu_dtype=cpu_dtype,
        max_context=config.engine.max_context or None,
    )
    info, cost = loaded.info, _row_cost(loaded)
    needs = ModelMemory(
        info.weights_nbytes,
        cost.per_token_nbytes,
        cost.fixed_nbytes,
        transient_of(settings, device=machine.kind, dtype=info.dtype),
        info.context_length,
    )
    chunk = limits.prefill_chunk if exact else max(limits.largest_chunk, limits.prefill_chunk)
    planned.append(plan_server(config, before, needs, chunk=chunk, exact=exact))
    plan = planned[0].plan
    devices.set_limits(machine.kind, plan)
    threads = Threads(blas.library, loaded.model) if blas and blas.library and not exact else None
    runner = Runner(
        loaded.model,
        info,
        make_layers=loaded.make_layers,
        max_rows=config.engine.max_concurrency,
        inputs=loaded.inputs,
        threads=threads,
    )
    budget = Budget(
        cost,
        capacity_nbytes=plan.capacity_nbytes,
        transient=needs.transient,
        chunk_nbytes=plan.chunk_nbytes,
    )
    cache = _build_cache(
        config,
        loaded,
        planned[0].alone_nbytes,
        exact_chunk=limits.prefill_chunk if exact else 0,
        arithmetic=blas.identity if blas and exact else "",
    )
    if isinstance(cache, PrefixTree):
        io = IoThreads(max_write_nbytes=plan.write_queue_nbytes)
        _add_tiers(config, cache, info, io, device=machine.kind, wake=wake)
        cache.set_room(budget.free_nbytes())
    return Parts(runner, cache, budget, limits, embedder=_decoder_embedder(recipe, loaded))


def _largest_chunk(config: Config, machine: devices.Device) -> int:
    """A CPU has no watchdog, and large chunks gain nothing there: theirs vary only if a user asks."""
    if machine.kind == "cpu" and not config.engine.max_step_ms:
        return 0
    return config.engine.prefill_chunk or machine.largest_chunk


def _tune_cpu(config: Config, *, exact: bool) -> Blas:
    return cpu.tune(config.engine.blas, exact=exact, memo=default_cache_dir() / "blas.json")


def _cpu_dtype(config: Config, blas: Blas | None) -> CpuDtype:
    """Without a fast BLAS, float32 is as slow as the rest and twice as large."""
    wanted = config.engine.cpu_dtype
    if blas is None or (wanted == "auto" and blas.library is None):
        return "model"
    return wanted


def _embedding_recipe(folder: Path) -> embedder.Recipe | None:
    try:
        return embedder.read_recipe(folder)
    except SetupError as e:
        log.warning("no embeddings: %s", e)
        return None


def _decoder_embedder(
    recipe: embedder.Recipe | None, loaded: loader.LoadedModel
) -> embedder.TextEmbedder | None:
    if recipe is None:
        return None
    try:
        limit = loaded.info.context_length
        return embedder.from_decoder(loaded.model, recipe, context_length=limit)
    except SetupError as e:
        log.warning("no embeddings: %s", e)
        return None


def _encoder_parts(
    folder: Path, recipe: embedder.Recipe, name: str, limits: Limits, cpu_dtype: CpuDtype
) -> Parts:
    """Of a model that makes embeddings and nothing else."""
    config = loader.read_config(folder)
    embeds, info = embedder.load_encoder(
        folder, recipe, config, served_name=name, cpu_dtype=cpu_dtype
    )
    runner = Runner(None, info, make_layers=embedder.refuse_to_generate, max_rows=1)
    budget = Budget(RowCost(1, 1), capacity_nbytes=MIN_CAPACITY_NBYTES)
    return Parts(runner, CacheOff("an embedding model"), budget, limits, embedder=embeds)


def _row_cost(loaded: loader.LoadedModel) -> RowCost:
    try:
        return RowCost(*Layout.of(loaded.probe).row_cost(loaded.probe), step_tokens=BUFFER_TOKENS)
    except UnknownCacheLayer:
        nbytes = sum(layer.nbytes for layer in loaded.probe)
        return RowCost(nbytes // 256, nbytes)


def _wants_exact(config: Config, architecture: str, name: str) -> bool:
    """Whether prompts are cut and reused on prefill chunks only."""
    why = CHUNKS_MATTER.get(architecture)
    if why:
        log.warning("%s is reused on prefill chunks only: %s", name, why)
    return config.cache.reuse == "exact" or bool(why)


def _build_cache(
    config: Config,
    loaded: loader.LoadedModel,
    capacity_nbytes: int,
    *,
    exact_chunk: int,
    arithmetic: str,
) -> PrefixCache:
    """arithmetic: what bits depend on beside the model, where bits count."""
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
    share = int(capacity_nbytes * wanted.cache_memory_percent)
    limit = min(wanted.cache_memory_mb * MIB or share, capacity_nbytes)
    settings = CacheSettings(
        limit_nbytes=limit,
        block=wanted.cache_block_tokens,
        exact_chunk=exact_chunk,
    )
    log.info("prefix cache: %d MiB of memory, blocks of %d tokens", limit // MIB, settings.block)
    return PrefixTree(
        layout,
        settings,
        fingerprint=loaded.info.fingerprint,
        dtype=f"{loaded.info.dtype} {arithmetic}".rstrip(),
    )


def _tiers(config: CacheConfig) -> dict[str, TierOptions]:
    """What lies below memory, by the names of the modules in cache/tiers."""
    if config.no_ssd_cache:
        return {}
    return {
        "ssd": TierOptions(
            str(config.ssd_cache_dir or default_cache_dir()),
            int(config.ssd_cache_max_gb * GIB) or None,
            int(config.ssd_write_budget_gb_per_day * GIB) or None,
        )
    }


def _add_tiers(
    config: Config,
    cache: PrefixTree,
    model: ModelInfo,
    threads: IoThreads,
    *,
    device: str,
    wake: Callable[[], None],
) -> None:
    key_file = config.cache.ssd_cache_key_file
    seal = load_seal(key_file) if key_file else None
    kinds, tiers = discover(), _tiers(config.cache)
    if not tiers:
        log.info("ssd cache: off (--no-ssd-cache)")
    for name, options in tiers.items():
        folder = Path(options.location)
        leave_out(folder)
        tier = kinds[name](options)
        io = TierIo(tier, threads, seal=seal, flush_timeout_s=FLUSH_S, progress=_flushing)
        where = re.sub(r"[^\w-]", "-", f"{device}-{platform.node()}")
        cache.keep_estimates(folder / "models" / f"{model.fingerprint.hex()}.{where}.estimates")
        cache.add_tier(name, io, namespaces=_keys(config).namespaces, wake=wake)
        note_model(folder, model.fingerprint, ModelNote(model.name, model.path))
        limit = io.usage().limit_nbytes / GIB
        log.info("%s cache: %s, at most %.1f GiB (--no-ssd-cache: none)", name, folder, limit)


def _flushing(n_left: int, nbytes_left: int) -> None:
    log.info("writing the cache: %d records, %d MiB left", n_left, nbytes_left // MIB)


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
        server.mailroom.drain()
        loop.call_later(DRAIN_S, server.mailroom.fail_all, ShuttingDown())
        web.should_exit = True

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
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
        server.awake.note(busy=server.mailroom.n_calls > 0)
    log.critical("the engine is gone: exiting")
    web.force_exit = web.should_exit = True
