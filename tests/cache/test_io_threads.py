"""The I/O threads: order, bounds, cancelling, stopping, and that nothing kills a thread."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from firn.cache.faults import Missing, TierError
from firn.cache.io import MAX_DEFER_S, Closed, IoThreads, TierIo
from firn.cache.tiers import Loaded, Name, Stored
from firn.cache.tiers.memory import MemoryTier
from firn.cache.tiers.ssd import SsdSettings, SsdTier
from tests.cache.tiers.records import chain, of_size
from tests.faulty_tier import Fault, FaultyTier

WAIT_S = 20.0


class Log:
    """What happened, in order; wait() until so many things did."""

    def __init__(self) -> None:
        self.seen: list[Any] = []
        self._changed = threading.Condition()

    def __call__(self, what: Any) -> None:
        with self._changed:
            self.seen.append(what)
            self._changed.notify_all()

    def wait(self, n: int) -> list[Any]:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.seen) >= n, timeout=WAIT_S)
            return list(self.seen)


class Gate:
    """Work that begins, and ends when it is let."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.open = threading.Event()

    def __call__(self) -> str:
        self.begun.set()
        assert self.open.wait(WAIT_S)
        return "gate"


@pytest.fixture
def made() -> Iterator[Callable[..., IoThreads]]:
    all_made: list[IoThreads] = []

    def make(n: int = 1, max_write_nbytes: int = 100) -> IoThreads:
        all_made.append(IoThreads(n, max_write_nbytes=max_write_nbytes))
        return all_made[-1]

    yield make
    for threads in all_made:
        threads.close(flush=False, timeout_s=WAIT_S)


def blocked(threads: IoThreads) -> Gate:
    gate = Gate()
    threads.read(gate, lambda result: None)
    assert gate.begun.wait(WAIT_S)
    return gate


def test_reads_before_deletes_before_writes_and_first_in_first_out(
    made: Callable[..., IoThreads],
) -> None:
    threads, log = made(), Log()
    gate = blocked(threads)
    for i in range(3):
        assert threads.try_write(lambda i=i: f"write {i}", log, nbytes=10)
        threads.delete(lambda i=i: f"delete {i}", log)
        threads.read(lambda i=i: f"read {i}", log)
    queued = threads.counts().n_queued
    assert queued == {"reads": 3, "deletes": 3, "writes": 3}
    gate.open.set()
    assert log.wait(9) == [f"{kind} {i}" for kind in ("read", "delete", "write") for i in range(3)]


def test_writes_are_bounded_by_their_bytes_and_never_block(made: Callable[..., IoThreads]) -> None:
    threads, log = made(max_write_nbytes=100), Log()
    gate = blocked(threads)
    assert threads.try_write(lambda: 1, log, nbytes=60)
    assert threads.try_write(lambda: 2, log, nbytes=40)
    assert not threads.try_write(lambda: 3, log, nbytes=1)
    assert threads.counts().write_nbytes == 100
    assert threads.counts().n_refused == 1
    gate.open.set()
    log.wait(2)
    assert threads.try_write(lambda: 4, log, nbytes=5000), "one record always fits"
    log.wait(3)
    assert threads.counts().write_nbytes == 0


def test_bytes_being_written_count_until_they_are(made: Callable[..., IoThreads]) -> None:
    threads, log, gate = made(), Log(), Gate()
    assert threads.try_write(gate, log, nbytes=80)
    assert gate.begun.wait(WAIT_S)
    assert not threads.try_write(lambda: 0, log, nbytes=80)
    gate.open.set()
    log.wait(1)
    assert threads.try_write(lambda: 0, log, nbytes=80)


def test_a_read_never_waits_for_a_write(made: Callable[..., IoThreads]) -> None:
    threads, log = made(2, 10_000), Log()
    gates = [Gate() for _ in range(3)]
    for gate in gates:
        threads.try_write(gate, lambda result: None, nbytes=1)
    assert gates[0].begun.wait(WAIT_S)
    threads.read(lambda: "read", log)
    assert log.wait(1) == ["read"]
    assert not gates[1].begun.is_set()
    for gate in gates:
        gate.open.set()


