"""Short rows where the cells of all layers are copied by one kernel: cut once, when they end."""

from __future__ import annotations

import time
from typing import Any

import mlx.core as mx
import pytest

from firn.cache import copies
from firn.cache.memory.rows import RowPages
from firn.core.values import CacheControl
from tests.cache.bus import Bus, drive
from tests.cache.lab import check_tree, records_of
from tests.cache.tiny import tiny
from tests.harness import Harness, running
from tests.hash_runner import prompt_of as words

BLOCK = 32


@pytest.fixture
def bus(monkeypatch: pytest.MonkeyPatch) -> Bus:
    bus = Bus()
    drive(bus, monkeypatch)
    return bus


def tokens(seed: int, n: int) -> list[int]:
    return [t % 60 for t in words(seed, n)]


def harness(**options: Any) -> Any:
    return running(tiny("qwen3"), chunk=BLOCK, block=BLOCK, **options)


def n_in_rows(at: Harness) -> int:
    return sum(isinstance(r.arrays, RowPages) for r in records_of(at.cache))


def test_blocks_and_tail_are_cut_by_one_kernel_when_the_row_ends(bus: Bus) -> None:
    with harness() as at:
        at.ask(tokens(1, 70), 20)
        bus.n_gathered = 0
        ids = tokens(2, 70)
        reply = at.ask(ids, 20).reply
        assert bus.n_gathered == 1, "two blocks and a tail"
        assert at.between_steps(lambda: n_in_rows(at)) == 0
        assert at.ask([*ids, *reply, 3], 1).n_cached >= len(ids) + len(reply) - 1
        at.between_steps(lambda: check_tree(at.cache))


def test_others_share_what_a_short_row_holds_while_it_goes_on(bus: Bus) -> None:
    ids = tokens(3, 2 * BLOCK + 6)
    with harness() as at:
        want = at.ask([*ids, 5], 4, control=CacheControl(read=False, write=False)).reply
        long = at.submit(ids, 40)
        while len(long.reply) < 8:
            time.sleep(0.001)
        assert at.between_steps(lambda: n_in_rows(at)) == 2
        other = at.submit([*ids, 5], 4).wait()
        assert not long.finished.is_set()
        assert (other.reply, other.n_cached) == (want, 2 * BLOCK)
        long.wait()


def test_memory_stays_below_its_limit(bus: Bus) -> None:
    with harness(cache_nbytes=1 << 20) as at:
        for seed in range(30):
            at.ask(tokens(seed, 70), 20)
        memory = at.cache.records.memory
        nbytes = at.between_steps(lambda: memory.nbytes)
        assert memory.limit_nbytes // 2 < nbytes <= memory.limit_nbytes
        at.between_steps(lambda: check_tree(at.cache))


def test_a_fault_in_the_last_cut_costs_what_lay_in_the_row(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = tokens(4, 70)
    evaluate = copies.evaluate
    with harness() as at:
        kept = at.ask(tokens(5, 70), 4).reply
        want = at.ask(ids, 4, control=CacheControl(read=False, write=False)).reply

        def fails(payloads: Any) -> None:
            if list(payloads):
                raise ValueError("no memory for a copy")

        monkeypatch.setattr(copies, "evaluate", fails)
        assert at.ask(ids, 4).reply == want
        monkeypatch.setattr(copies, "evaluate", evaluate)
        again = at.ask(ids, 4)
        assert (again.n_cached, again.reply) == (0, want)
        other = at.ask(tokens(5, 70), 4)
        assert other.n_cached > BLOCK
        assert other.reply == kept
        at.between_steps(lambda: check_tree(at.cache))


def test_a_row_that_is_given_up_is_stored_as_far_as_it_came(bus: Bus) -> None:
    ids = tokens(6, 70)
    with harness() as at:
        result = at.submit(ids, 400)
        while len(result.reply) < 10:
            time.sleep(0.001)
        (request,) = [i for i, r in at.results.items() if r is result]
        at.engine.cancel(request)
        at.between_steps(mx.synchronize)
        assert at.between_steps(lambda: n_in_rows(at)) == 0
        assert at.ask([*ids, *result.reply[:9], 1], 1).n_cached >= 70 + 8
