"""What is used now is evicted last, also after a clock that was ahead, or behind, is set right."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from firn.cache.storage.worker import TierWorker
from firn.cache.tiers import TierOptions
from firn.cache.tiers.ssd import SsdTier
from firn.cache.tree.clock import UseClock
from firn.core.clock import Clock
from firn.core.values import Namespace
from tests.cache.lab import DENSE, LabEngine, tree
from tests.cache.memory.test_eviction import kept, put, touch
from tests.cache.test_decisions import BLOCK, Patient, admission, ask, drop_memory, settle
from tests.cache.tree.test_stamps import stamps
from tests.clocks import SetClock
from tests.hash_runner import prompt_of as words
from tests.waiting import wait_until

DAY_S = 86_400.0
YEAR_S = 365 * DAY_S


@dataclass
class Clocks(Clock):
    """Set by hand: a wall clock, and one that never goes back."""

    wall_s: float = 1000.0
    elapsed_s: float = 0.0

    def wall(self) -> float:
        return self.wall_s

    def elapsed(self) -> float:
        return self.elapsed_s

    def pass_by(self, seconds: float) -> None:
        self.wall_s += seconds
        self.elapsed_s += seconds


# --- the clock -----------------------------------------------------------------------------


@pytest.mark.parametrize("ahead_s", [0.0, 60.0, DAY_S, YEAR_S])
def test_after_a_clock_that_was_ahead_time_goes_on_at_its_pace(ahead_s: float) -> None:
    clocks = Clocks()
    uses = UseClock(clocks)
    clocks.wall_s += ahead_s
    before = uses.now()
    clocks.wall_s -= ahead_s
    for _ in range(5):
        clocks.pass_by(30.0)
        now = uses.now()
        assert now == pytest.approx(before + 30.0)
        before = now


def test_two_uses_at_once_keep_their_order_while_the_clock_is_behind() -> None:
    clocks = Clocks()
    uses = UseClock(clocks)
    first = uses.now()
    clocks.wall_s -= 60.0
    assert first < uses.now() < uses.now()


def test_once_the_wall_clock_has_caught_up_it_counts_again() -> None:
    clocks = Clocks()
    uses = UseClock(clocks)
    clocks.wall_s += 60.0
    uses.now()
    clocks.wall_s -= 60.0
    assert uses.now() > clocks.wall_s
    clocks.wall_s += 100.0
    assert uses.now() == clocks.wall_s


def test_what_tiers_remember_was_before_now() -> None:
    """A start with a clock that is hours behind, as a board without a battery has."""
    clocks = Clocks()
    uses = UseClock(clocks)
    assert uses.observe(clocks.wall_s + DAY_S)
    assert uses.now() > clocks.wall_s + DAY_S
    assert uses.stamp_of(uses.now()) > clocks.wall_s + DAY_S


def test_what_cannot_be_is_not_believed() -> None:
    clocks = Clocks()
    uses = UseClock(clocks)
    assert not uses.observe(clocks.wall_s + YEAR_S)
    assert uses.now() == clocks.wall_s


def test_tiers_are_told_the_right_time_after_one_that_nobody_believes() -> None:
    clocks = Clocks()
    uses = UseClock(clocks)
    clocks.wall_s += YEAR_S
    ahead = uses.now()
    clocks.wall_s -= YEAR_S
    clocks.pass_by(10.0)
    now = uses.now()
    assert now > ahead
    assert uses.stamp_of(now) == pytest.approx(clocks.wall_s)
    assert uses.of_stamp(uses.stamp_of(now)) == pytest.approx(now)


# --- in memory -----------------------------------------------------------------------------


@pytest.mark.parametrize("ahead_s", [DAY_S, YEAR_S])
def test_memory_keeps_what_is_used_since(ahead_s: float) -> None:
    clocks = Clocks()
    cache = tree(DENSE, limit_nbytes=300, clock=clocks.elapsed, wall=clocks.wall)
    clocks.wall_s += ahead_s
    for i in (1, 2, 3):
        clocks.pass_by(10.0)
        put(cache, [i])
    clocks.wall_s -= ahead_s
    for i in (4, 5, 6):
        clocks.pass_by(10.0)
        put(cache, [i])
    assert kept(cache) == {4, 5, 6}
    clocks.pass_by(10.0)
    touch(cache, [4])
    put(cache, [7])
    assert kept(cache) == {4, 6, 7}


# --- on the SSD ----------------------------------------------------------------------------


@contextmanager
def server(folder: Path, clocks: Clocks, *, n_records: int = 150) -> Iterator[LabEngine]:
    """An engine over a folder that has room for about so many records."""
    limit_nbytes = (256 + n_records) << 12
    cache = tree(DENSE, block=BLOCK, clock=clocks.elapsed, wall=clocks.wall)
    cache.records.estimates = Patient()
    tier = SsdTier(TierOptions(str(folder), limit_nbytes), clock=SetClock(wall=clocks.wall))
    with LabEngine(DENSE, cache=cache, chunk=16) as lab:
        names = [Namespace("")]
        worker = TierWorker(tier, wake=lab.engine.wake)
        lab.between_steps(lambda: cache.add_tier("ssd", worker, namespaces=names))
        yield lab
        settle(lab)


N_TOKENS = 5 * BLOCK + 1


def chat(i: int) -> list[int]:
    return words(i, N_TOKENS)


def use(lab: LabEngine, clocks: Clocks, i: int) -> int:
    """A minute later, somebody continues this chat. Returns how much of it was on the SSD."""
    clocks.pass_by(60.0)
    drop_memory(lab)
    n_cached = admission(ask(lab, chat(i), 1)).n_cached
    settle(lab)
    return n_cached


def check_that_what_is_used_stays(lab: LabEngine, clocks: Clocks) -> None:
    """Half of what fits is used again and again, while other chats come and go."""
    reused: list[int] = []
    for again in range(4):
        reused += [use(lab, clocks, i) for i in range(20)]
        for other in range(5):
            use(lab, clocks, 1000 + 5 * again + other)
    assert reused[20:] == [N_TOKENS - 1] * 60
    (tier,) = lab.tree.records.tiers
    assert not tier.usage().drops


AHEAD = pytest.mark.parametrize("ahead_s", [DAY_S, YEAR_S])


@AHEAD
def test_a_full_folder_keeps_what_is_used_since(tmp_path: Path, ahead_s: float) -> None:
    clocks = Clocks(time.time() + ahead_s)
    with server(tmp_path, clocks) as lab:
        for i in range(200, 250):
            use(lab, clocks, i)
        clocks.wall_s -= ahead_s
        check_that_what_is_used_stays(lab, clocks)


@AHEAD
def test_so_does_one_that_is_opened_since(tmp_path: Path, ahead_s: float) -> None:
    clocks = Clocks(time.time() + ahead_s)
    with server(tmp_path, clocks) as lab:
        for i in range(200, 250):
            use(lab, clocks, i)
    clocks.wall_s -= ahead_s
    with server(tmp_path, clocks) as lab:
        check_that_what_is_used_stays(lab, clocks)


@AHEAD
def test_two_processes_agree_about_what_was_used_last(tmp_path: Path, ahead_s: float) -> None:
    """One of them has worked while the clock was ahead, the other has not: it learns of that time
    by its next scan."""
    clocks = Clocks(time.time() + ahead_s)
    with server(tmp_path, clocks) as idle:
        with server(tmp_path, clocks) as busy:
            for i in range(200, 250):
                use(busy, clocks, i)
        clocks.wall_s -= ahead_s
        (tier,) = idle.tree.records.tiers
        idle.between_steps(tier.scan)
        wait_until(lambda: idle.between_steps(lambda: not tier.scanning))
        settle(idle)
        check_that_what_is_used_stays(idle, clocks)


def test_a_file_from_the_far_future_goes_first_and_is_dated_again_when_it_is_used(
    tmp_path: Path,
) -> None:
    ids = words(1, N_TOKENS)
    clocks = Clocks(time.time())
    with server(tmp_path, clocks) as lab:
        ask(lab, ids, 1)
    for path in tmp_path.glob("??/*"):
        at = path.stat().st_mtime + YEAR_S
        os.utime(path, (at, at))
    with server(tmp_path, clocks) as lab:
        assert admission(ask(lab, [*ids, 7], 1)).n_cached == N_TOKENS
    assert max(stamps(tmp_path).values()) < time.time() + 60
