"""One of two processes that compute a model of integers together, used at random.

    python -m tests.stories.rank KIND SEED N_ASKED      MLX's variables say which rank this is

Each rank computes one of the model's two heads. Rank 0 uses the engine, and compares replies and its own
slices of all records with the whole model; the other one compares its slices with that, too.
"""

from __future__ import annotations

import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np

from firn.cache.layout import Layout
from firn.cache.memory.rows import payload_of
from firn.cache.parts import Part
from firn.cache.prefix import CacheSettings, PrefixCache
from firn.cache.storage.orders import Worker
from firn.cache.storage.worker import TierWorker
from firn.cache.tiers import Tier
from firn.cache.tree import Node
from firn.core.ports import At
from firn.core.values import KeyTokens
from firn.ranks.cache.mirror import Mirror, MirroredLayout, number_of
from firn.ranks.cache.slices import Identity, Slices
from firn.ranks.cache.tree import MirroredTree
from firn.ranks.cache.worker import RankWorker
from firn.ranks.calls import RankCall
from firn.ranks.group import RankGroup
from firn.ranks.joining import RankMember, form
from firn.ranks.leader import Leader
from firn.ranks.runner import FollowerRunner, LeaderRunner
from firn.ranks.serve import FollowerLoop
from tests.audit import Past, distance
from tests.dict_tier import DictTier
from tests.harness import model_info
from tests.models.integers import full, integers, state, window
from tests.stories.random_use import MAX_ROWS, Kind, Used, WatchedRunner, use_up
from tests.stories.said import Reader

N_HEADS = 2
KINDS: dict[str, tuple[tuple[Callable[[], Any], ...], dict[str, Any]]] = {
    "dense": ((full, full), {}),
    "window": ((window(44), full), {}),
    "hybrid": ((full, state), {}),
    "dense, short of memory": ((full, full), {"memory_tokens": 1500}),
    "exact reuse": ((full, state), {"is_exact": True}),
}
"""The layers of each, and how its cache is used."""
FINGERPRINT = b"model"


def whole(name: str) -> Kind:
    layers, options = KINDS[name]
    return Kind(integers(*layers, heads=range(N_HEADS)), **options)


def sliced(name: str, group: RankGroup) -> Kind:
    """The kind as this rank computes it."""
    layers, _ = KINDS[name]
    return replace(whole(name), build=integers(*layers, heads=[group.rank], add=group.add))


# --- rank 0 ------------------------------------------------------------------------------------


class WatchedLeader(WatchedRunner, LeaderRunner):
    pass


class UsedTogether(Used):
    def __init__(self, name: str, group: RankGroup, leader: Leader) -> None:
        self._name, self._group, self._leader = name, group, leader
        self._mirror = Mirror(leader)
        super().__init__(sliced(name, group), None)

    def make_runner(self, *args: Any, **options: Any) -> WatchedRunner:
        runner = WatchedLeader(*args, **options)
        self._mirror.row_of = runner.number_of
        runner.lead(self._group, self._leader, self._mirror.take_fills)
        return runner

    def make_cache(self, layout: Layout, settings: CacheSettings) -> PrefixCache:
        mirrored = MirroredLayout.over(layout, self._mirror)
        return MirroredTree(
            mirrored,
            settings,
            fingerprint=FINGERPRINT,
            dtype="rank 0",
            flush=self._leader.flush,
        )

    def make_worker(self, tier: Tier) -> Worker:
        layout = self.cache.records.identity.layout
        return RankWorker(TierWorker(tier), self._leader, self._mirror, layout=layout)

    def reader(self) -> Reader:
        return whole(self._name).reader(self.prompts)

    def own_layers(self, layers: list[Any]) -> list[Any]:
        return layers[self._group.rank :: N_HEADS]

    def check(self) -> int:
        n_compared = super().check()
        self._leader.flush()
        for root in self.cache.records.tree.roots():
            for node, chain in _chains(root, np.zeros(0, dtype=np.uint64)):
                for part, record in node.records.items():
                    if record.arrays is not None:
                        number = number_of(payload_of(record))
                        ids = self.prompts.of_keys(chain).ids.tolist()
                        self._leader.tell("compare", number, part.value, node.start, ids)
        return n_compared


def _chains(parent: Node, before: KeyTokens) -> Iterator[tuple[Node, KeyTokens]]:
    for node in list(parent.children):
        chain = np.concatenate([before, node.tokens])
        yield node, chain
        yield from _chains(node, chain)


def lead(name: str, member: RankMember, seed: int, n_asked: int) -> None:
    leader = member.leader
    assert leader is not None
    with UsedTogether(name, member.group, leader) as used:
        use_up(used, seed, n_asked)
        results = [asked.result for asked in used.asked]
        assert sum(result.n_cached for result in results) > 5 * len(results)
    leader.end()


# --- the other one -----------------------------------------------------------------------------


class ComparingRunner(FollowerRunner):
    """Compares its slices of records, too, if rank 0 asks for it."""

    def compare_with(self, reader: Reader, layout: Layout, slices: Slices) -> None:
        self._reader, self._layout, self._slices = reader, layout, slices

    def on_compare(self, number: int, part: str, start: int, ids: list[int]) -> None:
        chain = np.array(ids, dtype=np.uint64)
        past = self._reader(chain, Past(self._reader.make_layers()))
        own = past.layers[self.group.rank :: N_HEADS]
        want = self._layout.cut(Part(part), own, At(0, len(chain)), start, len(chain))
        ((_, (got,)),) = self._slices.prefix([(part, [number], len(chain))], len(chain)).pieces
        assert distance(got, want, is_exact=True) == 0, f"{part} of [{start}, {len(chain)})"


def follow(name: str, member: RankMember) -> None:
    follower = member.follower
    assert follower is not None
    kind = sliced(name, member.group)
    model, make_layers = kind.build()
    info = model_info(model, make_layers)
    runner = ComparingRunner(model, info, make_layers=make_layers, max_rows=MAX_ROWS)
    runner.follow(member.group)
    probe = make_layers()
    model(mx.array([[1]]), cache=probe)
    layout = Layout.of(probe)
    settings = CacheSettings(0, kind.block, 64 if kind.is_exact else 0)
    worker = TierWorker(DictTier(1 << 40), wake=lambda: follower.put(RankCall("poll")))
    slices = Slices(
        layout,
        Identity(FINGERPRINT, settings.layout_text(layout, "rank 1")),
        answer=follower.answer,
        worker=worker if kind.memory_tokens else None,
    )
    runner.compare_with(whole(name).reader(kind.prompts()), layout, slices)
    follower.begin()
    FollowerLoop(follower, runner, slices).run()


def main() -> None:
    name, seed, n_asked = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    logging.basicConfig(level=logging.WARNING)
    try:
        member = form()
        if member.leader is not None:
            lead(name, member, seed, n_asked)
        else:
            follow(name, member)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # a normal exit waits for ranks that may be gone


if __name__ == "__main__":
    main()
