"""A tier behind I/O threads: order, bounds, stopping, nothing kills a thread, and nothing is kept."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from firn.cache.storage.container import Loaded, Name, TierEntry
from firn.cache.storage.faults import IoClosed, Missing, TierError, Unwanted
from firn.cache.storage.orders import (
    Changes,
    Confirmed,
    ConfirmOrder,
    DeleteOrder,
    Outcome,
    ReadOrder,
    ReadOver,
    ScanBatch,
    ScanEnded,
    ScanOrder,
    TouchOrder,
    WriteOrder,
    WriteOver,
)
from firn.cache.storage.tier_records import BATCH
from firn.cache.storage.worker import MAX_BATCHES, MAX_DEFER_S, TierWorker
from firn.cache.tiers import Buffer, Gone, ScannedRecord, TierOptions, WriteResult
from tests.cache.tiers.records import Direct, Folder, Record, chain, of_size
from tests.clocks import SetClock
from tests.dict_tier import DictTier
from tests.faulty_tier import Fault, FaultyTier
from tests.waiting import wait_until

WAIT_S = 20.0


class GatedTier(DictTier):
    """Logs each call; those that were shut wait until they are let through."""

    def __init__(self, shared: dict[str, bytes] | None = None) -> None:
        super().__init__(1 << 40, shared)
        self.log: list[tuple[str, str]] = []
        self.begun: dict[tuple[str, str], threading.Event] = {}
        self.gates: dict[tuple[str, str], threading.Event] = {}

    def shut(self, op: str, one: Record) -> None:
        self.begun[op, str(one.name)] = threading.Event()
        self.gates[op, str(one.name)] = threading.Event()

    def let(self, op: str, one: Record) -> None:
        self.gates[op, str(one.name)].set()

    def wait(self, op: str, one: Record) -> None:
        assert self.begun[op, str(one.name)].wait(WAIT_S)

    def has_begun(self, op: str, one: Record) -> bool:
        return (op, str(one.name)) in self.log

    def _enter(self, op: str, name: str) -> None:
        self.log.append((op, name))
        if (op, name) in self.gates:
            self.begun[op, name].set()
            assert self.gates[op, name].wait(WAIT_S)

    def read(self, name: str, n: int | None = None) -> memoryview:
        self._enter("read", name)
        return super().read(name, n)

    def write(self, name: str, pieces: Sequence[Buffer], *, used_at: float) -> WriteResult[str]:
        self._enter("write", name)
        return super().write(name, pieces, used_at=used_at)

    def delete(self, name: str, *, keep: bool = False) -> None:
        self._enter("delete", name)
        super().delete(name, keep=keep)


Make = Callable[..., TierWorker]


@pytest.fixture
def made() -> Iterator[Make]:
    all_made: list[TierWorker] = []

    def make(tier: Any, n_threads: int = 1, **options: Any) -> TierWorker:
        all_made.append(TierWorker(tier, n_threads=n_threads, **options))
        return all_made[-1]

    yield make
    for worker in all_made:
        worker.close()


def write_of(one: Record, used_at: float = 1.0) -> WriteOrder:
    return WriteOrder(one.header, one, used_at)


def read_of(one: Record) -> ReadOrder:
    return ReadOrder(one.name, one.header.tokens)


def outcomes(worker: TierWorker, n: int) -> list[Outcome]:
    """The next n outcomes."""
    until, got = WAIT_S, list[Outcome]()
    while len(got) < n:
        outcome = worker.poll(wait_s=until)
        assert outcome is not None, got
        got.append(outcome)
    return got


def rest(worker: TierWorker) -> list[Outcome]:
    got = list[Outcome]()
    while (outcome := worker.poll()) is not None:
        got.append(outcome)
    return got


def result(worker: TierWorker) -> Any:
    (outcome,) = outcomes(worker, 1)
    assert isinstance(outcome, WriteOver | ReadOver)
    return outcome.result


def blocked(worker: TierWorker, tier: GatedTier) -> Record:
    """A thread of the worker is busy until this record may be read."""
    one = of_size(10, 99)
    tier.shut("read", one)
    worker.submit(read_of(one))
    tier.wait("read", one)
    return one


def test_reads_before_deletes_before_writes_and_first_in_first_out(made: Make) -> None:
    tier, records = GatedTier(), [of_size(10, i) for i in range(9)]
    for one in records[3:]:
        Direct(tier).write(one)
    worker = made(tier)
    first = blocked(worker, tier)
    del tier.log[:]
    for i in range(3):
        assert worker.submit(write_of(records[i]))
        worker.submit(DeleteOrder([records[3 + i].name]))
        worker.submit(read_of(records[6 + i]))
    assert worker.n_pending == 8, "deletes are one order"
    tier.let("read", first)
    outcomes(worker, 7)
    by_op = {"write": records[:3], "delete": records[3:6], "read": records[6:]}
    assert tier.log == [
        (op, str(one.name)) for op in ("read", "delete", "write") for one in by_op[op]
    ]


def test_writes_are_bounded_by_their_bytes_and_never_block(made: Make) -> None:
    tier = GatedTier()
    worker = made(tier, max_write_nbytes=100)
    first = blocked(worker, tier)
    assert worker.submit(write_of(of_size(60, 1)))
    assert worker.submit(write_of(of_size(40, 2)))
    assert not worker.submit(write_of(of_size(1, 3)))
    assert worker.write_nbytes == 100
    assert not worker.has_room(1)
    tier.let("read", first)
    outcomes(worker, 3)
    assert worker.submit(write_of(of_size(5000, 4))), "one record always fits"
    outcomes(worker, 1)
    assert worker.write_nbytes == 0


def test_bytes_being_written_count_until_they_are(made: Make) -> None:
    tier, one = GatedTier(), of_size(80)
    worker = made(tier, max_write_nbytes=100)
    tier.shut("write", one)
    assert worker.submit(write_of(one))
    tier.wait("write", one)
    assert not worker.submit(write_of(of_size(80, 1)))
    tier.let("write", one)
    outcomes(worker, 1)
    assert worker.submit(write_of(of_size(80, 1)))


def test_a_read_never_waits_for_a_write(made: Make) -> None:
    tier, records = GatedTier(), [of_size(10, i) for i in range(3)]
    worker = made(tier, 2)
    for one in records:
        tier.shut("write", one)
        worker.submit(write_of(one))
    tier.wait("write", records[0])
    worker.submit(read_of(of_size(10, 5)))
    assert isinstance(result(worker), Missing)
    assert not tier.has_begun("write", records[1])
    for one in records:
        tier.let("write", one)


class BrokenTier(DictTier):
    def __init__(self, error: BaseException) -> None:
        super().__init__(1 << 20)
        self.error: BaseException | None = error

    def _fail(self) -> None:
        if self.error is not None:
            raise self.error

    def read(self, name: str, n: int | None = None) -> memoryview:
        self._fail()
        return super().read(name, n)

    def write(self, name: str, pieces: Sequence[Buffer], *, used_at: float) -> WriteResult[str]:
        self._fail()
        return super().write(name, pieces, used_at=used_at)

    def scan(self) -> Iterator[ScannedRecord | Gone[str]]:
        self._fail()
        return super().scan()

    def touch(self, stamps: Mapping[str, float]) -> None:
        self._fail()


@pytest.mark.parametrize(
    "error", [ValueError("x"), SystemExit(1), KeyboardInterrupt(), MemoryError()]
)
def test_nothing_kills_a_thread(made: Make, error: BaseException) -> None:
    tier, one = BrokenTier(error), of_size(10)
    worker = made(tier)
    worker.submit(read_of(one))
    worker.submit(write_of(one))
    worker.submit(TouchOrder({one.name: 1.0}))
    worker.submit(ScanOrder())
    found = []
    for outcome in outcomes(worker, 3):
        match outcome:
            case ReadOver(_, fault) | WriteOver(_, fault) | ScanEnded(fault):
                found.append(fault)
    assert all(type(f) is TierError and f.reason == "internal error" for f in found)
    assert len(found) == 3
    tier.error = None
    worker.submit(read_of(one))
    assert isinstance(result(worker), Missing), "alive"
    assert worker.write_nbytes == 0


def test_closing_writes_what_is_queued_and_says_so(
    made: Make, caplog: pytest.LogCaptureFixture
) -> None:
    tier, records = GatedTier(), [of_size(1 << 20, i) for i in range(5)]
    worker = made(tier, 2, flush_timeout_s=WAIT_S)
    first = blocked(worker, tier)
    tier.shut("write", records[0])
    for one in records:
        worker.submit(write_of(one))
    tier.wait("write", records[0])
    with caplog.at_level(logging.INFO):
        closing = threading.Thread(target=worker.close)
        closing.start()
        wait_until(lambda: bool(caplog.records))
        tier.let("read", first)
        tier.let("write", records[0])
        closing.join(WAIT_S)
    said = [r.getMessage() for r in caplog.records]
    assert said == ["writing records before exit: 6 left, 5 MiB"], "once a second"
    assert list(tier._records) == [str(one.name) for one in records]
    rest(worker)
    assert not worker.submit(write_of(records[0]))
    worker.submit(read_of(first))
    assert isinstance(result(worker), IoClosed)


def test_closing_ends_in_bounded_time_when_the_disk_hangs() -> None:
    tier, (one, other) = GatedTier(), chain(2)
    worker = TierWorker(tier, n_threads=1, flush_timeout_s=0.05)
    tier.shut("write", one)
    worker.submit(write_of(one))
    worker.submit(write_of(other))
    tier.wait("write", one)
    worker.submit(read_of(one))
    worker.submit(DeleteOrder([other.name]))
    worker.submit(ConfirmOrder())
    worker.close()
    ended = rest(worker)
    assert len(ended) == 3, "nobody waits on them for ever"
    for outcome in ended:
        match outcome:
            case ReadOver(_, fault) | WriteOver(_, fault) | Confirmed(_, fault):
                assert isinstance(fault, IoClosed)
    tier.let("write", one)


def test_closing_twice_is_closing_once() -> None:
    worker = TierWorker(DictTier(1 << 20), n_threads=1)
    worker.submit(write_of(of_size(10)))
    worker.close()
    worker.close()
    assert len(rest(worker)) == 1


class Bytes:
    """What is to be written, and dies with the last who holds it."""

    def __init__(self, one: Record) -> None:
        self._one = one

    def fetch(self) -> list[bytes]:
        return self._one.buffers


@pytest.mark.parametrize("fails", [False, True])
def test_what_was_written_dies_with_whoever_ordered_it(made: Make, fails: bool) -> None:
    """Its arrays must not be freed on an I/O thread, nor be kept by one that is idle."""
    tier, one = BrokenTier(TierError("full")), of_size(1000)
    tier.error = tier.error if fails else None
    worker, content = made(tier, 2), Bytes(one)
    gone = weakref.ref(content)
    order = WriteOrder(one.header, content, 1.0)
    worker.submit(order)
    outcome = outcomes(worker, 1)
    assert order.content is None
    assert gone() is content
    del content
    assert gone() is None
    assert outcome


# --- with a tier ---------------------------------------------------------------------------


def scanned(worker: TierWorker) -> list[Changes]:
    """The batches of a scan."""
    worker.submit(ScanOrder())
    batches: list[Changes] = []
    while True:
        (outcome,) = outcomes(worker, 1)
        if isinstance(outcome, ScanEnded):
            assert outcome.fault is None
            return batches
        assert isinstance(outcome, ScanBatch)
        batches.append(outcome.changes)


def test_a_tier_behind_threads(made: Make) -> None:
    worker, records = made(DictTier(1 << 20), 2), chain(3)
    for i, one in enumerate(records):
        assert worker.submit(write_of(one, 100.0 - i))
        assert isinstance(result(worker), WriteResult)
    worker.submit(read_of(records[0]))
    loaded = result(worker)
    assert isinstance(loaded, Loaded)
    assert [bytes(b) for b in loaded.buffers] == records[0].buffers
    worker.submit(TouchOrder({r.name: 200.0 for r in records}))
    worker.submit(DeleteOrder([records[2].name]))
    stranger = Name(records[0].header.root, records[0].header.part)
    worker.submit(ReadOrder(stranger, records[0].header.tokens))
    assert isinstance(result(worker), Missing)
    assert scanned(worker) == []
    worker.close()
    assert worker.usage().counts["deletes"] == 1
    assert worker.usage().drops == {}


def test_reads_come_before_what_a_scan_tells(made: Make) -> None:
    tier, records = DictTier(1 << 30), chain(BATCH)
    for one in records:
        Direct(DictTier(1 << 30, tier._records)).write(one)
    worker = made(tier)
    worker.submit(ScanOrder())
    wait_until(lambda: worker.n_results == 2)
    worker.submit(read_of(records[0]))
    wait_until(lambda: worker.n_results == 3)
    assert [type(o) for o in outcomes(worker, 3)] == [ReadOver, ScanBatch, ScanEnded]


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
    tier, records = SlowToDelete(), chain(3)
    for one in records:
        Direct(tier).write(one)
    tier.is_written.clear()
    worker, one = TierWorker(tier, n_threads=2), records[again]
    worker.submit(DeleteOrder([r.name for r in records]))
    assert tier.is_deleting.wait(WAIT_S)
    assert worker.submit(write_of(one))
    assert isinstance(result(worker), WriteResult)
    worker.close()
    assert list(tier._records) == [str(one.name)]


def test_a_write_that_overtakes_the_delete_of_its_name_stays() -> None:
    tier, (one, other) = GatedTier(), chain(2)
    Direct(tier).write(one)
    worker = TierWorker(tier, n_threads=2)
    tier.shut("delete", other)
    worker.submit(DeleteOrder([other.name, one.name]))
    tier.wait("delete", other)
    worker.records._deleting = threading.Lock()  # as if the first had not begun yet
    assert worker.submit(write_of(one))
    assert isinstance(result(worker), WriteResult)
    tier.let("delete", other)
    worker.close()
    assert list(tier._records) == [str(one.name)]


def test_what_is_deleted_is_confirmed_when_it_is(made: Make) -> None:
    tier, records = GatedTier(), chain(2)
    for one in records:
        Direct(tier).write(one)
    worker = made(tier, 2)
    worker.submit(ConfirmOrder())
    assert isinstance(outcomes(worker, 1)[0], Confirmed), "there is nothing to be deleted"
    tier.shut("delete", records[1])
    worker.submit(DeleteOrder([r.name for r in records]))
    worker.submit(ConfirmOrder())
    tier.wait("delete", records[1])
    assert not worker.n_results
    tier.let("delete", records[1])
    (outcome,) = outcomes(worker, 1)
    assert isinstance(outcome, Confirmed)
    assert outcome.fault is None
    assert not tier._records


def test_more_than_a_batch_is_deleted_before_it_is_confirmed(made: Make) -> None:
    tier = GatedTier()
    worker, records = made(tier), [of_size(1, i) for i in range(2 * BATCH + 1)]
    first = blocked(worker, tier)
    worker.submit(DeleteOrder([one.name for one in records]))
    worker.submit(ConfirmOrder())
    tier.let("read", first)
    assert isinstance(outcomes(worker, 2)[1], Confirmed)
    assert [op for op, _ in tier.log].count("delete") == len(records)


def test_a_scan_comes_in_batches_and_tells_what_changed(made: Make) -> None:
    shared: dict[str, bytes] = {}
    other = Direct(DictTier(1 << 30, shared))
    records = chain(2 * BATCH + 10)
    for one in records:
        other.write(one)
    worker = made(DictTier(1 << 30, shared))
    batches = scanned(worker)
    assert [len(b) for b in batches] == [BATCH, BATCH, 10]
    entries = {e.name: e for b in batches for e in b if isinstance(e, TierEntry)}
    assert entries.keys() == {r.name for r in records}
    entry = entries[records[5].name]
    assert np.array_equal(entry.label.tokens, records[5].header.tokens)
    other.delete(records[5])
    assert scanned(worker) == [(Gone(records[5].name),)]


class ManyTier(DictTier):
    """Has as much as anybody wants to see."""

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.n_told = 0

    def scan(self) -> Iterator[ScannedRecord | Gone[str]]:
        for _ in range(N_TOLD):
            yield Gone(str(Name(bytes(32), of_size(1).header.part)))  # type: ignore[arg-type]
            self.n_told += 1


N_TOLD = 2 * MAX_BATCHES * BATCH


def test_a_scan_waits_for_an_engine_that_has_no_time(made: Make) -> None:
    tier = ManyTier()
    worker = made(tier)
    worker.submit(ScanOrder())
    wait_until(lambda: worker.n_results == MAX_BATCHES)
    assert tier.n_told <= (MAX_BATCHES + 1) * BATCH, "the rest would lie about in memory"
    n_seen = 0
    while isinstance(outcome := outcomes(worker, 1)[0], ScanBatch):
        n_seen += len(outcome.changes)
    assert n_seen == N_TOLD


def test_a_stop_ends_a_scan_that_waits() -> None:
    worker = TierWorker(ManyTier(), n_threads=1)
    worker.submit(ScanOrder())
    wait_until(lambda: worker.n_results == MAX_BATCHES)
    worker.close()
    assert not any(thread.is_alive() for thread in worker._threads)
    assert isinstance(rest(worker)[-1], ScanEnded)


def test_a_stop_ends_a_scan(made: Make) -> None:
    shared: dict[str, bytes] = {}
    records = chain(3 * BATCH)
    for one in records:
        Direct(DictTier(1 << 30, shared)).write(one)

    class Slow(DictTier):
        begun, gate = threading.Event(), threading.Event()

        def scan(self) -> Iterator[ScannedRecord | Gone[str]]:
            for i, seen in enumerate(super().scan()):
                if i == BATCH + 1:
                    self.begun.set()
                    assert self.gate.wait(WAIT_S)
                yield seen

    tier = Slow(1 << 30, shared)
    worker = TierWorker(tier, n_threads=1)
    worker.submit(ScanOrder())
    assert tier.begun.wait(WAIT_S)
    closing = threading.Thread(target=worker.close)
    closing.start()
    wait_until(lambda: worker.closing)
    tier.gate.set()
    closing.join(WAIT_S)
    assert not closing.is_alive()
    assert [type(o) for o in rest(worker)] == [ScanBatch, ScanEnded], "one batch of three"


def test_labels_longer_than_a_scan_reads_at_first(tmp_path: Path) -> None:
    """A state of a model without pages has its whole prompt in its label."""
    long = of_size(10, tokens=range(20_000))
    Folder(tmp_path).write(long)
    (entry,) = Folder(tmp_path).scan()
    assert isinstance(entry, TierEntry)
    assert np.array_equal(entry.label.tokens, long.header.tokens)


def test_a_full_queue_is_counted(tmp_path: Path, made: Make) -> None:
    plan = iter([Fault.DELAY])
    tier = FaultyTier(TierOptions(str(tmp_path), 1 << 20), plan=lambda op, name: next(plan, None))
    worker = made(tier, max_write_nbytes=1000)
    assert worker.submit(write_of(of_size(900)))
    assert not worker.submit(write_of(of_size(900, 1)))
    assert worker.usage().drops == {"queue full": 1}
    tier.release()
    assert isinstance(result(worker), WriteResult)


def test_parallel_reads_of_a_real_folder(tmp_path: Path, made: Make) -> None:
    folder = Folder(tmp_path)
    records = [of_size(200_000, i) for i in range(20)]
    for one in records:
        folder.write(one)
    worker = made(folder.tier, 4)
    for one in records * 3:
        worker.submit(read_of(one))
    assert all(isinstance(o.result, Loaded) for o in outcomes(worker, 60))  # type: ignore[union-attr]
    assert worker.usage().counts["reads"] == 60
    assert worker.usage().counts["bytes_read"] > 60 * 200_000


def test_what_nobody_wants_any_more_is_neither_read_nor_written(made: Make) -> None:
    tier, (one, other) = GatedTier(), chain(2)
    worker = made(tier)
    first = blocked(worker, tier)
    write, read = write_of(one), read_of(other)
    demand = Demand()
    read.demands.append(demand)
    worker.submit(write)
    worker.submit(read)
    write.wanted, demand.over = False, True
    tier.let("read", first)
    ended = outcomes(worker, 3)[1:]
    assert [type(o.result) for o in ended] == [Unwanted, Unwanted]  # type: ignore[union-attr]
    assert tier.log == [("read", str(first.name))]


class Demand:
    front = 0
    over = False


def test_a_read_is_wanted_while_one_of_many_needs_it() -> None:
    order, computed, other = ReadOrder(of_size(1).name, np.array([]), end=8), Demand(), Demand()
    assert order.wanted, "of somebody who does not give it up"
    order.demands += [computed, other]
    computed.front = 8
    assert order.wanted
    other.over = True
    assert not order.wanted


# --- deferring -----------------------------------------------------------------------------


def test_deferred_writes_wait_and_reads_do_not(made: Make) -> None:
    now = [0.0]
    worker = made(DictTier(1 << 20), 2, clock=SetClock(lambda: now[0]))
    worker.defer_writes(True)
    assert worker.submit(write_of(of_size(1)))
    worker.submit(read_of(of_size(1, 1)))
    assert isinstance(outcomes(worker, 1)[0], ReadOver)
    assert worker.n_pending == 1
    worker.defer_writes(False)
    assert isinstance(outcomes(worker, 1)[0], WriteOver)


def test_a_write_is_not_deferred_for_ever(made: Make) -> None:
    now = [0.0]
    worker = made(DictTier(1 << 20), clock=SetClock(lambda: now[0]))
    worker.defer_writes(True)
    assert worker.submit(write_of(of_size(1)))
    now[0] += MAX_DEFER_S
    worker.submit(read_of(of_size(1, 1)))  # wakes the thread, which looks again
    assert [type(o) for o in outcomes(worker, 2)] == [ReadOver, WriteOver]


def test_a_stop_writes_what_was_deferred() -> None:
    tier, records = DictTier(1 << 20), [of_size(1, i) for i in range(3)]
    worker = TierWorker(tier, n_threads=2)
    worker.defer_writes(True)
    for one in records:
        assert worker.submit(write_of(one))
    worker.close()
    assert list(tier._records) == [str(one.name) for one in records]


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
    tier = CountingTier()
    worker = TierWorker(tier, n_threads=4)
    names = [one.name for one in chain(3 * BATCH)]
    for at in range(0, len(names), 50):
        worker.submit(DeleteOrder(names[at : at + 50]))
    worker.submit(ReadOrder(names[0], np.array([], dtype=np.uint64)))
    assert isinstance(result(worker), Missing), "the other threads are free"
    tier.gate.set()
    worker.close()
    assert tier.deleted == [str(name) for name in names]
    assert tier.most_at_once == 1
