"""Rows that commit in one step: copies that are not awaited are dispatched together."""

from __future__ import annotations

from collections.abc import Iterable

import mlx.core as mx
import pytest

from firn.cache import copies
from firn.cache.arrays import payload
from firn.cache.arrays.payload import Payload
from firn.cache.prefix import PrefixCache, PrefixCursor
from firn.core.values import CacheControl, Namespace
from tests.cache.lab import DENSE, LabLayer, LabRow, check_tree, prompt_of, records_of, tree
from tests.cache.tiny import tiny
from tests.harness import running
from tests.hash_runner import prompt_of as words

BLOCK = 8
EVERYONE = Namespace("")


class Device:
    """A device whose copies are not awaited. Notes how many stacks each dispatch had; the next one
    raises `fault`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.dispatched: list[int] = []
        self.fault: Exception | None = None
        monkeypatch.setattr(copies, "copies_are_awaited", lambda: False)
        monkeypatch.setattr(copies, "evaluate", self._evaluate)

    def _evaluate(self, payloads: Iterable[Payload]) -> None:
        fault, self.fault = self.fault, None
        if fault is not None:
            raise fault
        stacks = [stack for p in payloads for stack in p.stacks]
        if stacks:
            self.dispatched.append(len(stacks))
            mx.eval(stacks)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    return Device(monkeypatch)


def opened(cache: PrefixCache, seed: int, n_tokens: int = 2 * BLOCK) -> tuple[PrefixCursor, LabRow]:
    """A prompt that was read up to its last token."""
    ids = words(seed, n_tokens + 1)
    cursor = cache.open(prompt_of(ids), EVERYONE, CacheControl())
    assert isinstance(cursor, PrefixCursor)
    row = LabRow(LabLayer([[]], DENSE))
    row.consume(ids[:-1])
    return cursor, row


def commit(cursor: PrefixCursor, row: LabRow) -> None:
    cursor.commit(row)


def n_cached(cache: PrefixCache, seed: int) -> int:
    return cache.probe(prompt_of(words(seed, 2 * BLOCK + 1)), EVERYONE).match.n_tokens


def test_all_that_rows_commit_in_a_step_is_dispatched_once(device: Device) -> None:
    cache = tree(DENSE, block=BLOCK)
    with cache.together():
        for seed in (1, 2, 3):
            commit(*opened(cache, seed))
        assert device.dispatched == []
    assert device.dispatched == [6]
    assert [n_cached(cache, seed) for seed in (1, 2, 3)] == [2 * BLOCK] * 3
    check_tree(cache)


def test_ends_and_blocks_go_together_and_the_outermost_counts(device: Device) -> None:
    cache = tree(DENSE, block=BLOCK)
    with cache.together():
        commit(*opened(cache, 1))
        with cache.together():
            cursor, row = opened(cache, 2, 2 * BLOCK - 3)
            cursor.close(row)
        assert device.dispatched == []
    assert device.dispatched == [4], "two blocks, a block and a tail"


def test_without_it_each_commit_is_dispatched_by_itself(device: Device) -> None:
    cache = tree(DENSE, block=BLOCK)
    commit(*opened(cache, 1))
    commit(*opened(cache, 2))
    assert device.dispatched == [2, 2]


def test_where_copies_are_awaited_they_do_not_pile_up(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "copies_are_awaited", lambda: True)
    cache = tree(DENSE, block=BLOCK)
    with cache.together():
        commit(*opened(cache, 1))
        assert device.dispatched == [2]


def test_a_fault_costs_the_commits_of_that_step_and_no_more(device: Device) -> None:
    cache = tree(DENSE, block=BLOCK)
    commit(*opened(cache, 1))
    device.fault = RuntimeError("out of memory")
    with cache.together():
        lost = [opened(cache, seed) for seed in (2, 3)]
        for cursor, row in lost:
            cursor.commit(row)
    assert [n_cached(cache, seed) for seed in (1, 2, 3)] == [2 * BLOCK, 0, 0]
    assert cache.stats.faults == {"commit": 1}
    assert not any(cursor.writes for cursor, _ in lost), "their chains have a hole"
    assert len(records_of(cache)) == 2
    with cache.together():
        commit(*opened(cache, 2))
    assert n_cached(cache, 2) == 2 * BLOCK


def test_all_of_a_step_is_in_doubt_until_the_device_confirms_it(device: Device) -> None:
    cache = tree(DENSE, block=BLOCK)
    commit(*opened(cache, 1))
    cache.confirm()
    with cache.together():
        for seed in (2, 3):
            commit(*opened(cache, seed))
    cache.discard_unconfirmed()
    assert [n_cached(cache, seed) for seed in (1, 2, 3)] == [2 * BLOCK, 0, 0]


def test_what_the_engine_raises_meanwhile_is_not_hidden(device: Device) -> None:
    cache = tree(DENSE, block=BLOCK)

    def step() -> None:
        with cache.together():
            commit(*opened(cache, 1))
            raise KeyError("the engine's own")

    with pytest.raises(KeyError, match="the engine's own"):
        step()
    assert n_cached(cache, 1) == 2 * BLOCK
    assert cache.stats.faults == {}


def test_chats_of_a_batch_are_stored_as_those_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [[t % 60 for t in words(seed, 70 + 5 * seed)] for seed in range(4)]
    with running(tiny("qwen3"), chunk=32, block=32) as harness:
        want = [harness.ask(ids, 20).reply for ids in prompts]
    monkeypatch.setattr(copies, "copies_are_awaited", lambda: False)
    monkeypatch.setattr(payload, "copies_are_awaited", lambda: False)
    with running(tiny("qwen3"), chunk=32, block=32) as harness:
        results = [harness.submit(ids, 20) for ids in prompts]
        assert [r.wait().reply for r in results] == want
        turns = [[*ids, *reply, 5] for ids, reply in zip(prompts, want, strict=True)]
        results = [harness.submit(ids, 8) for ids in turns]
        for ids, result in zip(turns, results, strict=True):
            assert result.wait().n_cached >= len(ids) - 2


def test_a_choice_stops_when_the_copies_that_its_prompt_waits_for_fail(device: Device) -> None:
    """It has begun in the same step, below a block that was taken back."""
    cache = tree(DENSE, block=BLOCK)
    device.fault = RuntimeError("out of memory")
    with cache.together():
        cursor, row = opened(cache, 1)
        cursor.commit(row)
        choice = cursor.fork([])
        cursor.close(None)
    assert isinstance(choice, PrefixCursor)
    assert not choice.writes
    choice.commit(row)
    choice.close(row)
    assert records_of(cache) == []
    check_tree(cache)