def test_cancelling_what_waits(made: Callable[..., IoThreads]) -> None:
    threads, log = made(), Log()
    gate = blocked(threads)
    keep, drop = (threads.read(lambda x=x: x, log) for x in ("keep", "drop"))
    assert threads.cancel(drop)
    assert not threads.cancel(drop)
    gate.open.set()
    assert log.wait(1) == ["keep"]
    assert not threads.cancel(keep)
    assert threads.counts().n_cancelled == 1


@pytest.mark.parametrize(
    "error", [ValueError("x"), SystemExit(1), KeyboardInterrupt(), MemoryError()]
)
def test_nothing_kills_a_thread(made: Callable[..., IoThreads], error: BaseException) -> None:
    threads, log = made(), Log()

    def fail(*_: Any) -> Any:
        raise error

    threads.read(fail, log)
    threads.delete(fail, log)
    threads.try_write(fail, log, nbytes=1)
    results = log.wait(3)
    assert all(type(r) is TierError and r.reason == "internal error" for r in results)
    threads.read(lambda: "alive", log)
    assert log.wait(4)[-1] == "alive"
    assert threads.counts().n_failed == {"reads": 1, "deletes": 1, "writes": 1}
    assert threads.counts().write_nbytes == 0


def test_a_failing_callback_harms_nobody(made: Callable[..., IoThreads]) -> None:
    threads, log = made(), Log()

    def fail(result: Any) -> None:
        raise RuntimeError

    threads.read(lambda: 1, fail)
    threads.read(lambda: 2, log)
    assert log.wait(1) == [2]
    assert threads.counts().n_callback_faults == 1


def test_closing_writes_what_is_queued_and_reports(made: Callable[..., IoThreads]) -> None:
    threads, log = made(2, 10_000), Log()
    gate = blocked(threads)
    for i in range(5):
        threads.try_write(lambda i=i: i, log, nbytes=10)
    progress: list[tuple[int, int]] = []
    threading.Timer(0.05, gate.open.set).start()
    flushed = threads.close(timeout_s=WAIT_S, progress=lambda n, b: progress.append((n, b)))
    assert sorted(log.seen) == [0, 1, 2, 3, 4]
    assert flushed.n_dropped == 0
    assert progress[-1] == (0, 0)
    assert not threads.try_write(lambda: 9, log, nbytes=1)
    threads.read(lambda: 9, log)
    assert isinstance(log.wait(6)[-1], Closed)


def test_closing_ends_in_bounded_time_when_the_disk_hangs(made: Callable[..., IoThreads]) -> None:
    threads, log = made(), Log()
    gate = Gate()
    threads.try_write(gate, log, nbytes=1)
    threads.try_write(lambda: 1, log, nbytes=1)
    assert gate.begun.wait(WAIT_S)
    waiting = Log()
    threads.read(lambda: 2, waiting)
    flushed = threads.close(timeout_s=0.05)
    assert flushed.n_dropped == 1
    assert isinstance(waiting.seen[0], Closed), "nobody waits on it for ever"
    assert isinstance(log.seen[0], Closed)
    assert threads.counts().n_dropped == 1
    gate.open.set()


def test_closing_without_flushing_drops_the_writes(made: Callable[..., IoThreads]) -> None:
    threads, log = made(), Log()
    gate = blocked(threads)
    threads.try_write(lambda: 1, log, nbytes=1)
    threading.Timer(0.05, gate.open.set).start()
    flushed = threads.close(flush=False, timeout_s=WAIT_S)
    assert flushed.n_dropped == 1
    assert [type(r) for r in log.seen] == [Closed]


def test_idle_threads_hold_on_to_nothing(made: Callable[..., IoThreads]) -> None:
    threads, log = made(2, 10**9), Log()
    array = np.zeros(1000)
    gone = weakref.ref(array)
    threads.try_write(lambda array=array: len(array), log, nbytes=8000)
    del array
    assert log.wait(1) == [1000]
    threads.read(lambda: 0, log)
    threads.read(lambda: 0, log)
    log.wait(3)
    threads.close(timeout_s=WAIT_S)
    assert gone() is None


# --- with a tier ---------------------------------------------------------------------------


