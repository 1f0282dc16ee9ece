"""The tree as people see it: in slices that hold up nobody, in runs, bounded, and by namespace."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest

from firn.cache.admin import browse, control
from firn.cache.off import CacheOff
from firn.cache.parts import Part
from firn.cache.prefix import PrefixCache
from firn.cache.tree import CheckpointKind, Node
from firn.core.errors import BadRequest, NotFound
from firn.core.values import Namespace, PackedTokens
from tests.cache.lab import DENSE
from tests.cache.lab import tree as lab_tree
from tests.clocks import SetClock

BLOCK, NBYTES = 4, 100
ALICE, BOB = Namespace("alice"), Namespace("bob")


def store(cache: PrefixCache, tokens: Sequence[int], namespace: Namespace = ALICE) -> Node:
    """Add records for every block of these tokens, as if computed. Returns the last node."""
    records = cache.records
    node: Node = records.catalogue.root(namespace)
    text = PackedTokens(np.array(tokens, dtype=np.uint64))
    for start in range(0, len(tokens), BLOCK):
        node = records.tree.child(node, text, start, min(start + BLOCK, len(tokens)))
        if Part.PAGES not in node.records:
            record = records.tree.add(node, Part.PAGES, nbytes=NBYTES, kind=CheckpointKind.TURN)
            records.ledger.hold(record, object(), nbytes=NBYTES)
            records.memory.added(record)
        records.tree.use(node)
    return node


def admin_of(cache: PrefixCache | CacheOff, cap_nbytes: int = 1 << 30) -> Any:
    def run(function: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(function({}))
        except Exception as e:
            future.set_exception(e)
        return future

    return control.admin_of(cache, run, pin_cap_nbytes=cap_nbytes)


def finish(asked: Any) -> dict[str, Any]:
    while not asked.step().result():
        pass
    return dict(asked.answer())


def look(cache: PrefixCache, namespace: Namespace | None = None, **options: Any) -> dict[str, Any]:
    options = {"node": None, "limit": 100, "with_tokens": False, **options}
    node = options.pop("node")
    return finish(admin_of(cache).browse(namespace, node, **options))


@pytest.fixture
def cache() -> PrefixCache:
    return lab_tree(DENSE, block=BLOCK)


SHARED = list(range(1, 13))
"""Three blocks that both of the prompts below begin with."""
ONE, TWO = [*SHARED, 50, 51, 52, 53, 54], [*SHARED, 60, 61, 62, 63]


def test_runs_end_where_prompts_part(cache: PrefixCache) -> None:
    end_one, end_two = store(cache, ONE), store(cache, TWO)
    root, trunk, first, second = look(cache)["runs"]
    assert root["namespace"] == "alice"
    assert (trunk["start"], trunk["end"], trunk["ends"]) == (0, 12, 2)
    assert (trunk["bytes"], trunk["total_bytes"]) == (3 * NBYTES, 6 * NBYTES)
    assert (first["start"], first["end"], first["blocks"]) == (12, 17, 2)
    assert first["node"] == end_one.key.hex()
    assert second["node"] == end_two.key.hex()
    assert {first["above"], second["above"]} == {trunk["node"]}
    assert trunk["places"] == [3 * NBYTES]
    assert "tokens" not in trunk


def test_what_is_not_shown_is_told_of(cache: PrefixCache) -> None:
    for last in range(20):
        store(cache, [*SHARED, 100 + last])
    view = look(cache, limit=5)
    assert len(view["runs"]) == 5
    trunk = view["runs"][1]
    assert trunk["more"] == {"runs": 17, "bytes": 17 * NBYTES}
    assert view["nodes"] == 1 + 3 + 20
    below = look(cache, node=trunk["node"], limit=100)
    assert len(below["runs"]) == 21, "from a node on there is room for all of it"
    assert below["runs"][0]["node"] == trunk["node"]


def test_runs_are_named_by_where_they_part(cache: PrefixCache) -> None:
    """Siblings may begin with the same tokens of a block."""
    store(cache, [1, 2, 3, 4, 5, 6, 70, 71, 72])
    store(cache, [1, 2, 3, 4, 5, 6, 80, 81, 82])
    store(cache, [1, 2, 3, 4, 5, 90])
    store(cache, [1, 2, 3, 4, 5, 6])  # ends where others go on
    _, trunk, *runs = look(cache, with_tokens=True)["runs"]
    assert (trunk["parts_at"], trunk["tokens"]) == (0, [1, 2, 3, 4])
    shown = sorted((run["parts_at"], run["tokens"]) for run in runs)
    assert shown == [(4, [5, 6]), (5, [90]), (6, [70, 71, 72]), (6, [80, 81, 82])]


def test_a_large_tree_is_read_in_slices(cache: PrefixCache) -> None:
    for i, j in itertools.product(range(100), range(25)):
        store(cache, [i + 1, 7, 7, 7, j + 1, 8, 8, 8, 9, 9, 9, 9, 1, i + 1, j + 1, 2])
    ticking = itertools.count(step=browse.SLICE_S)
    reader = browse.TreeReader(
        None, None, limit=600, with_tokens=False, clock=SetClock(lambda: next(ticking))
    )
    n_slices, most, before = 0, 0, 0
    while not reader.step(cache):
        n_slices += 1
        most = max(most, len(reader._nodes) - before)
        before = len(reader._nodes)
    assert n_slices > 100
    assert most <= 2 * browse.N_UNCLOCKED, "a slice looks at the clock"
    answer = reader.answer()
    assert answer["nodes"] == 1 + 100 + 3 * 2500
    assert len(answer["runs"]) == 600
    assert not answer["cut_off"]


def test_nodes_that_go_while_it_is_read(cache: PrefixCache) -> None:
    store(cache, ONE)
    end = store(cache, TWO)
    ticking = itertools.count(step=1.0)
    reader = browse.TreeReader(
        None, None, limit=10, with_tokens=False, clock=SetClock(lambda: next(ticking))
    )
    while len(reader._nodes) < 1 + len(SHARED) // BLOCK:
        reader.step(cache)
    assert end in [node for node, _ in reader._todo or ()]
    cache.records.forget(end)
    while not reader.step(cache):
        pass
    answer = reader.answer()
    assert answer["nodes"] == 1 + 3 + 2
    assert [run["end"] for run in answer["runs"]] == [0, len(ONE)], "as if it had never been there"


def test_more_than_anybody_looks_at_is_cut_off(
    cache: PrefixCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(browse, "MAX_NODES", 20)
    for last in range(60):
        store(cache, [last + 1, 2, 3, 4])
    view = look(cache)
    assert view["cut_off"]
    assert view["nodes"] <= 20 + browse.N_UNCLOCKED


def test_a_namespace_sees_its_own(cache: PrefixCache) -> None:
    mine, theirs = store(cache, ONE, ALICE), store(cache, TWO, BOB)
    names = {run.get("namespace") for run in look(cache)["runs"]}
    assert {"alice", "bob"} <= names
    assert {run.get("namespace") for run in look(cache, BOB)["runs"]} == {"bob", None}
    admin = admin_of(cache)
    for call in (admin.node, admin.pin_node, admin.unpin_node):
        with pytest.raises(NotFound):
            call(BOB, mine.key.hex()).result()
    with pytest.raises(NotFound):
        finish(admin.forget_node(BOB, mine.key.hex()))
    with pytest.raises(NotFound):
        look(cache, BOB, node=mine.key.hex())
    with pytest.raises(NotFound):
        admin.node(None, "no key")
    assert admin.node(BOB, theirs.key.hex()).result()["tokens"] == len(TWO)


def test_a_prefix_says_what_it_saves_and_is_pinned(cache: PrefixCache) -> None:
    end = store(cache, ONE)
    admin = admin_of(cache)
    details = admin.node(ALICE, end.key.hex()).result()
    assert details["saves_s"] == pytest.approx(0.001 * len(ONE))
    assert details["bytes"] == 5 * NBYTES
    assert details["to_load_bytes"] == {}
    assert not details["pinned"]
    assert admin.pin_node(ALICE, end.key.hex()).result()["pinned"]
    assert [run["pins"] for run in look(cache)["runs"]] == [1, 1]
    trunk = end.parent
    assert trunk is not None
    assert admin.unpin_node(ALICE, trunk.key.hex()).result()["unpinned"] == 1
    assert end.n_pins == 0
    with pytest.raises(BadRequest, match="the limit is"):
        admin_of(cache, cap_nbytes=NBYTES).pin_node(ALICE, end.key.hex()).result()


def test_a_run_is_forgotten_with_all_below_but_for_what_is_in_use(cache: PrefixCache) -> None:
    one, two = store(cache, ONE), store(cache, TWO)
    trunk = one.parent.parent if one.parent else None
    assert trunk is not None
    cache.records.tree.lease(two)
    cache.records.pin(one)
    admin = admin_of(cache)
    kept = finish(admin.forget_node(ALICE, trunk.key.hex()))
    assert kept == {"forgotten_blocks": 0, "freed_bytes": 0, "kept_blocks": 6}
    cache.records.unpin(one)
    removal = finish(admin.forget_node(ALICE, trunk.key.hex()))
    assert removal == {"forgotten_blocks": 2, "freed_bytes": 2 * NBYTES, "kept_blocks": 4}
    cache.records.unlease(two)
    removal = finish(admin.forget_node(ALICE, two.key.hex()))
    assert removal["forgotten_blocks"] == 4, "its run begins where there is no branch any more"
    assert look(cache)["runs"] == []
    assert cache.records.ledger.memory.total_nbytes == 0


def test_a_large_subtree_is_listed_in_slices_before_it_is_forgotten(cache: PrefixCache) -> None:
    last = None
    for i in range(1000):
        last = store(cache, [*SHARED, 1 + i // 30, 1 + i % 30, 1, 1, 2, 2, 2, 2])
    assert last is not None
    trunk = next(n for n in last.path_to_root() if n.end == len(SHARED))
    ticking = itertools.count(step=browse.SLICE_S)
    removal = browse.SubtreeRemoval(ALICE, trunk.key, clock=SetClock(lambda: next(ticking)))
    most, before = 0, 0
    while not removal.step(cache):
        most = max(most, len(removal._todo) - before)
        before = len(removal._todo)
    assert 0 < most <= 2 * browse.N_UNCLOCKED, "a slice looks at the clock"
    assert removal.answer()["forgotten_blocks"] == 3 + 2 * 1000
    assert cache.records.ledger.memory.total_nbytes == 0


def test_tokens_of_a_run_begin_it(cache: PrefixCache) -> None:
    store(cache, ONE)
    (_, run) = look(cache, with_tokens=True)["runs"]
    assert run["tokens"] == ONE[: 2 * BLOCK]


def test_no_cache_no_tree() -> None:
    asked = admin_of(CacheOff("not today")).browse(None, None, limit=5, with_tokens=False)
    assert finish(asked) == {"enabled": False, "why": "not today"}
