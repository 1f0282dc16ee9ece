"""Who leaves memory first, and who never does."""

from __future__ import annotations

import random
from collections.abc import Sequence

import mlx.core as mx
import numpy as np
import pytest

from firn.cache.index import Mark, Node, Record
from firn.cache.parts import Part
from firn.cache.pool import STATE_SHARE
from firn.cache.prefix import PrefixTree
from firn.core.values import Namespace
from tests.cache.lab import DENSE, HYBRID, WINDOWED, check_tree, records_of, tree

BLOCK = 8


def node_of(cache: PrefixTree, blocks: Sequence[int]) -> Node:
    """The node at the end of a chain of blocks, each full of one number."""
    node = cache.held.root(Namespace(""))
    for block in blocks:
        node = cache.held.index.child(node, np.full(BLOCK, block, dtype=np.uint64))
    return node


def put(
    cache: PrefixTree,
    blocks: Sequence[int],
    part: Part = Part.PAGES,
    *,
    nbytes: int = 100,
    mark: Mark = Mark.TURN,
) -> Record | None:
    node = node_of(cache, blocks)
    with cache.held.leased(node):
        return cache.held.add(node, part, [(mx.zeros(nbytes, dtype=mx.uint8),)], mark)


def kept(cache: PrefixTree) -> set[int]:
    """The last number of each chain that is held."""
    return {int(r.node.values[0]) for r in records_of(cache)}


def test_the_least_recently_used_goes_first() -> None:
    cache = tree(DENSE, limit_nbytes=300)
    for i in (1, 2, 3):
        put(cache, [i])
    cache.held.pool.touch(node_of(cache, [1]).records.values())
    put(cache, [4])
    assert kept(cache) == {1, 3, 4}
    cache.held.pool.touch(node_of(cache, [3]).records.values())
    put(cache, [5])
    put(cache, [6])
    assert kept(cache) == {3, 5, 6}


def test_least_recently_used_as_a_list_would_have_it() -> None:
    """Records of equal worth, touched at random, against a list in order of use."""
    rng = random.Random(5)
    cache, order = tree(DENSE, limit_nbytes=20 * 100), []
    for i in range(1, 400):
        if order and rng.random() < 0.6:
            used = rng.choice(order)
            order.append(order.pop(order.index(used)))
            cache.held.pool.touch(node_of(cache, [used]).records.values())
        else:
            put(cache, [i])
            order.append(i)
            del order[:-20]
        assert kept(cache) == set(order)
    check_tree(cache)


def test_what_is_cheap_to_compute_again_goes_before_what_is_dear() -> None:
    cache = tree(DENSE, limit_nbytes=1000)
    put(cache, [1], nbytes=100)
    put(cache, [2], nbytes=600)  # as many tokens, six times the bytes
    cache.held.pool.touch(node_of(cache, [2]).records.values())
    put(cache, [3], nbytes=400)
    assert kept(cache) == {1, 3}


def test_what_was_dear_ages_too() -> None:
    cache = tree(DENSE, limit_nbytes=1000)
    put(cache, [1], nbytes=50)
    for i in range(2, 200):
        put(cache, [i], nbytes=200)
    assert 1 not in kept(cache), "used once, long ago: worth does not last for ever"


def test_a_chain_goes_from_its_end() -> None:
    cache = tree(DENSE, limit_nbytes=500)
    for i in range(1, 6):
        put(cache, range(1, i + 1))
    for i, want in ((6, {1, 2, 3, 4, 6}), (7, {1, 2, 3, 6, 7})):
        put(cache, [i])
        assert kept(cache) == want
        check_tree(cache)
    assert cache.held.pool.shrink_to(0)
    assert records_of(cache) == []


def test_a_branch_keeps_its_trunk() -> None:
    cache = tree(DENSE, limit_nbytes=600)
    for chain in ([1], [1, 2], [1, 2, 3], [1, 2, 4], [1, 2, 5]):
        put(cache, chain)
    put(cache, [9], nbytes=300)
    assert kept(cache) == {1, 2, 5, 9}
    check_tree(cache)


@pytest.mark.parametrize("shape", [DENSE, WINDOWED, HYBRID])
def test_leased_pages_stay_and_so_does_all_above_them(shape: object) -> None:
    cache = tree(shape, limit_nbytes=500)  # type: ignore[arg-type]
    for i in range(1, 5):
        put(cache, range(1, i + 1))
    leaf = node_of(cache, [1, 2, 3, 4])
    cache.held.lease(leaf)
    assert not cache.held.pool.shrink_to(0)
    assert kept(cache) == {1, 2, 3, 4}
    assert put(cache, [9], nbytes=101) is None
    assert put(cache, [9], nbytes=100) is not None
    assert cache.held.pool.held.total_nbytes == 500
    cache.held.unlease(leaf)
    assert cache.held.pool.shrink_to(0)
    check_tree(cache)


