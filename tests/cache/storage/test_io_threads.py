"""The I/O threads: order, bounds, stopping, nothing kills a thread; and a tier that uses them."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from firn.cache.storage.container import Loaded, Name
from firn.cache.storage.faults import Missing, TierError
from firn.cache.storage.io import BATCH, ReadOrder, TierEntry, TierIo, WriteOrder
from firn.cache.storage.threads import MAX_DEFER_S, IoClosed, IoThreads
from firn.cache.tiers import Buffer, Gone, TierOptions, WriteResult
from tests.cache.tiers.records import Direct, Folder, chain, of_size
from tests.dict_tier import DictTier
from tests.faulty_tier import Fault, FaultyTier
from tests.waiting import wait_until

WAIT_S = 20.0


class Log:
    """What happened, in order; wait(n) waits until n things have happened."""

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
    """Work that begins, and ends once it is allowed to."""

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
        threads.close(timeout_s=WAIT_S)


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
        threads.upkeep(lambda i=i: f"delete {i}", log)
        threads.read(lambda i=i: f"read {i}", log)
    assert threads.n_pending == 10
    gate.open.set()
    assert log.wait(9) == [f"{kind} {i}" for kind in ("read", "delete", "write") for i in range(3)]


def test_writes_are_bounded_by_their_bytes_and_never_block(made: Callable[..., IoThreads]) -> None:
    threads, log = made(max_write_nbytes=100), Log()
    gate = blocked(threads)
    assert threads.try_write(lambda: 1, log, nbytes=60)
    assert threads.try_write(lambda: 2, log, nbytes=40)
    assert not threads.try_write(lambda: 3, log, nbytes=1)
    assert threads.write_nbytes == 100
    assert not threads.has_room(1)
    gate.open.set()
    log.wait(2)
    assert threads.try_write(lambda: 4, log, nbytes=5000), "one record always fits"
    log.wait(3)
    assert threads.write_nbytes == 0


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


def test_a_slow_tier_does_not_keep_another_from_being_written(
    made: Callable[..., IoThreads],
) -> None:
    threads, log, gate = made(3, 10_000), Log(), Gate()
    threads.try_write(gate, log, nbytes=1, tier="slow")
    assert gate.begun.wait(WAIT_S)
    threads.try_write(lambda: "slow", log, nbytes=1, tier="slow")
    for i in range(2):
        threads.try_write(lambda i=i: i, log, nbytes=1, tier="quick")
    assert log.wait(2) == [0, 1], "in their order"
    gate.open.set()
    assert log.wait(4)[2:] == ["gate", "slow"]


@pytest.mark.parametrize(
    "error", [ValueError("x"), SystemExit(1), KeyboardInterrupt(), MemoryError()]
)
def test_nothing_kills_a_thread(made: Callable[..., IoThreads], error: BaseException) -> None:
    threads, log = made(), Log()

    def fail(*_: Any) -> Any:
        raise error

    threads.read(fail, log)
    threads.upkeep(fail, log)
    threads.try_write(fail, log, nbytes=1)
    results = log.wait(3)
    assert all(type(r) is TierError and r.reason == "internal error" for r in results)
    threads.read(lambda: "alive", log)
    assert log.wait(4)[-1] == "alive"
    assert threads.write_nbytes == 0


def test_a_failing_callback_harms_nobody(
    made: Callable[..., IoThreads], caplog: pytest.LogCaptureFixture
) -> None:
    threads, log = made(), Log()

    def fail(result: Any) -> None:
        raise RuntimeError

    threads.read(lambda: 1, fail)
    threads.read(lambda: 2, log)
    assert log.wait(1) == [2]
    assert [r.getMessage() for r in caplog.records] == [
        "cache I/O: the callback of a read failed: RuntimeError()"
    ]


def test_closing_writes_what_is_queued_and_reports(made: Callable[..., IoThreads]) -> None:
    threads, log = made(2, 10_000), Log()
    gate = blocked(threads)
    for i in range(5):
        threads.try_write(lambda i=i: i, log, nbytes=10)
    progress: list[tuple[int, int]] = []
    threading.Timer(0.05, gate.open.set).start()
    threads.close(timeout_s=WAIT_S, progress=lambda n, b: progress.append((n, b)))
    assert sorted(log.seen) == [0, 1, 2, 3, 4]
    assert progress[-1] == (0, 0)
    assert not threads.try_write(lambda: 9, log, nbytes=1)
    threads.read(lambda: 9, log)
    assert isinstance(log.wait(6)[-1], IoClosed)


def test_closing_ends_in_bounded_time_when_the_disk_hangs(made: Callable[..., IoThreads]) -> None:
    threads, log = made(), Log()
    gate = Gate()
    threads.try_write(gate, log, nbytes=1)
    threads.try_write(lambda: 1, log, nbytes=1)
    assert gate.begun.wait(WAIT_S)
    waiting = Log()
    threads.read(lambda: 2, waiting)
    threads.close(timeout_s=0.05)
    assert isinstance(waiting.seen[0], IoClosed), "nobody waits on it for ever"
    assert isinstance(log.seen[0], IoClosed)
    gate.open.set()


def test_closing_twice_is_closing_once(made: Callable[..., IoThreads]) -> None:
    """Several tiers share the threads, and each closes them."""
    threads, log = made(), Log()
    threads.try_write(lambda: 1, log, nbytes=1)
    threads.close()
    threads.close()
    assert log.seen == [1]


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


def found_by(io: TierIo) -> tuple[list[list[TierEntry | Gone[Name]]], Any]:
    batches, ended = Log(), Log()
    io.scan(batches, ended)
    (result,) = ended.wait(1)
    return batches.seen, result


def test_a_tier_behind_threads() -> None:
    io, log = TierIo(DictTier(1 << 20), IoThreads(2)), Log()
    records = chain(3)
    for i, one in enumerate(records):
        assert io.try_write(WriteOrder(one.header, partial(list, one.buffers), 100.0 - i), log)
        assert isinstance(log.wait(i + 1)[-1], WriteResult)
    io.read(ReadOrder(records[0].name, records[0].header.tokens), log)
    loaded = log.wait(4)[-1]
    assert isinstance(loaded, Loaded)
    assert [bytes(b) for b in loaded.buffers] == records[0].buffers
    io.touch({r.name: 200.0 for r in records})
    io.delete([records[2].name])
    stranger = Name(records[0].header.root, records[0].header.part)
    io.read(ReadOrder(stranger, records[0].header.tokens), log)
    assert isinstance(log.wait(5)[-1], Missing)
    assert found_by(io) == ([], None)
    io.close()
    assert io.usage().counts["deletes"] == 1
    assert io.usage().drops == {}


def test_two_tiers_share_the_threads() -> None:
    threads, log = IoThreads(2), Log()
    first, second = (TierIo(DictTier(1 << 20), threads) for _ in range(2))
    one = of_size(10)
    assert first.try_write(WriteOrder(one.header, lambda: one.buffers, 1.0), log)
    log.wait(1)
    second.read(ReadOrder(one.name, one.header.tokens), log)
    assert isinstance(log.wait(2)[-1], Missing)
    first.close()
    second.close()


class SlowToDelete(DictTier):
    """Each delete gives a write a chance to overtake it."""

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.is_deleting, self.is_written = threading.Event(), threading.Event()

    def write(self, name: str, pieces: Sequence[Buffer], *, used_at: float) -> WriteResult[str]:
        result = super().write(name, pieces, used_at=used_at)
        self.is_written.set()
        return result

    def delete(self, name: str, *, keep: bool = False) -> None:
        self.is_deleting.set()
        self.is_written.wait(0.1)
        super().delete(name, keep=keep)


@pytest.mark.parametrize("again", [0, 1, 2])
def test_what_is_written_again_while_others_are_deleted_stays(again: int) -> None:
    """It is queued for deletion, or being deleted, when it is written again."""
    tier, records, log = SlowToDelete(), chain(3), Log()
    for one in records:
        Direct(tier).write(one)
    tier.is_written.clear()
    io, one = TierIo(tier, IoThreads(2)), records[again]
    io.delete([r.name for r in records])
    assert tier.is_deleting.wait(WAIT_S)
    assert io.try_write(WriteOrder(one.header, partial(list, one.buffers), 1.0), log)
    assert isinstance(log.wait(1)[0], WriteResult)
    io.close()
    assert list(tier._records) == [str(one.name)]


class HeldThreads:
    """Orders wait until the test carries them out."""

    closing = False

    def __init__(self) -> None:
        self.work: list[Callable[[], object]] = []

    def upkeep(self, work: Callable[[], object]) -> None:
        self.work.append(work)

    def try_write(self, work: Callable[[], object], *_: object, **more: object) -> bool:
        self.work.append(work)
        return True


def test_a_write_that_overtakes_the_delete_of_its_name_stays() -> None:
    tier, (one,), held = DictTier(1 << 20), chain(1), HeldThreads()
    Direct(tier).write(one)
    threads: Any = held
    io = TierIo(tier, threads)
    io.delete([one.name])
    assert io.try_write(WriteOrder(one.header, partial(list, one.buffers), 1.0), Log())
    delete, write = held.work
    write()
    delete()
    assert list(tier._records) == [str(one.name)]


def test_a_scan_comes_in_batches_and_tells_what_changed() -> None:
    shared: dict[str, bytes] = {}
    other = Direct(DictTier(1 << 30, shared))
    records = chain(2 * BATCH + 10)
    for one in records:
        other.write(one)
    io = TierIo(DictTier(1 << 30, shared), IoThreads(1))
    batches, result = found_by(io)
    assert result is None
    assert [len(b) for b in batches] == [BATCH, BATCH, 10]
    entries = {e.name: e for b in batches for e in b if isinstance(e, TierEntry)}
    assert entries.keys() == {r.name for r in records}
    entry = entries[records[5].name]
    assert np.array_equal(entry.label.tokens, records[5].header.tokens)
    other.delete(records[5])
    assert found_by(io) == ([(Gone(records[5].name),)], None)
    io.close()


def test_a_stop_ends_a_scan() -> None:
    shared: dict[str, bytes] = {}
    for one in chain(3 * BATCH):
        Direct(DictTier(1 << 30, shared)).write(one)
    io, gate = TierIo(DictTier(1 << 30, shared), IoThreads(1)), Gate()
    batches, ended = Log(), Log()

    def batch(changes: object) -> None:
        batches(changes)
        gate()

    io.scan(batch, ended)
    assert gate.begun.wait(WAIT_S)
    closing = threading.Thread(target=io.close)
    closing.start()
    wait_until(lambda: io.threads.closing)
    gate.open.set()
    closing.join(WAIT_S)
    assert not closing.is_alive()
    assert ended.seen == [None]
    assert len(batches.seen) == 1, "of three"


def test_labels_longer_than_a_scan_reads_at_first(tmp_path: Path) -> None:
    """A state of a model without pages has its whole prompt in its label."""
    long = of_size(10, tokens=range(20_000))
    Folder(tmp_path).write(long)
    (entry,) = Folder(tmp_path).scan()
    assert isinstance(entry, TierEntry)
    assert np.array_equal(entry.label.tokens, long.header.tokens)


def test_a_full_queue_is_counted(tmp_path: Path) -> None:
    plan = iter([Fault.DELAY])
    tier = FaultyTier(TierOptions(str(tmp_path), 1 << 20), plan=lambda op, name: next(plan, None))
    io, log = TierIo(tier, IoThreads(1, max_write_nbytes=1000)), Log()
    first, second = of_size(900), of_size(900, 1)
    assert io.try_write(WriteOrder(first.header, lambda: first.buffers, 1.0), log)
    assert not io.try_write(WriteOrder(second.header, lambda: second.buffers, 1.0), log)
    assert io.usage().drops == {"queue full": 1}
    tier.release()
    assert isinstance(log.wait(1)[0], WriteResult)
    io.close()


def test_parallel_reads_of_a_real_folder(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    records = [of_size(200_000, i) for i in range(20)]
    for one in records:
        folder.write(one)
    io, log = TierIo(folder.tier, IoThreads(4)), Log()
    for one in records * 3:
        io.read(ReadOrder(one.name, one.header.tokens), log)
    assert all(isinstance(r, Loaded) for r in log.wait(60))
    assert io.usage().counts["reads"] == 60
    assert io.usage().counts["bytes_read"] > 60 * 200_000
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
        assert threads.n_pending == 1
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
    threads.close()
    assert done.seen == [0, 1, 2]


# --- deletes -------------------------------------------------------------------------------


class CountingTier(DictTier):
    """Counts the threads that delete from it at the same time."""

    def __init__(self) -> None:
        super().__init__(1 << 40)
        self.deleted: list[str] = []
        self.n_at_once = 0
        self.most_at_once = 0
        self.gate = threading.Event()
        self._counting = threading.Lock()

    def delete(self, name: str, *, keep: bool = False) -> None:
        with self._counting:
            self.n_at_once += 1
            self.most_at_once = max(self.most_at_once, self.n_at_once)
        assert self.gate.wait(WAIT_S)
        with self._counting:
            self.n_at_once -= 1
            self.deleted.append(name)


def test_many_deletes_keep_one_thread_busy_and_are_ended_by_a_stop() -> None:
    tier, log = CountingTier(), Log()
    io = TierIo(tier, IoThreads(4))
    names = [one.name for one in chain(3 * BATCH)]
    for at in range(0, len(names), 50):
        io.delete(names[at : at + 50])
    io.read(ReadOrder(names[0], np.array([], dtype=np.uint64)), log)
    assert isinstance(log.wait(1)[0], Missing), "the other threads are free"
    tier.gate.set()
    io.close()
    assert tier.deleted == [str(name) for name in names]
    assert tier.most_at_once == 1
