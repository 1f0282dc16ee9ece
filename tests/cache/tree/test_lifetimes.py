"""Prefixes that a request has given a time to live."""

from __future__ import annotations

import gc

from firn.cache.tree import Node
from firn.core.ports import EngineLoad
from firn.core.values import CacheControl, Namespace
from tests.cache.lab import DENSE, LabLayer, LabRow, check_tree, prompt_of, records_of, tree

BLOCK = 8
TTL_S = 60.0


def test_a_block_costs_the_same_however_long_the_prompt_is() -> None:
    """Each block extends the lives of all before it, and none of those is queued again for that."""
    now = 0.0
    cache = tree(DENSE, block=BLOCK, clock=lambda: now)
    ids, row = list(range(1, 801)), LabRow(LabLayer([[]], DENSE))
    cursor = cache.open(prompt_of([*ids, 0]), Namespace(""), CacheControl(ttl_s=TTL_S))
    for at in range(0, len(ids), BLOCK):
        now += 1.0
        row.consume(ids[at : at + BLOCK])
        cursor.commit(row)
    lifetimes = cache.records.tree.lifetimes
    assert len(lifetimes._queue) == len(ids) // BLOCK
    cursor.close(None)
    now += TTL_S - 0.5
    assert list(lifetimes.expired()) == []
    now += 1.0
    while lifetimes._queue:
        cache.tick(EngineLoad.NONE)
    assert records_of(cache) == []
    check_tree(cache)


def test_a_tail_stays_in_a_block_that_expires_sooner() -> None:
    now = 0.0
    cache, ids = tree(DENSE, block=BLOCK, clock=lambda: now), list(range(1, 30))

    def say(n: int, ttl_s: float) -> None:
        row = LabRow(LabLayer([[]], DENSE))
        cursor = cache.open(prompt_of([*ids[:n], 0]), Namespace(""), CacheControl(ttl_s=ttl_s))
        row.consume(ids[:n])
        cursor.commit(row)
        cursor.close(row)

    say(12, 10 * TTL_S)
    say(2 * BLOCK, TTL_S)
    now = TTL_S + 1.0
    cache.tick(EngineLoad.NONE)
    assert cache.probe(prompt_of([*ids[:12], 0]), Namespace("")).match.n_tokens == 12
    check_tree(cache)


def test_what_was_evicted_is_not_remembered_until_its_time_is_over() -> None:
    cache = tree(DENSE, block=BLOCK, clock=lambda: 0.0, limit_nbytes=8 * 1000)
    for i in range(400):
        ids, row = [1000 * i + at for at in range(3 * BLOCK)], LabRow(LabLayer([[]], DENSE))
        cursor = cache.open(prompt_of([*ids, 0]), Namespace(""), CacheControl(ttl_s=30 * 86_400.0))
        row.consume(ids)
        cursor.commit(row)
        cursor.close(row)
    n_kept = len(records_of(cache))
    assert 0 < n_kept < 200
    (root,) = cache.records.tree.roots()
    nodes = [each for each in gc.get_objects() if isinstance(each, Node) and each.root is root]
    assert n_kept <= len(nodes) < 3 * n_kept + 200
    check_tree(cache)


def test_what_no_longer_expires_is_not_remembered_either() -> None:
    cache, ids = tree(DENSE, block=BLOCK, clock=lambda: 0.0), list(range(1, 300 * BLOCK))
    for ttl_s in (3600.0, None):
        row = LabRow(LabLayer([[]], DENSE))
        cursor = cache.open(prompt_of([*ids, 0]), Namespace(""), CacheControl(ttl_s=ttl_s))
        row.consume(ids)
        cursor.commit(row)
        cursor.close(row)
    assert len(cache.records.tree.lifetimes._queue) < 200
