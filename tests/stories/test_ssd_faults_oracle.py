"""A disk that lies, loses, lags and fills up, below the real engine: every answer is still right.

Memory holds only a few of the sessions, each of which has its own facts, so nearly every request
loads, and many reads and writes suffer a fault. Records that are damaged, exchanged or late cost a
part of the prefix, never the answer, and leave nothing behind.

Slow: nearly every request waits for a disk that lags.
"""

from __future__ import annotations

import errno
import itertools
import threading
import time
from pathlib import Path

import pytest

from firn.cache.tiers import TierOptions
from tests.cache.pending import settle
from tests.clocks import SetClock
from tests.faulty_tier import (
    READ_FAULTS,
    WRITE_FAULTS,
    Fault,
    FaultyTier,
    Op,
    Plan,
    random_plan,
)
from tests.oracle import Exam, Oracle

MODELS = ("firn-demo", "firn-demo-hybrid")
ROOM_NBYTES = {"firn-demo": 1_000_000, "firn-demo-hybrid": 1_150_000}
"""Room for about three sessions: a state takes more than the pages of a whole session."""
MIB = 1 << 20


def in_turn(**every: int) -> Plan:
    """Every n-th read and every m-th write suffers a fault; the faults take turns."""
    turns = {"read": itertools.cycle(READ_FAULTS), "write": itertools.cycle(WRITE_FAULTS)}
    counts = {"read": itertools.count(1), "write": itertools.count(1)}
    lock = threading.Lock()

    def plan(op: Op, name: str) -> Fault | None:
        with lock:
            return None if next(counts[op]) % every[op] else next(turns[op])

    return plan


def faulty(
    folder: Path, plan: Plan, *, limit_nbytes: int = 64 * MIB, delay_s: float = 0.02
) -> FaultyTier:
    options = TierOptions(str(folder), limit_nbytes)
    return FaultyTier(options, plan=plan, delay_s=delay_s, retry_s=0.0, max_retry_s=0.0)


def sit(model: str, tier: FaultyTier, **options: object) -> Oracle:
    return Oracle(model, block=16, cache_nbytes=ROOM_NBYTES[model], tier=tier, **options)


def sessions(oracle: Oracle, n: int) -> list[Exam]:
    return [oracle.exam(seed, n_facts=6) for seed in range(n)]


HARMLESS = (Fault.DELAY, Fault.DUPLICATE)


def n_suffered(tier: FaultyTier) -> int:
    """Reads that cannot have returned the right bytes, except for a few swaps without a partner."""
    return sum(tier.suffered[f"read {f.value}"] for f in READ_FAULTS if f not in HARMLESS)


def n_noticed(oracle: Oracle) -> int:
    return sum(oracle.cache.stats.faults.values())


def check(oracle: Oracle) -> None:
    """Checks that nothing is pending, and that only the disk failed, never the cache itself."""
    settle(oracle)
    faults = oracle.cache.stats.faults
    assert all(reason.startswith("read: ") for reason in faults), faults
    assert oracle.cache.records.memory.nbytes <= oracle.cache.settings.limit_nbytes


@pytest.mark.parametrize("model", MODELS)
def test_every_fault_and_every_answer_right(tmp_path: Path, model: str) -> None:
    tier = faulty(tmp_path, in_turn(read=2, write=9))
    with sit(model, tier) as oracle:
        exams = sessions(oracle, 6)
        assert oracle.wrong(exams, rounds=5, at_once=2) == []
        check(oracle)
        wanted = {f"read {f.value}" for f in READ_FAULTS} | {
            f"write {f.value}" for f in WRITE_FAULTS
        }
        assert set(tier.suffered) == wanted
        assert n_noticed(oracle) > 0.9 * n_suffered(tier)
        assert oracle.cache.stats.tokens_by_tier["ssd"] > 0, "nothing was ever loaded"


def test_a_disk_that_is_full_and_one_that_is_empty_again(tmp_path: Path) -> None:
    """Answers stay right, the tier reports why it does not write, and resumes writing by itself."""
    tier = faulty(tmp_path, random_plan(seed=0, rate=0.0))
    with sit("firn-demo", tier) as oracle:
        exams = sessions(oracle, 6)
        tier.disk.errors = {"write": errno.ENOSPC}
        assert oracle.wrong(exams, at_once=2) == []
        check(oracle)
        assert oracle.cache.stats.dropped["disk full"]
        assert tier.usage().status.state == "paused"
        assert tier.usage().counts.get("writes", 0) == 0
        tier.disk.errors = {}
        for first in (1, 2):  # the second round can load what the first wrote
            assert oracle.wrong(exams, first=first, at_once=2) == []
            check(oracle)
        assert tier.usage().status.state == "ok"
        assert oracle.cache.stats.tokens_by_tier["ssd"] > 0


def test_a_read_that_never_ends_is_not_waited_for(tmp_path: Path) -> None:
    """The deadline passes: the prompt is computed, and nothing depends on the read when it ends."""
    ahead_s, stuck = [0.0], threading.Event()

    def plan(op: Op, name: str) -> Fault | None:
        return Fault.DELAY if op == "read" and stuck.is_set() else None

    tier = faulty(tmp_path, plan, delay_s=60)
    with sit("firn-demo", tier, clock=SetClock(lambda: time.monotonic() + ahead_s[0])) as oracle:
        exams = sessions(oracle, 6)
        assert oracle.wrong(exams, at_once=2) == []
        settle(oracle)
        stuck.set()
        late = oracle.put(exams[0], 1)
        while not tier.suffered["read delay"]:
            oracle.between_steps(lambda: None)
        ahead_s[0] += 3600
        assert oracle.text(late) == exams[0].session.questions[1].answer
        assert oracle.cache.stats.faults["read: too slow"] == 1
        stuck.clear()
        tier.release()
        check(oracle)
        assert oracle.wrong(exams, first=2, at_once=2) == []
        check(oracle)
