"""What the engine thread owns: the loaded model, its runner, its cache, its budget.

Built there, for every array belongs to it from the start.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from firn.assembly import sparse, speculation
from firn.assembly.cache import MIB, add_tiers, build_cache, cache_nbytes
from firn.assembly.memory import Planned, beside_others, plan_server
from firn.cache.layout import Layout
from firn.cache.off import CacheOff
from firn.cache.prefix import PrefixTree
from firn.cache.threads import IoThreads
from firn.config import Config, default_cache_dir
from firn.core.errors import SetupError, UnknownCacheLayer
from firn.core.memory_plan import MIN_CAPACITY_NBYTES, MachineMemory, ModelMemory, Transient
from firn.core.values import ModelInfo, Namespace
from firn.engine.budget import Budget, RowCost
from firn.engine.loop import Limits, Parts
from firn.engine.thinning import recipes_of
from firn.kv_events import EventPublisher
from firn.models import cpu, embedder, loader
from firn.models import device as devices
from firn.models.batch import BUFFER_TOKENS
from firn.models.cpu.blas import Blas
from firn.models.cpu.dtype import Choice as CpuDtype
from firn.models.cpu.threads import Threads
from firn.models.inputs import IdsOnly
from firn.models.mtp import MtpModel
from firn.models.processor import VisionProcessor
from firn.models.runner import Runner
from firn.models.selfcheck import CHUNKS_MATTER
from firn.models.shapes import FewShapes, few_shapes
from firn.models.transient import transient_of
from firn.models.weight_memory import WeightMemory
from firn.ranks.leader_parts import LeaderParts

log = logging.getLogger("firn")


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be loaded, and for whom.

    front: the process that shares memory out among its models, where there is one.
    """

    config: Config
    folder: Path
    name: str
    namespaces: Sequence[Namespace]
    processor: VisionProcessor | None = None
    front: int | None = None
    leader_parts: LeaderParts | None = None
    """The ranks that the model is shared out among, where it is."""


@dataclass(frozen=True, slots=True)
class Way:
    """How this machine computes it."""

    machine: devices.Device
    limits: Limits
    blas: Blas | None
    cpu_dtype: CpuDtype

    @property
    def exact(self) -> bool:
        return self.limits.aligned

    @property
    def chunk(self) -> int:
        """The largest there can be."""
        usual = self.limits.prefill_chunk
        return usual if self.exact else max(self.limits.largest_chunk, usual)

    @property
    def exact_chunk(self) -> int:
        """0: prompts are reused to the token."""
        return self.limits.prefill_chunk if self.exact else 0

    @property
    def arithmetic(self) -> str:
        """What bits depend on beside the model, where bits count."""
        return self.blas.identity if self.blas and self.exact else ""


def build_parts(wanted: Wanted, wake: Callable[[], None], planned: list[Planned]) -> Parts:
    """On the engine thread. `planned` gets the memory's plan. Raises SetupError."""
    config, folder, leader_parts = wanted.config, wanted.folder, wanted.leader_parts
    before = beside_others(devices.look(devices.device()), group=wanted.front)
    settings, recipe = loader.read_config(folder), _embedding_recipe(folder)
    way = way_of(config, str(settings["model_type"]), wanted.name)
    if leader_parts is not None:
        way, recipe = _prepare_ranks(wanted, leader_parts, settings, way), None
    if recipe is not None and embedder.needs_encoder(folder, settings):
        return _encoder_parts(folder, recipe, wanted.name, way.limits, way.cpu_dtype)
    loaded = load_model(wanted, way, shard=leader_parts.shard if leader_parts else None)
    info, cost = loaded.info, row_cost(loaded)
    transient = transient_of(settings, device=way.machine.kind, dtype=info.dtype)

    def planned_for(cost: RowCost, weights_nbytes: int) -> Planned:
        return plan_for(config, before, info, way, transient, cost, weights_nbytes)

    put_on_tiers = partial(
        add_tiers,
        config,
        device=way.machine.kind,
        namespaces=wanted.namespaces,
        wake=wake,
        leader_parts=leader_parts,
    )
    for_drafts: dict[str, Any] = {
        "exact": way.exact,
        "cpu_dtype": way.cpu_dtype,
        "cache_nbytes": cache_nbytes(config, planned_for(cost, info.weights_nbytes).alone_nbytes),
        "add_tiers": lambda cache, model: put_on_tiers(cache, model, IoThreads()),
    }
    guessing = speculation.build(config, loaded, **for_drafts)
    threads = threads_of(loaded, way)
    scorer, guessing = sparse.build(config, loaded, guessing, threads=threads, **for_drafts)
    cost = guessing.with_rows(cost)
    planned.append(planned_for(cost, info.weights_nbytes + guessing.weights_nbytes))
    planned[0].tell()
    plan = planned[0].plan
    devices.set_limits(way.machine.kind, plan)
    capacity_nbytes, alone_nbytes = _capacity(wanted, info, planned[0], way)
    budget = Budget(
        cost,
        capacity_nbytes=capacity_nbytes,
        transient=transient,
        chunk_nbytes=plan.chunk_nbytes,
    )
    cache = build_cache(
        config,
        loaded,
        alone_nbytes,
        exact_chunk=way.exact_chunk,
        arithmetic=way.arithmetic,
        leader_parts=leader_parts,
    )
    if isinstance(cache, PrefixTree):
        if config.cache.kv_events is not None:
            cache.records.tree.announcer = EventPublisher(config.cache.kv_events)
        if scorer is not None:
            cache.expect(recipes_of(scorer.recipe))
        put_on_tiers(cache, info, IoThreads(max_write_nbytes=plan.write_queue_nbytes))
        cache.set_room(budget.free_nbytes())
    runner = _runner(
        config, loaded, guessing, threads, leader_parts, shapes=_shapes(loaded, way, leader_parts)
    )
    embeds = _decoder_embedder(recipe, loaded)
    return Parts(runner, cache, budget, way.limits, embedder=embeds, scorer=scorer)


