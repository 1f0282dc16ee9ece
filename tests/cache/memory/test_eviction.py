"""What leaves memory first, and what never does."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from itertools import count

import mlx.core as mx
import numpy as np
import pytest

from firn.cache import records
from firn.cache.arrays.payload import Payload
from firn.cache.memory.eviction import STATE_SHARE
from firn.cache.parts import Part
from firn.cache.prefix import PrefixCache
from firn.cache.storage.desk import Reported
from firn.cache.tree import CheckpointKind, Node, Record
from firn.core.ports import EngineLoad
from firn.core.values import Namespace, PackedTokens
from tests.cache.lab import DENSE, HYBRID, WINDOWED, Shape, check_tree, nodes_of, records_of, tree
from tests.cache.test_cache_over_tier import DictWorker

BLOCK = 8


def memory(shape: Shape, limit_nbytes: int) -> PrefixCache:
    """A cache whose wall clock advances by ten minutes each time it is read."""
    ticks = count(1)
    return tree(shape, limit_nbytes=limit_nbytes, wall=lambda: next(ticks) * 600.0)


def node_of(cache: PrefixCache, blocks: Sequence[int]) -> Node:
    """The node at the end of a chain of blocks, each full of one number."""
    node: Node = cache.records.catalogue.root(Namespace(""))
    for block in blocks:
        text = PackedTokens(np.full(BLOCK, block, dtype=np.uint64))
        node = cache.records.tree.child(node, text, 0, BLOCK)
    return node


def put(
    cache: PrefixCache,
    blocks: Sequence[int],
    part: Part = Part.PAGES,
    *,
    nbytes: int = 100,
    kind: CheckpointKind = CheckpointKind.TURN,
) -> Record | None:
    node = node_of(cache, blocks)
    cache.records.tree.lease(node)
    try:
        cache.records.tree.use(node)
        arrays = Payload((mx.zeros((1, nbytes), dtype=mx.uint8),), (((0, 0),),))
        return node.records[part] if cache.records.keep(node, part, arrays, kind, []) else None
    finally:
        cache.records.unlease(node)


def touch(cache: PrefixCache, blocks: Sequence[int]) -> None:
    cache.records.used(node_of(cache, blocks))


def kept(cache: PrefixCache) -> set[int]:
    """The last number of each chain that is held."""
    return {int(r.node.tokens[0]) for r in records_of(cache)}


def test_the_least_recently_used_goes_first() -> None:
    cache = memory(DENSE, 300)
    for i in (1, 2, 3):
        put(cache, [i])
    touch(cache, [1])
    put(cache, [4])
    assert kept(cache) == {1, 3, 4}
    touch(cache, [3])
    put(cache, [5])
    put(cache, [6])
    assert kept(cache) == {3, 5, 6}


def test_least_recently_used_as_a_list_would_have_it() -> None:
    """Records of equal worth, touched at random, against a list in order of use."""
    rng = random.Random(5)
    cache, order = memory(DENSE, 20 * 100), []
    for i in range(1, 400):
        if order and rng.random() < 0.6:
            used = rng.choice(order)
            order.append(order.pop(order.index(used)))
            touch(cache, [used])
        else:
            put(cache, [i])
            order.append(i)
            del order[:-20]
        assert kept(cache) == set(order)
    check_tree(cache)


def test_how_often_something_was_used_counts_for_nothing() -> None:
    cache = memory(DENSE, 300)
    put(cache, [1])
    for _ in range(50):
        touch(cache, [1])
    for i in (2, 3, 4):
        put(cache, [i])
    assert kept(cache) == {2, 3, 4}, "a long conversation that has ended goes before a new one"


def test_a_chain_goes_from_its_end() -> None:
    cache = memory(DENSE, 500)
    for i in range(1, 6):
        put(cache, range(1, i + 1))
    for i, want in ((6, {1, 2, 3, 4, 6}), (7, {1, 2, 3, 6, 7})):
        put(cache, [i])
        assert kept(cache) == want
        check_tree(cache)
    assert cache.records.memory.shrink_to(0)
    assert records_of(cache) == []


def test_a_branch_keeps_its_trunk() -> None:
    cache = memory(DENSE, 600)
    for chain in ([1], [1, 2], [1, 2, 3], [1, 2, 4], [1, 2, 5]):
        put(cache, chain)
    put(cache, [9], nbytes=300)
    assert kept(cache) == {1, 2, 5, 9}
    check_tree(cache)


@pytest.mark.parametrize("shape", [DENSE, WINDOWED, HYBRID])
def test_leased_pages_stay_and_so_does_all_above_them(shape: Shape) -> None:
    cache = memory(shape, 500)
    for i in range(1, 5):
        put(cache, range(1, i + 1))
    leaf = node_of(cache, [1, 2, 3, 4])
    cache.records.tree.lease(leaf)
    assert not cache.records.memory.shrink_to(0)
    assert kept(cache) == {1, 2, 3, 4}
    assert put(cache, [9], nbytes=101) is None
    assert put(cache, [9], nbytes=100) is not None
    assert cache.records.memory.nbytes == 500
    cache.records.unlease(leaf)
    assert cache.records.memory.shrink_to(0)
    check_tree(cache)


def test_a_block_that_comes_does_not_ask_for_every_leased_one_again() -> None:
    """One row is long and idle; another grows, in a memory that is full."""
    cache = memory(DENSE, 200 * 100)
    long = list(range(1, 101))
    for n in range(1, 101):
        put(cache, long[:n])
    leaf = node_of(cache, long)
    cache.records.tree.lease(leaf)
    for i in range(1000, 1100):
        put(cache, [i])
    n_asked, may_evict = 0, cache.records.tree.may_evict

    def counted(record: Record) -> bool:
        nonlocal n_asked
        n_asked += 1
        return may_evict(record)

    cache.records.tree.may_evict = counted  # type: ignore[method-assign]
    growing = list(range(200, 220))
    for n in range(1, 21):
        cache.records.tree.lease(node_of(cache, growing[:n]))  # as a request's cursor does
        assert put(cache, growing[:n])
    assert n_asked < 100 + 2 * 20, "once for each that is leased, then for those that go"
    cache.records.unlease(leaf)
    assert cache.records.memory.shrink_to(20 * 100)
    assert kept(cache) == set(growing)
    check_tree(cache)


def test_pinned_records_of_every_part_stay() -> None:
    cache = memory(HYBRID, 1000)
    put(cache, [1])
    put(cache, [1], Part.STATE)
    node = node_of(cache, [1])
    cache.records.tree.pin(node)
    assert not cache.records.memory.shrink_to(0)
    assert set(node.records) == {Part.PAGES, Part.STATE}
    assert put(cache, [2], Part.STATE, nbytes=450) is None, "the pinned state takes its share"
    cache.records.unpin(node)
    assert cache.records.memory.shrink_to(0)


def test_a_leased_record_of_any_part_stays() -> None:
    cache = memory(HYBRID, 1000)
    put(cache, [1])
    put(cache, [1, 2])
    put(cache, [1, 2], Part.STATE)
    put(cache, [3])
    leased = [r for n in node_of(cache, [1, 2]).path() for r in n.records.values()]
    for record in leased:
        cache.records.ledger.lease(record)
    assert not cache.records.memory.shrink_to(0)
    assert kept(cache) == {1, 2}
    assert all(r.arrays is not None for r in leased)
    check_tree(cache)


def test_pages_take_their_node_along() -> None:
    cache = memory(HYBRID, 1000)
    put(cache, [1])
    put(cache, [1], Part.STATE)
    cache.records.index.remove_lost(node_of(cache, [1]).records[Part.PAGES])
    assert records_of(cache) == []
    assert list(nodes_of(cache.records.tree)) == []


# --- windows -------------------------------------------------------------------------------

WIDE = Shape(window=20)
"""A resume reads the windows of the last three blocks, or of four around its position."""


def put_windows(cache: PrefixCache, blocks: Sequence[int]) -> None:
    """A chain with pages and windows, whose blocks are committed one after the other."""
    for n in range(1, len(blocks) + 1):
        put(cache, blocks[:n])
        put(cache, blocks[:n], Part.WINDOW)
    touch(cache, blocks)


def with_windows(cache: PrefixCache) -> set[int]:
    return {int(r.node.tokens[0]) for r in records_of(cache) if r.part is Part.WINDOW}


def test_windows_that_a_chain_has_left_behind_go_first() -> None:
    """Before anything that somebody may resume from, even if that was used earlier."""
    cache = memory(WIDE, 1700)
    put(cache, [50])
    put_windows(cache, range(1, 9))
    for i in range(51, 56):
        assert with_windows(cache) == set(range(i - 50, 9)), "the furthest goes first"
        put(cache, [i])
    assert kept(cache) == {*range(1, 9), *range(50, 56)}
    put(cache, [56])
    assert kept(cache) == {*range(1, 9), *range(51, 57)}, "then what was used least recently"
    assert with_windows(cache) == {6, 7, 8}
    check_tree(cache)


def test_windows_before_a_branch_stay() -> None:
    cache = memory(WIDE, 3200)
    put_windows(cache, range(1, 9))
    put_windows(cache, [1, 2, 3, 4, *range(11, 15)])
    for i in range(100, 100 + (3200 - 2400) // 100 + 3):
        put(cache, [i])
    assert with_windows(cache) == {2, 3, 4, 6, 7, 8, 12, 13, 14}
    check_tree(cache)


def test_windows_at_a_point_where_others_will_branch_off_stay() -> None:
    cache = memory(WIDE, 1600)
    put_windows(cache, range(1, 9))
    cache.records.keep_window(node_of(cache, [1, 2, 3]), 24, CheckpointKind.BRANCH)
    for i in (50, 51):
        put(cache, [i])
    assert with_windows(cache) == {1, 2, 3, 6, 7, 8}


# --- states --------------------------------------------------------------------------------


def test_of_the_states_of_a_chain_the_first_goes_first() -> None:
    """Who goes back in a conversation goes back a few turns. All of them were used together."""
    cache = tree(HYBRID, limit_nbytes=1000, wall=lambda: 600.0)
    for n in range(1, 6):
        put(cache, range(1, n + 1), nbytes=10)
        put(cache, range(1, n + 1), Part.STATE)
    for i in (50, 51):
        put(cache, [i], Part.STATE)
    assert [n for n in range(1, 6) if Part.STATE in node_of(cache, range(1, n + 1)).records] == [
        3,
        4,
        5,
    ]


def test_states_have_a_share_and_pages_do_not_give_way_to_them() -> None:
    cache = memory(HYBRID, 1000)
    for i in range(1, 6):
        put(cache, [i])
    for i in range(1, 6):
        put(cache, [i], Part.STATE, nbytes=200)
        held = cache.records.ledger.memory.nbytes
        assert held[Part.STATE] <= 1000 * STATE_SHARE
        assert held[Part.PAGES] == 500
    assert [n for n in range(1, 6) if Part.STATE in node_of(cache, [n]).records] == [4, 5]


def test_a_state_larger_than_its_share_costs_nobody_anything() -> None:
    cache = memory(HYBRID, 1000)
    for i in (1, 2, 3):
        put(cache, [i])
        put(cache, [i], Part.STATE, nbytes=100)
    before = set(records_of(cache))
    assert put(cache, [3, 4], Part.STATE, nbytes=501) is None
    assert set(records_of(cache)) == before


def test_states_that_will_not_be_asked_for_again_are_thinned_first() -> None:
    cache = memory(HYBRID, 10_000)
    kinds = [
        CheckpointKind.SHARED,
        CheckpointKind.PROMPT_END,
        CheckpointKind.BRANCH,
        CheckpointKind.LATTICE,
        CheckpointKind.TURN,
        CheckpointKind.REPLY_END,
    ]
    for i, kind in enumerate(kinds, start=1):
        put(cache, [i])
        put(cache, [i], Part.STATE, nbytes=800, kind=kind)
    order = []
    for i in range(7, 12):
        before = {r.kind for r in records_of(cache) if r.part is Part.STATE}
        put(cache, [i])
        put(cache, [i], Part.STATE, nbytes=800, kind=CheckpointKind.SHARED)
        after = {r.kind for r in records_of(cache) if r.part is Part.STATE}
        order += list(before - after)
    assert order[0] is CheckpointKind.PROMPT_END
    assert set(order[1:3]) == {CheckpointKind.TURN, CheckpointKind.REPLY_END}
    assert set(order[3:]) <= {CheckpointKind.BRANCH, CheckpointKind.LATTICE}


# --- the books -----------------------------------------------------------------------------


def test_many_uses_do_not_grow_the_heap() -> None:
    cache = memory(DENSE, 1000)
    for i in range(1, 2000):
        put(cache, [i])
        touch(cache, [max(i - 3, 1)])
    assert len(cache.records.memory._all) < 500
    check_tree(cache)


def test_a_loaded_chain_with_holes_can_go() -> None:
    cache = memory(DENSE, 10_000)
    for i in range(1, 14):
        put(cache, range(1, i + 1))
    hole = node_of(cache, range(1, 10)).records[Part.PAGES]
    cache.records.ledger.release(hole)
    assert cache.records.memory.shrink_to(0)
    assert cache.records.memory.nbytes == 0


def test_the_room_shrinks_and_grows() -> None:
    cache = memory(DENSE, 1000)
    for i in range(1, 11):
        put(cache, [i])
    cache.set_room(350)
    assert kept(cache) == {8, 9, 10}
    cache.set_room(-5)
    assert kept(cache) == set()
    assert put(cache, [1]) is None
    cache.set_room(1 << 60)
    assert cache.records.memory.limit_nbytes == 1000, "never more than it was given"
    for i in range(1, 11):
        assert put(cache, [i])
    check_tree(cache)


# --- what a tier has not written yet -------------------------------------------------------


def unwritten(
    n_blocks: int, *, clock: Callable[[], float] = lambda: 0.0
) -> tuple[PrefixCache, DictWorker]:
    """A cache whose records wait for a tier that does nothing until it is told to."""
    cache, io = tree(DENSE, block=BLOCK, clock=clock), DictWorker(Part.PAGES)
    cache.add_tier("ssd", io, namespaces=[Namespace("")])
    for n in range(1, n_blocks + 1):
        record = put(cache, range(1, n + 1))
        assert record is not None
        cache.records.extend_life(record.node, None)
    return cache, io


def test_only_what_no_tier_takes_is_counted_as_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "WRITE_WAIT_S", 0.0)
    cache, io = unwritten(15)
    cache.set_room(0)
    n_accepted = len(io.orders)
    assert 0 < n_accepted < 15
    assert cache.stats.dropped == {"write queue full": 15 - n_accepted}
    while io.orders:
        io.orders.popleft()("well")
    cache.tick(EngineLoad.NONE)
    assert len(io.stored) == n_accepted
    assert sum(r.is_stored(0) for r in records_of(cache)) == n_accepted


def test_all_that_leaves_together_waits_once_for_a_tier_that_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    cache, _ = unwritten(10, clock=lambda: now[0])

    def nothing_is_written(timeout_s: float) -> Sequence[Reported]:
        now[0] += timeout_s
        return ()

    monkeypatch.setattr(cache.records.tiers, "take_writes", nothing_is_written)
    cache.set_room(0)
    assert now[0] == pytest.approx(records.WRITE_WAIT_S)
    cache.set_room(1 << 30)
    assert now[0] == pytest.approx(records.WRITE_WAIT_S)


def test_all_that_leaves_together_waits_for_a_tier_that_writes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [0.0]
    cache, io = unwritten(10, clock=lambda: now[0])
    (tier,) = cache.records.tiers

    def one_is_written(timeout_s: float) -> Iterator[Reported]:
        took_s = 0.8 * records.WRITE_WAIT_S
        if io.orders and took_s <= timeout_s:
            now[0] += took_s
            io.orders.popleft()("well")
            yield from ((tier, event) for event in tier.take_events(math.inf))

    monkeypatch.setattr(cache.records.tiers, "take_writes", one_is_written)
    cache.set_room(0)
    assert not cache.stats.dropped
    assert now[0] > 3 * records.WRITE_WAIT_S