def test_pinned_records_of_every_part_stay() -> None:
    cache = tree(HYBRID, limit_nbytes=1000)
    put(cache, [1])
    put(cache, [1], Part.STATE)
    node = node_of(cache, [1])
    node.n_pins = 1
    assert not cache.held.pool.shrink_to(0)
    assert set(node.records) == {Part.PAGES, Part.STATE}
    assert put(cache, [2], Part.STATE, nbytes=450) is None, "the pinned state takes its share"
    node.n_pins = 0
    cache.held.pool.rejoin(node)
    assert cache.held.pool.shrink_to(0)


def test_a_leased_record_of_any_part_stays() -> None:
    cache = tree(HYBRID, limit_nbytes=1000)
    put(cache, [1])
    put(cache, [1, 2])
    put(cache, [1, 2], Part.STATE)
    put(cache, [3])
    leased = list(node_of(cache, [1, 2]).records.values())
    for record in leased:
        record.n_leases += 1
    assert not cache.held.pool.shrink_to(0)
    assert kept(cache) == {1, 2}
    assert all(r.payload is not None for r in leased)
    check_tree(cache)


def test_pages_take_their_node_along() -> None:
    cache = tree(HYBRID, limit_nbytes=1000)
    put(cache, [1])
    put(cache, [1], Part.STATE)
    cache.held.pool.evict(node_of(cache, [1]).records[Part.PAGES])
    assert records_of(cache) == []
    assert list(cache.held.index.nodes()) == []


# --- states --------------------------------------------------------------------------------


def test_states_have_a_share_and_pages_do_not_give_way_to_them() -> None:
    cache = tree(HYBRID, limit_nbytes=1000)
    for i in range(1, 6):
        put(cache, [i])
    for i in range(1, 6):
        put(cache, [i], Part.STATE, nbytes=200)
        held = cache.held.pool.held.nbytes
        assert held[Part.STATE] <= 1000 * STATE_SHARE
        assert held[Part.PAGES] == 500
    assert [n for n in range(1, 6) if node_of(cache, [n]).has(Part.STATE)] == [4, 5]


def test_a_state_larger_than_its_share_costs_nobody_anything() -> None:
    cache = tree(HYBRID, limit_nbytes=1000)
    for i in (1, 2, 3):
        put(cache, [i])
        put(cache, [i], Part.STATE, nbytes=100)
    before = set(records_of(cache))
    assert put(cache, [3, 4], Part.STATE, nbytes=501) is None
    assert set(records_of(cache)) == before


def test_states_that_will_not_be_asked_for_again_are_thinned_first() -> None:
    cache = tree(HYBRID, limit_nbytes=10_000)
    marks = [Mark.SHARED, Mark.PROMPT_END, Mark.BRANCH, Mark.LATTICE, Mark.TURN, Mark.REPLY_END]
    for i, mark in enumerate(marks, start=1):
        put(cache, [i])
        put(cache, [i], Part.STATE, nbytes=800, mark=mark)
    order = []
    for i in range(7, 12):
        before = {r.mark for r in records_of(cache) if r.part is Part.STATE}
        put(cache, [i])
        put(cache, [i], Part.STATE, nbytes=800, mark=Mark.SHARED)
        after = {r.mark for r in records_of(cache) if r.part is Part.STATE}
        order += list(before - after)
    assert order[0] is Mark.PROMPT_END
    assert set(order[1:3]) == {Mark.TURN, Mark.REPLY_END}
    assert set(order[3:]) <= {Mark.BRANCH, Mark.LATTICE}


# --- the books -----------------------------------------------------------------------------


def test_many_touches_do_not_grow_the_heap() -> None:
    cache = tree(DENSE, limit_nbytes=1000)
    for i in range(1, 11):
        put(cache, [i])
    for _ in range(1000):
        cache.held.pool.touch(records_of(cache))
    assert len(cache.held.pool._heap) < 500
    put(cache, [11])
    check_tree(cache)


def test_the_room_shrinks_and_grows() -> None:
    cache = tree(DENSE, limit_nbytes=1000)
    for i in range(1, 11):
        put(cache, [i])
    cache.set_room(350)
    assert kept(cache) == {8, 9, 10}
    cache.set_room(-5)
    assert kept(cache) == set()
    assert put(cache, [1]) is None
    cache.set_room(1 << 60)
    assert cache.held.pool.limit_nbytes == 1000, "never more than it was given"
    for i in range(1, 11):
        assert put(cache, [i])
    check_tree(cache)