def _prepare_ranks(
    wanted: Wanted, leader_parts: LeaderParts, settings: Mapping[str, Any], way: Way
) -> Way:
    """All ranks are about to load the model in this way. Raises SetupError."""
    way = replace(way, cpu_dtype=leader_parts.dtype_for(way.cpu_dtype))
    leader_parts.prepare(
        settings,
        wanted.name,
        text_only=wanted.config.model.text_only,
        cpu_dtype=way.cpu_dtype,
    )
    if _embedding_recipe(wanted.folder) is not None:
        log.warning("no embeddings: the model is shared out among ranks")
    return way


def _capacity(wanted: Wanted, info: ModelInfo, planned: Planned, way: Way) -> tuple[int, int]:
    """For live requests and stored prefixes; and what it would be were this server alone here."""
    capacity_nbytes, alone_nbytes = planned.plan.capacity_nbytes, planned.alone_nbytes
    if wanted.leader_parts is not None:
        capacity_nbytes = wanted.leader_parts.begin(info, capacity_nbytes, device=way.machine.kind)
        alone_nbytes = min(alone_nbytes, capacity_nbytes)
    return capacity_nbytes, alone_nbytes


def plan_for(
    config: Config,
    before: MachineMemory,
    info: ModelInfo,
    way: Way,
    transient: Transient,
    cost: RowCost,
    weights_nbytes: int,
) -> Planned:
    rows = (cost.per_token_nbytes, cost.fixed_nbytes)
    needs = ModelMemory(weights_nbytes, *rows, transient, info.context_length)
    return plan_server(config, before, needs, chunk=way.chunk, exact=way.exact)


def way_of(config: Config, architecture: str, name: str) -> Way:
    machine, wanted = devices.device(), config.engine
    exact = _wants_exact(config, architecture, name)
    blas = _tune_cpu(config, exact=exact) if machine.kind == "cpu" else None
    limits = Limits(
        max_rows=wanted.max_concurrency,
        max_queue=wanted.max_queue,
        prefill_chunk=wanted.prefill_chunk or machine.prefill_chunk,
        largest_chunk=_largest_chunk(config, machine),
        max_step_s=wanted.max_step_ms / 1000,
        aligned=exact,
    )
    return Way(machine, limits, blas, _cpu_dtype(config, blas))


def _largest_chunk(config: Config, machine: devices.Device) -> int:
    """0: chunks are always the usual ones. A CPU's times are mostly other programs' doing."""
    wanted = config.engine
    if machine.kind == "cpu" and not wanted.max_step_ms:
        return 0
    return wanted.prefill_chunk or machine.largest_chunk


def load_model(
    wanted: Wanted, way: Way, *, shard: Callable[[Any], None] | None = None
) -> loader.LoadedModel:
    """shard: leaves of it what is this rank's."""
    config, processor = wanted.config, wanted.processor
    loaded = loader.load(
        wanted.folder,
        served_name=wanted.name,
        adapter=config.model.adapter,
        trust_remote_code=config.model.trust_remote_code,
        picture=processor.example.inputs if processor else None,
        feature_nbytes=config.images.image_feature_cache_mb * MIB,
        memory=WeightMemory(default_cache_dir()),
        cpu_dtype=way.cpu_dtype,
        max_context=config.engine.max_context or None,
        shard=shard,
    )
    return speculation.with_head(config, loaded, exact=way.exact, cpu_dtype=way.cpu_dtype)


def _runner(
    config: Config,
    loaded: loader.LoadedModel,
    guessing: speculation.Guessing,
    threads: Threads | None,
    leader_parts: LeaderParts | None,
    shapes: FewShapes | None,
) -> Runner:
    make = Runner if leader_parts is None else leader_parts.make_runner
    return make(
        loaded.model,
        loaded.info,
        make_layers=loaded.make_layers,
        max_rows=config.engine.max_concurrency,
        inputs=loaded.inputs,
        threads=threads,
        speculation=guessing.speculation,
        shapes=shapes,
    )


def _shapes(
    loaded: loader.LoadedModel, way: Way, leader_parts: LeaderParts | None
) -> FewShapes | None:
    """How prompts are cut for a device that prefers few shapes; None: as they come, so that exact mode
    stays exact and ranks stay alike."""
    if way.machine.kind != "cuda" or way.exact or leader_parts is not None:
        return None
    if not isinstance(loaded.inputs, IdsOnly) or isinstance(loaded.model, MtpModel):
        return None
    try:
        return few_shapes(loaded.model, loaded.make_layers)
    except ValueError as e:
        log.info("prompts are read without padding: %s", e)
        return None


def threads_of(loaded: loader.LoadedModel, way: Way) -> Threads | None:
    library = way.blas.library if way.blas and not way.exact else None
    return Threads(library, loaded.model) if library else None


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


def row_cost(loaded: loader.LoadedModel) -> RowCost:
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
