"""A process that computes its slice of a model and does as rank 0 tells it. It has no clients.

Its main thread owns every array: it loads the model, and then makes one call after the other.
"""

from __future__ import annotations

import logging
import os
import platform
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from firn.assembly import model_names
from firn.assembly.cache import FLUSH_S, computed_in, layout_of, seal_of, tiers_of
from firn.assembly.memory import Planned, beside_others
from firn.assembly.parts import Wanted, Way, load_model, plan_for, row_cost, threads_of, way_of
from firn.cache.codecs import At
from firn.cache.io import TierIo
from firn.cache.prefix import CacheSettings
from firn.cache.ranks.slices import Identity, Slices
from firn.cache.threads import IoThreads
from firn.cache.tiers import TierOptions, discover
from firn.config import Config
from firn.core.errors import SetupError, UnknownCacheLayer
from firn.core.ranks import RankCall
from firn.host.backups import leave_out
from firn.host.shutdown import no_later_than
from firn.models import device as devices
from firn.models import loader
from firn.models.hub import HubRules
from firn.models.loader import LoadedModel
from firn.models.ranks.group import check
from firn.models.ranks.runner import FollowerRunner, in_step
from firn.models.transient import transient_of
from firn.ranks.follower import Follower
from firn.ranks.joining import RankMember, check_options, form, options_digest

log = logging.getLogger("firn.ranks")

END_S = FLUSH_S + 10.0
"""How long it has to end, once it is told to."""
PAYLOADS = frozenset({"cut", "tokens", "copied", "joined", "drop", "arrive", "touch", "defer"})
"""Calls after which what was cut may still wait to be computed."""


def join_ranks(config: Config) -> tuple[Config, RankMember]:
    """This process among those of one model, and what it goes by there. Raises SetupError."""
    check_options(config)
    log.info("waiting for the other ranks")
    off = replace(config.engine, speculation="off")
    return replace(config, engine=off), form()


def follow(config: Config, member: RankMember) -> int:
    """Until rank 0 says that it is over. Returns the process's exit code."""
    follower = member.follower
    assert follower is not None
    follower.heed_signals()
    try:
        loop = _build(config, member, follower)
    except SetupError as e:
        follower.answer("failed", str(e))
        threading.Event().wait()  # rank 0 says it, and ends both
    log.info("%s follows", member.text)
    follower.begin()
    try:
        loop.follow()
    except Exception as e:
        log.critical("%s failed: %r", member.text, e, exc_info=e)
        follower.answer("failed", repr(e))
        os._exit(1)
    return 0


def _build(config: Config, member: RankMember, follower: Follower) -> FollowerLoop:
    settings, folder = _checked(config, member, follower)
    name = config.model.path.rstrip("/").split("/")[-1]
    before = beside_others(devices.look(devices.device()))
    way = way_of(config, str(settings["model_type"]), name)
    (cpu_dtype,) = follower.expect("load").args
    way = replace(way, cpu_dtype=cpu_dtype)
    loaded = load_model(Wanted(config, folder, name, ()), way, shard=member.group.shard)
    planned = _planned(config, settings, before, way, loaded)
    devices.set_limits(way.machine.kind, planned.plan)
    follower.answer(
        "ready",
        {
            "weights": loaded.info.fingerprint.hex(),
            "number types": loaded.info.dtype,
            "capacity": planned.plan.capacity_nbytes,
        },
    )
    (batchable,) = follower.expect("begin").args
    slices = _slices(config, member, follower, way, loaded, planned)
    runner = FollowerRunner(
        loaded.model,
        replace(loaded.info, batchable=batchable),
        make_layers=loaded.make_layers,
        max_rows=config.engine.max_concurrency,
        inputs=loaded.inputs,
        threads=threads_of(loaded, way),
    )
    return FollowerLoop(follower, runner.follow(member.group), slices)


def _checked(config: Config, member: RankMember, follower: Follower) -> tuple[dict[str, Any], Path]:
    """The model is here and can be shared out; or it is not, and rank 0 says so."""
    said: dict[str, Any] = {"error": "", "node": platform.node()}
    settings: dict[str, Any] = {}
    folder = Path()
    try:
        wanted = config.model
        rules = HubRules(wanted.offline, wanted.download_timeout, wanted.download_retries)
        folder = model_names.resolve(wanted.path, rules)
        settings = loader.read_config(folder)
        check(settings, member.group.size, name=folder.name, text_only=wanted.text_only)
    except SetupError as e:
        said["error"] = str(e)
    follower.answer("checked", said | {"options": options_digest(config)})
    if said["error"]:
        threading.Event().wait()  # rank 0 says it, and ends all
    return settings, folder


def _planned(
    config: Config, settings: dict[str, Any], before: Any, way: Way, loaded: LoadedModel
) -> Planned:
    info = loaded.info
    transient = transient_of(settings, device=way.machine.kind, dtype=info.dtype)
    return plan_for(config, before, info, way, transient, row_cost(loaded), info.weights_nbytes)


def _slices(
    config: Config,
    member: RankMember,
    follower: Follower,
    way: Way,
    loaded: LoadedModel,
    planned: Planned,
) -> Slices | None:
    """None: the cache is off."""
    wanted = config.cache
    if wanted.disable_prefix_cache:
        return None
    try:
        layout = layout_of(config, loaded)
    except UnknownCacheLayer:
        return None
    settings = CacheSettings(0, wanted.cache_block_tokens, way.exact_chunk)
    text = settings.layout(layout, computed_in(loaded, way.arithmetic, member.text))
    identity = Identity(loaded.info.fingerprint, text)
    slices = Slices(layout, identity, answer=follower.answer, to_self=follower.put)
    for name, options in tiers_of(wanted).items():
        slices.add_tier(_tier(config, member, name, options, planned))
    return slices


def _tier(
    config: Config, member: RankMember, name: str, options: TierOptions, planned: Planned
) -> TierIo:
    folder = member.folder(Path(options.location))
    leave_out(folder)
    tier = discover()[name](replace(options, location=str(folder)))
    threads = IoThreads(max_write_nbytes=planned.plan.write_queue_nbytes)
    return TierIo(tier, threads, seal=seal_of(config), flush_timeout_s=FLUSH_S)


@dataclass(eq=False)
class FollowerLoop:
    """Makes the calls. Owner: the main thread."""

    follower: Follower
    runner: FollowerRunner
    slices: Slices | None

    def follow(self) -> None:
        while True:
            call = self.follower.next()
            if call.name == "end":
                break
            self._make(call)
        no_later_than(END_S)
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
                self._of_slices(call.name)(*call.args, call.blob)
            case "settle" | "choices" | "join" | "leave" | "launch" | "collect":
                getattr(self.runner, f"on_{call.name}")(*call.args)
            case _:
                self._of_slices(call.name)(*call.args)

    def _of_slices(self, name: str) -> Callable[..., None]:
        method: Callable[..., None] = getattr(self.slices, f"on_{name}")
        return method

    def _start(self, number: int, n_tokens: int, fills: Any) -> None:
        own = self.slices
        if not fills or own is None:
            self.runner.on_start(number, n_tokens, None)
        else:
            self.runner.on_start(number, n_tokens, lambda layers: own.fill(layers, fills))

    def _cut(
        self, number: int, part: str, row: int, index: int, n_tokens: int, start: int, end: int
    ) -> None:
        live = self.runner.by_number[row]
        assert self.slices is not None
        in_step((live.index, live.n_tokens) == (index, n_tokens), "a row's place")
        at = At(index, n_tokens)
        self.slices.on_cut(live.live_layers, number, part, at, start, end)