def test_a_tier_behind_threads() -> None:
    io, log = TierIo(MemoryTier(1 << 20), n_threads=2), Log()
    records = chain(3)
    for i, one in enumerate(records):
        assert io.try_write(one.header, one.buffers, log)
        assert isinstance(log.wait(i + 1)[-1], Stored)
    io.read(records[0].name, records[0].header.tokens, log)
    loaded = log.wait(4)[-1]
    assert isinstance(loaded, Loaded)
    assert [bytes(b) for b in loaded.buffers] == records[0].buffers
    io.touch(r.name for r in records)
    io.delete([records[2].name])
    io.read(Name(records[0].header.root, records[0].header.part), records[0].header.tokens, log)
    assert isinstance(log.wait(5)[-1], Missing)
    io.scan(log)
    assert len(log.wait(6)[-1]) <= 3
    assert io.close().n_dropped == 0
    assert io.usage().counts["deletes"] == 1
    assert io.usage().drops["queue full"] == 0


def test_reads_of_a_tier_can_be_taken_back(tmp_path: Path) -> None:
    plan = iter([Fault.DELAY])
    tier = FaultyTier(SsdSettings(tmp_path, 1 << 20), plan=lambda op, name: next(plan, None))
    io, log = TierIo(tier, n_threads=1), Log()
    first, second, third = (of_size(10, i) for i in range(3))
    for one in (first, second, third):
        io.read(one.name, one.header.tokens, log)
    io.cancel([second.name, third.name])
    tier.release()
    log.wait(1)
    io.scan(log)
    assert [type(r) for r in log.wait(2)] == [Missing, list]
    io.close()


def test_a_full_queue_is_counted(tmp_path: Path) -> None:
    plan = iter([Fault.DELAY])
    tier = FaultyTier(SsdSettings(tmp_path, 1 << 20), plan=lambda op, name: next(plan, None))
    io, log = TierIo(tier, n_threads=1, max_write_nbytes=1000), Log()
    assert io.try_write(of_size(900).header, of_size(900).buffers, log)
    assert not io.try_write(of_size(900, 1).header, of_size(900, 1).buffers, log)
    assert io.usage().drops["queue full"] == 1
    tier.release()
    assert isinstance(log.wait(1)[0], Stored)
    io.close()


def test_parallel_reads_of_a_real_folder_measure_their_speed(tmp_path: Path) -> None:
    tier = SsdTier(SsdSettings(tmp_path, 1 << 26))
    records = [of_size(200_000, i) for i in range(20)]
    for one in records:
        tier.write(one.header, one.buffers)
    assert tier.usage().read_nbytes_per_s == 0
    io, log = TierIo(tier, n_threads=4), Log()
    for one in records * 3:
        io.read(one.name, one.header.tokens, log)
    assert all(isinstance(r, Loaded) for r in log.wait(60))
    assert io.usage().counts["reads"] == 60
    assert 1e6 < io.usage().read_nbytes_per_s < 1e12
    io.close()


# --- deferring -----------------------------------------------------------------------------


def test_deferred_writes_wait_and_reads_do_not() -> None:
    now, done = [0.0], Log()
    threads = IoThreads(2, max_write_nbytes=1000, clock=lambda: now[0])
    try:
        threads.defer_writes(True)
        assert threads.try_write(lambda: "write", done, nbytes=1)
        threads.read(lambda: "read", done)
        done.wait(1)
        assert done.seen == ["read"]
        assert threads.counts().n_queued["writes"] == 1
        threads.defer_writes(False)
        done.wait(2)
        assert done.seen == ["read", "write"]
    finally:
        threads.close()


def test_a_write_is_not_deferred_for_ever() -> None:
    now, done = [0.0], Log()
    threads = IoThreads(1, max_write_nbytes=1000, clock=lambda: now[0])
    try:
        threads.defer_writes(True)
        assert threads.try_write(lambda: "write", done, nbytes=1)
        now[0] += MAX_DEFER_S
        threads.read(lambda: "read", done)  # wakes the thread, which looks again
        done.wait(2)
        assert done.seen == ["read", "write"]
    finally:
        threads.close()


def test_a_stop_writes_what_was_deferred() -> None:
    done = Log()
    threads = IoThreads(2, max_write_nbytes=1000)
    threads.defer_writes(True)
    for i in range(3):
        assert threads.try_write(lambda i=i: i, done, nbytes=1)
    assert threads.close().n_done == 3
    assert done.seen == [0, 1, 2]
