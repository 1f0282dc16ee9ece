"""What the engine thread owns: the loaded model, its runner, its cache, its budget.

Built on that thread, because MLX ties arrays to the thread that created them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from firn import backends
from firn.assembly import speculation
from firn.assembly.cache import add_tiers, build_cache, cache_nbytes
from firn.assembly.compute import ComputeSettings, compute_settings
from firn.assembly.extras import Decoder, Extra, LoadEncoder, find_encoder, needs_draft_model
from firn.assembly.handles import any_rows
from firn.assembly.memory import MemoryPlanner, MemoryWatch, Planned, with_reservations
from firn.assembly.model import ServerSpec, load_model, row_cost
from firn.backends.contract import ComputeBackend, execution_of
from firn.backends.memory import limit_buffer_cache, used_nbytes
from firn.cache.off import CacheOff
from firn.cache.prefix import PrefixCache
from firn.core.memory_plan import MIN_CAPACITY_NBYTES, MemoryPlan
from firn.core.values import ModelInfo
from firn.engine import Budget, Engine, EngineParts, RowCost
from firn.models.decode.execution import Execution
from firn.models.decode.runner import Runner
from firn.models.decode.steps import NO_SPECULATION, Speculator
from firn.models.load import loader
from firn.models.load.transient import transient_of

log = logging.getLogger("firn")

ENGINE_S = 60.0
"""How long a check waits for the engine."""
PADDING_PARTS = 8
"""The padding of a group of rows may take this fraction (1 / N) of the capacity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerParts(EngineParts):
    """The engine's parts, and what else the server uses on the engine thread."""

    cache: PrefixCache | CacheOff
    speculator: Speculator = NO_SPECULATION
    planned: Planned | None = None
    """None: the model has no rows to plan memory for."""

    def own_process(self) -> None:
        """The process serves only this model: let the cache control garbage collection."""
        self.cache.own_process()


def build_parts(
    spec: ServerSpec, wake: Callable[[], None], *, extras: Sequence[Extra] = ()
) -> ServerParts:
    """On the engine thread. wake: makes the engine tick. Raises SetupError."""
    config, folder, sharding = spec.config, spec.folder, spec.sharding
    machine = with_reservations(backends.find().memory.now(), group=spec.front)
    settings = loader.read_config(folder)
    compute = compute_settings(config, str(settings["model_type"]), spec.name)
    sharding.prepare(
        settings, spec.name, text_only=config.model.text_only, weights=compute.backend.weights
    )
    load_encoder = None if sharding.is_shared else find_encoder(extras, folder)
    if load_encoder is not None:
        return _encoder_parts(spec, load_encoder, compute)
    is_needed = needs_draft_model(extras)
    draft_folder = speculation.find_draft(config, folder, exact=compute.exact, is_needed=is_needed)
    loaded = load_model(spec, compute, shard=sharding.shard)
    planner = MemoryPlanner(
        config,
        machine,
        compute,
        transient_of(
            settings,
            fused_head_dims=compute.backend.profile.fused_head_dims,
            dtype=loaded.info.dtype,
        ),
        context_length=loaded.info.context_length,
    )
    return _decoder_parts(
        spec, compute, loaded, extras=extras, planner=planner, wake=wake, draft_folder=draft_folder
    )


def _decoder_parts(
    spec: ServerSpec,
    compute: ComputeSettings,
    loaded: loader.LoadedModel,
    *,
    extras: Sequence[Extra],
    planner: MemoryPlanner,
    wake: Callable[[], None],
    draft_folder: Path | None,
) -> ServerParts:
    config, info, backend = spec.config, loaded.info, compute.backend
    put_on_tiers = _tiers(spec, device=backend.profile.name, wake=wake)
    cost, is_shared = row_cost(loaded), spec.sharding.is_shared
    execution = execution_of(backend, loaded, exact=compute.exact, is_shared=is_shared)
    alone_nbytes = planner.plan(cost, info.weights_nbytes).alone_nbytes
    setup = speculation.DraftSetup(
        exact=compute.exact,
        backend=backend,
        cache_nbytes=cache_nbytes(config, alone_nbytes),
        add_tiers=lambda cache, model: put_on_tiers(cache, model, speculation.DRAFT_QUEUE_NBYTES),
        folder=draft_folder,
        is_needed=needs_draft_model(extras),
    )
    drafting = speculation.build(config, loaded, setup)
    decoder = Decoder(spec, loaded, drafting, setup, execution.prepare)
    for extra in extras:
        decoder = extra.change(decoder)
    loaded, drafting = decoder.loaded, decoder.drafting
    cost = drafting.with_rows(cost)
    planned = _plan(planner, cost, info, drafting)
    backend.memory.limit(planned.plan)
    capacity_nbytes, alone_nbytes = _capacity(
        spec, loaded, planned, has_own_memory=backend.profile.has_own_memory
    )
    budget = Budget(
        cost,
        capacity_nbytes=capacity_nbytes,
        transient=planner.transient,
        chunk_nbytes=planned.plan.chunk_nbytes,
    )
    cache = build_cache(config, loaded, alone_nbytes, compute=compute, sharding=spec.sharding)
    if isinstance(cache, PrefixCache):
        for extra in extras:
            extra.watch(cache)
        cache.expect_recipes(decoder.preparer.recipes)
        put_on_tiers(cache, info, planned.plan.write_queue_nbytes)
    cache.set_room(budget.free_nbytes())
    max_padding = capacity_nbytes // PADDING_PARTS // max(cost.per_token_nbytes, 1)
    return ServerParts(
        any_rows(
            _warm_runner(
                spec,
                loaded,
                drafting.speculator,
                backend=backend,
                execution=execution,
                max_padding=max_padding,
            )
        ),
        cache=cache,
        budget=budget,
        limits=replace(compute.limits, common_chunk=execution.buckets.common_chunk),
        preparer=decoder.preparer,
        speculator=drafting.speculator,
        planned=planned,
    )


