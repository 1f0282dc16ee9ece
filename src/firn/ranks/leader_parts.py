"""Rank 0's parts: those of a server with one process, which also tell the other ranks what they do.

Owner: the engine thread, once it runs; `watch` and `end` are the main thread's.
"""

from __future__ import annotations

import logging
import platform
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from firn.backends.contract import Weights
from firn.cache.layout import Layout
from firn.cache.prefix import CacheSettings, PrefixCache
from firn.cache.storage.worker import TierWorker
from firn.cache.tiers import TierOptions
from firn.core.values import ModelInfo
from firn.ranks.cache.mirror import Mirror, MirroredLayout
from firn.ranks.cache.tree import MirroredTree
from firn.ranks.cache.worker import RankWorker
from firn.ranks.group import check
from firn.ranks.joining import RankMember, agree
from firn.ranks.leader import Leader
from firn.ranks.runner import LeaderRunner

log = logging.getLogger("firn.ranks")

CHECK_S = 600.0
"""How long the others may take to find the model, which may include a download."""
LOAD_S = 7200.0
"""How long they may take to load it."""


class LeaderParts:
    """Implements assembly.sharding.Sharding."""

    is_shared = True

    def __init__(self, member: RankMember, leader: Leader, *, options: str) -> None:
        """options: a digest of the settings that all ranks must share."""
        self._options = options
        self._member = member
        self._leader = leader
        self._mirror = Mirror(leader)
        self._nodes: Counter[str] = Counter([platform.node()])
        self._node_of: dict[int, str] = {}

    @property
    def n_ranks(self) -> int:
        return self._member.group.size

    @property
    def text(self) -> str:
        return self._member.text

    def shard(self, model: Any) -> None:
        self._member.group.shard(model)

    # --- the start -------------------------------------------------------------------------

    def prepare(
        self,
        settings: Mapping[str, Any],
        name: str,
        *,
        text_only: bool,
        weights: Weights,
    ) -> None:
        """Check that all ranks can load the model, and tell them to. Raises SetupError."""
        if (
            weights.dtype == "auto"
        ):  # it depends on each rank's memory, and all must compute the same
            weights.dtype = "float32"
        check(settings, self._member.group.size, name=name, text_only=text_only)
        others = self._gather("checked", timeout_s=CHECK_S)
        agree({"error": "", "options": self._options}, others)
        self._node_of = {rank: str(theirs["node"]) for rank, theirs in others.items()}
        self._nodes.update(self._node_of.values())
        self._leader.tell("load", weights.dtype)

    def begin(self, info: ModelInfo, capacity_nbytes: int, *, has_own_memory: bool) -> int:
        """Wait until all have loaded the model; returns the least capacity. Raises SetupError."""
        others = self._gather("ready", timeout_s=LOAD_S)
        agree({"weights": info.fingerprint.hex(), "dtypes": info.dtype}, others)
        capacities = [capacity_nbytes // self._n_sharing(platform.node(), has_own_memory)]
        for rank, theirs in others.items():
            n_sharing = self._n_sharing(self._node_of[rank], has_own_memory)
            capacities.append(int(theirs["capacity"]) // n_sharing)
        self._leader.tell("begin", info.batchable)
        least = min(capacities)
        log.info("%d ranks: %d MiB for requests and cache on each", len(capacities), least >> 20)
        return least

    def _gather(self, name: str, *, timeout_s: float) -> dict[int, Mapping[str, Any]]:
        """The mapping that each follower sends under this name."""
        answers = self._leader.gather(name, timeout_s=timeout_s)
        return {rank: call.args[0] for rank, call in answers.items()}

    def _n_sharing(self, node: str, has_own_memory: bool) -> int:
        """How many ranks share the memory of one's device; with memory of its own, it has its own."""
        return 1 if has_own_memory else self._nodes[node]

    # --- the parts -------------------------------------------------------------------------

    def make_runner(
        self, model: Any, info: ModelInfo, *, max_padding: int, **parts: Any
    ) -> LeaderRunner:
        """Ignores max_padding: all ranks must read and group rows in the same way, however much memory
        each has."""
        runner = LeaderRunner(model, info, **parts)
        self._mirror.row_of = runner.number_of
        return runner.lead(self._member.group, self._leader, self._mirror.take_fills)

    def make_cache(
        self, layout: Layout, settings: CacheSettings, *, fingerprint: bytes, dtype: str
    ) -> MirroredTree:
        mirrored = MirroredLayout.over(layout, self._mirror)
        return MirroredTree(
            mirrored,
            settings,
            fingerprint=fingerprint,
            dtype=dtype,
            flush=self._leader.flush,
        )

    def options_of(self, options: TierOptions) -> TierOptions:
        return replace(options, location=str(self._member.folder(Path(options.location))))

    def worker_over(self, own: TierWorker, tree: PrefixCache) -> RankWorker:
        return RankWorker(own, self._leader, self._mirror, layout=tree.records.identity.layout)

    # --- while it serves -------------------------------------------------------------------

    def watch(self, *, lost: Callable[[], object], asked: Callable[[], object]) -> None:
        self._leader.watch(lost=lost, asked=asked)

    def end(self) -> None:
        self._leader.end()
