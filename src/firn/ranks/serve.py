"""`firn serve --tensor-parallel`: rank 0 is a server like any other, which shares its model; the others
follow it.

A follower computes its slice of the model on rank 0's orders and has no clients. Its main thread owns
every array: it loads the model, then executes one call after another.
"""

from __future__ import annotations

import logging
import os
import platform
import threading
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from firn import app, backends
from firn.assembly.cache import FLUSH_S, computed_in, layout_of, seal_of, tiers_of
from firn.assembly.compute import ComputeSettings, compute_settings
from firn.assembly.memory import MemoryPlanner, Planned, with_reservations
from firn.assembly.model import ServerSpec, find_folder, load_model, row_cost, served_name
from firn.backends.contract import execution_of
from firn.cache.prefix import CacheSettings
from firn.cache.storage.worker import TierWorker
from firn.cache.tiers import OpenTier, TierOptions, discover
from firn.config import Config
from firn.core.errors import SetupError, UnknownCacheLayer
from firn.core.memory_plan import MachineMemory
from firn.host.backups import exclude_from_backups
from firn.host.shutdown import exit_or_return, kill_after, outlives_terminal
from firn.models.load import loader
from firn.models.load.loader import LoadedModel
from firn.models.load.transient import transient_of
from firn.ranks.cache.slices import Identity, Slices
from firn.ranks.calls import RankCall
from firn.ranks.follower import Follower
from firn.ranks.group import check
from firn.ranks.joining import RankMember, check_options, end_start, form, options_digest
from firn.ranks.leader_parts import LeaderParts
from firn.ranks.runner import FollowerRunner, in_step

log = logging.getLogger("firn.ranks")

END_S = FLUSH_S + 10.0
"""How long it may take to end once it is told to."""
PAYLOADS = frozenset(
    {"cut", "tokens", "copied", "joined", "drop", "arrive", "touch", "defer", "poll"}
)
"""Calls before which lazily cut payloads need not be evaluated."""


def join_ranks(config: Config) -> tuple[Config, RankMember]:
    """Join the processes that serve one model. Returns the settings to use. Raises SetupError."""
    check_options(config)
    log.info("waiting for the other ranks")
    off = replace(config.engine, speculation="off")
    return replace(config, engine=off), form()


def serve(config: Config) -> int:
    """Join the other ranks, then serve or follow. Returns the process's exit code. Raises SetupError."""
    app.begin_process(config)
    config, member = join_ranks(config)
    if member.leader is None:
        return exit_or_return(follow(config, member))
    sharding = LeaderParts(member, member.leader, options=options_digest(config))
    try:
        return app.serve(config, sharding=sharding)
    except SetupError as e:
        end_start(e)


def follow(config: Config, member: RankMember) -> int:
    """Serve rank 0 until it ends. Returns the process's exit code."""
    follower = member.follower
    assert follower is not None
    follower.heed_signals(outlives_terminal=outlives_terminal())
    try:
        loop = _build(config, member, follower)
    except SetupError as e:
        follower.answer("failed", str(e))
        threading.Event().wait()  # rank 0 reports it and ends this process
    log.info("%s follows rank 0", member.text)
    follower.begin()
    try:
        loop.run()
    except Exception as e:
        log.critical("%s failed: %r", member.text, e, exc_info=e)
        follower.answer("failed", repr(e))
        os._exit(1)
    return 0


def _build(config: Config, member: RankMember, follower: Follower) -> FollowerLoop:
    settings, folder = _check(config, member, follower)
    name = served_name(config)
    before = with_reservations(backends.find().memory.now())
    compute = compute_settings(config, str(settings["model_type"]), name)
    (compute.backend.weights.dtype,) = follower.expect("load").args
    loaded = load_model(ServerSpec(config, folder, name, ()), compute, shard=member.group.shard)
    planned = _plan(config, settings, before, compute, loaded)
    compute.backend.memory.limit(planned.plan)
    follower.answer(
        "ready",
        {
            "weights": loaded.info.fingerprint.hex(),
            "dtypes": loaded.info.dtype,
            "capacity": planned.plan.capacity_nbytes,
        },
    )
    (batchable,) = follower.expect("begin").args
    write_queue_nbytes = planned.plan.write_queue_nbytes
    slices = _slices(
        config,
        member,
        follower,
        compute=compute,
        loaded=loaded,
        write_queue_nbytes=write_queue_nbytes,
    )
    runner = FollowerRunner(
        loaded.model,
        replace(loaded.info, batchable=batchable),
        make_layers=loaded.make_layers,
        max_rows=config.engine.max_concurrency,
        arguments=loaded.arguments,
        execution=execution_of(compute.backend, loaded, exact=compute.exact, is_shared=True),
    )
    return FollowerLoop(follower, runner.follow(member.group), slices)