def _plan(
    planner: MemoryPlanner, cost: RowCost, info: ModelInfo, drafting: speculation.Drafting
) -> Planned:
    """The plan that the server starts with. Limits a draft model's cache to its part of it."""
    draft = drafting.draft
    planned = planner.plan(
        cost,
        info.weights_nbytes + drafting.weights_nbytes,
        draft_cache_nbytes=draft.cache_nbytes if draft is not None else 0,
    )
    if draft is not None:
        draft.fit(planned.plan.draft_cache_nbytes)
    planned.log_plan()
    return planned


def _tiers(
    spec: ServerSpec, *, device: str, wake: Callable[[], None]
) -> Callable[[PrefixCache, ModelInfo, int], None]:
    """Adds the tiers below memory to a cache, with room for this many bytes that wait to be written."""
    return partial(
        add_tiers,
        spec.config,
        device=device,
        namespaces=spec.namespaces,
        wake=wake,
        sharding=spec.sharding,
    )


def _capacity(
    spec: ServerSpec, loaded: loader.LoadedModel, planned: Planned, *, has_own_memory: bool
) -> tuple[int, int]:
    """The capacity for live requests and stored prefixes, and what it would be if nothing else ran
    on the machine."""
    own_nbytes = planned.plan.capacity_nbytes
    nbytes = spec.sharding.begin(loaded.info, own_nbytes, has_own_memory=has_own_memory)
    alone_nbytes = (
        min(planned.alone_nbytes, nbytes) if spec.sharding.is_shared else planned.alone_nbytes
    )
    return nbytes, alone_nbytes


def _warm_runner(
    spec: ServerSpec,
    loaded: loader.LoadedModel,
    speculator: Speculator,
    *,
    backend: ComputeBackend,
    execution: Execution,
    max_padding: int,
) -> Runner:
    """The server's runner, on a device that is ready for it."""

    def make(speculator: Speculator) -> Runner:
        return spec.sharding.make_runner(
            loaded.model,
            loaded.info,
            make_layers=loaded.make_layers,
            max_rows=spec.config.engine.max_concurrency,
            arguments=loaded.arguments,
            speculator=speculator,
            execution=execution,
            max_padding=max_padding,
        )

    if not spec.sharding.is_shared:
        backend.warm_up(loaded.model, make, speculator)
    return make(speculator)


def _encoder_parts(spec: ServerSpec, load: LoadEncoder, compute: ComputeSettings) -> ServerParts:
    """The parts for a model that generates no text."""
    encoder = load(spec, compute)
    runner = Runner(None, encoder.info, make_layers=encoder.make_layers, max_rows=1)
    budget = Budget(RowCost(1, 1), capacity_nbytes=MIN_CAPACITY_NBYTES)
    cache = CacheOff(encoder.what)
    return ServerParts(any_rows(runner), cache=cache, budget=budget, limits=compute.limits)


def watch_engine(
    engine: Engine[ServerParts], *, front: int | None, is_sharded: bool
) -> MemoryWatch | None:
    """Watch a running engine's memory; None: it has none to plan.

    The capacity is decided elsewhere if a front divides the memory or the model is sharded.
    """
    planned = engine.parts.planned
    if planned is None:
        return None
    backend = backends.find()

    def adapt(plan: MemoryPlan) -> None:
        limit_buffer_cache(plan)
        engine.call(lambda parts: parts.set_capacity(plan.capacity_nbytes))

    watch = MemoryWatch(
        planned,
        look=backend.memory.while_serving,
        used_nbytes=used_nbytes,
        held_nbytes=lambda: engine.call(lambda parts: parts.budget.reserved_nbytes).result(
            ENGINE_S
        ),
        capacity_nbytes=lambda: engine.parts.budget.capacity_nbytes,
        adapt=None if is_sharded or front is not None else adapt,
        group=front,
    )
    watch.start()
    return watch