def _check(config: Config, member: RankMember, follower: Follower) -> tuple[dict[str, Any], Path]:
    """The model's config and folder, after telling rank 0 whether the model can be sharded here.

    Does not return if it cannot: rank 0 reports why and ends all ranks.
    """
    answer: dict[str, Any] = {"error": "", "node": platform.node()}
    settings: dict[str, Any] = {}
    folder = Path()
    try:
        folder = find_folder(config.model)
        settings = loader.read_config(folder)
        check(settings, member.group.size, name=folder.name, text_only=config.model.text_only)
    except SetupError as e:
        answer["error"] = str(e)
    follower.answer("checked", answer | {"options": options_digest(config)})
    if answer["error"]:
        threading.Event().wait()  # until rank 0 ends all ranks
    return settings, folder


def _plan(
    config: Config,
    settings: dict[str, Any],
    before: MachineMemory,
    compute: ComputeSettings,
    loaded: LoadedModel,
) -> Planned:
    info = loaded.info
    fused = compute.backend.profile.fused_head_dims
    transient = transient_of(settings, fused_head_dims=fused, dtype=info.dtype)
    planner = MemoryPlanner(config, before, compute, transient, info.context_length)
    return planner.plan(row_cost(loaded), info.weights_nbytes)


def _slices(
    config: Config,
    member: RankMember,
    follower: Follower,
    *,
    compute: ComputeSettings,
    loaded: LoadedModel,
    write_queue_nbytes: int,
) -> Slices | None:
    """None: the cache is off."""
    options = config.cache
    if options.disable_prefix_cache:
        return None
    try:
        layout = layout_of(config, loaded)
    except UnknownCacheLayer:
        return None
    settings = CacheSettings(0, options.cache_block_tokens, compute.exact_chunk)
    text = settings.layout_text(
        layout, computed_in(loaded, compute.backend.arithmetic, member.text)
    )
    identity = Identity(loaded.info.fingerprint, text)
    workers = [
        _worker(config, member, follower, discover()[name], tier, write_queue_nbytes)
        for name, tier in tiers_of(options).items()
    ]
    return Slices(layout, identity, answer=follower.answer, worker=next(iter(workers), None))


def _worker(
    config: Config,
    member: RankMember,
    follower: Follower,
    open_tier: OpenTier,
    options: TierOptions,
    write_queue_nbytes: int,
) -> TierWorker:
    folder = member.folder(Path(options.location))
    exclude_from_backups(folder)
    return TierWorker(
        open_tier(replace(options, location=str(folder))),
        seal=seal_of(config),
        max_write_nbytes=write_queue_nbytes,
        flush_timeout_s=FLUSH_S,
        wake=lambda: follower.put(RankCall("poll")),
    )


@dataclass(eq=False)
class FollowerLoop:
    """Executes the calls that rank 0 sends, in order. Owner: the main thread."""

    follower: Follower
    runner: FollowerRunner
    slices: Slices | None

    def run(self) -> None:
        while True:
            call = self.follower.next()
            if call.name == "end":
                break
            self._make(call)
        kill_after(END_S)
        if self.slices is not None:
            self.slices.close()
        self.runner.close()

    def _make(self, call: RankCall) -> None:
        own = self.slices
        if own is not None and call.name not in PAYLOADS:
            own.compute()
        match call.name:
            case "start":
                self._start(*call.args)
            case "cut":
                self._cut(*call.args)
            case "prefill":
                self.runner.on_prefill(*call.args, chunk=call.blob)
            case "write" | "read":
                getattr(own, f"on_{call.name}")(*call.args, call.blob)
            case name:
                method = getattr(self.runner, f"on_{name}", None) or getattr(own, f"on_{name}")
                method(*call.args)

    def _start(self, number: int, n_tokens: int, fills: Any) -> None:
        own = self.slices
        if not fills or own is None:
            self.runner.on_start(number, n_tokens, None)
        else:
            self.runner.on_start(number, n_tokens, own.prefix(fills, n_tokens))

    def _cut(
        self, number: int, part: str, row: int, index: int, n_tokens: int, start: int, end: int
    ) -> None:
        live = self.runner.by_number[row]
        assert self.slices is not None
        view = live.view()
        in_step((view.at.index, view.at.n_tokens) == (index, n_tokens), "a row's place")
        self.slices.on_cut(view.layers, number, part, view.at, start, end)
