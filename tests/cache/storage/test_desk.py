"""A record that could not be written is not forgotten: it is written when the tier recovers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import pytest

from firn.cache.arrays.payload import Payload
from firn.cache.parts import Part
from firn.cache.prefix import PrefixCursor
from firn.cache.storage import desk, worker
from firn.cache.storage.container import Loaded, Name
from firn.cache.storage.faults import NotForgotten, Refused, TierError, TierFault, Unwanted
from firn.cache.storage.orders import ReadOrder, RecordWritten, ScanBatch, WriteOrder
from firn.cache.storage.worker import TierWorker
from firn.cache.tiers import TierStatus, TierUsage, WriteResult
from firn.core.ports import EngineLoad
from firn.core.values import CacheControl, Namespace, Prompt
from tests.cache.fake_worker import FakeWorker
from tests.cache.lab import DENSE, LabEngine, LabLayer, LabRow, records_of, tree
from tests.cache.lab import prompt_of as lab_prompt
from tests.dict_tier import DictTier
from tests.hash_runner import prompt_of as words

BLOCK = 8


class SickWorker(FakeWorker):
    """Writes fail as `fault` decides; others count as stored."""

    def __init__(
        self, fault: Callable[[Name], TierError | None], status: TierStatus | None = None
    ) -> None:
        super().__init__()
        self.fault, self.status = fault, status or TierStatus()
        self.written: list[Name] = []
        self.n_tries = 0
        self.touched: list[set[Name]] = []

    def write(self, order: WriteOrder) -> bool:
        name = order.header.name
        self.n_tries += 1
        fault = self.fault(name)
        if fault is None:
            self.written.append(name)
        self.end(order, fault or WriteResult(1, new=True))
        return True

    def touch(self, stamps: Mapping[Name, float]) -> None:
        self.touched.append(set(stamps))

    def usage(self) -> TierUsage:
        return TierUsage(0, 1 << 20, self.status)


def settled(lab: LabEngine, now: list[float]) -> None:
    """Let enough time pass for a retry, and enough steps to process its result."""
    now[0] += desk.RESCAN_S + 1
    for _ in range(8):
        lab.between_steps(partial(lab.cache.tick, EngineLoad.NONE))  # type: ignore[union-attr]


def test_a_fault_that_ends() -> None:
    now, ids = [0.0], words(1, 40)
    io = SickWorker(lambda name: TierFault("disk full"), TierStatus("paused", "disk full"))
    cache = tree(DENSE, block=BLOCK, clock=lambda: now[0])
    cache.add_tier("ssd", io, namespaces=[Namespace("")])
    with LabEngine(DENSE, cache=cache) as lab:
        lab.submit(ids, 4).wait().check()
        settled(lab, now)
        before = io.n_tries
        settled(lab, now)
        assert io.n_tries == before + 1, "while it lasts, one record finds out"
        io.fault, io.status = lambda name: None, TierStatus()
        settled(lab, now)
        held = [r for r in records_of(cache) if r.arrays is not None]
        assert {Name(r.node.key, r.part) for r in held} == set(io.written)
        assert all(r.stored for r in held)
        starts = {r.node.key: r.node.start for r in held}
        assert [starts[n.key] for n in io.written] == sorted(starts.values()), "parents first"


@pytest.mark.parametrize("load", [EngineLoad.DECODING, EngineLoad.PREFILLING, EngineLoad.BOTH])
def test_a_server_that_is_never_idle_writes_all_the_same(load: EngineLoad) -> None:
    now, ids = [0.0], words(1, 41)
    io = SickWorker(lambda name: None)
    cache = tree(DENSE, block=BLOCK, clock=lambda: now[0])
    cache.add_tier("ssd", io, namespaces=[Namespace("")])
    cursor = cache.open(Prompt(np.array(ids, dtype=np.int64)), Namespace(""), CacheControl())
    row = LabRow(LabLayer([[]], DENSE))
    row.consume(ids[:40])
    cursor.commit(row)
    for _ in range(20):
        now[0] += 1.0
        cache.tick(load)
    assert len(io.written) == 5
    cursor.close(None)


def test_what_has_its_time_is_not_written_where_it_would_outlive_it() -> None:
    now, ids = [0.0], words(1, 40)
    io = SickWorker(lambda name: None)
    cache = tree(DENSE, block=BLOCK, clock=lambda: now[0])
    cache.add_tier("ssd", io, namespaces=[Namespace("")])
    with LabEngine(DENSE, cache=cache) as lab:
        lab.submit(ids, 4, control=CacheControl(ttl_s=1000.0)).wait().check()
        settled(lab, now)
        assert io.written == []
        lab.submit(ids, 4).wait().check()
        settled(lab, now)
        assert len(io.written) >= 5, "now somebody wants it to stay"


def test_a_stop_writes_more_than_the_queue_holds() -> None:
    stored: dict[str, bytes] = {}
    io = TierWorker(DictTier(1 << 20, stored), n_threads=1, max_write_nbytes=1)
    cache = tree(DENSE, block=BLOCK)
    cache.add_tier("ssd", io, namespaces=[Namespace("")])
    ids = words(1, 81)
    cursor = cache.open(Prompt(np.array(ids, dtype=np.int64)), Namespace(""), CacheControl())
    row = LabRow(LabLayer([[]], DENSE))
    row.consume(ids[:80])
    cursor.commit(row)
    cursor.close(None)
    names = {str(Name(r.node.key, r.part)) for r in records_of(cache)}
    assert len(names) == 10
    cache.close()
    assert set(stored) == names


def test_a_refusal_is_not_asked_for_again_and_again() -> None:
    now = [0.0]
    io = SickWorker(lambda name: Refused("write budget"))
    cache = tree(DENSE, block=BLOCK, clock=lambda: now[0])
    cache.add_tier("ssd", io, namespaces=[Namespace("")])
    with LabEngine(DENSE, cache=cache) as lab:
        lab.submit(words(1, 40), 4).wait().check()
        settled(lab, now)
        n_records = len([r for r in records_of(cache) if r.arrays is not None])
        settled(lab, now)
        settled(lab, now)
        assert io.n_tries == n_records


def test_what_left_memory_meanwhile_is_not_held_on_to() -> None:
    now = [0.0]
    io = SickWorker(lambda name: TierFault("disk full"))
    cache = tree(DENSE, block=BLOCK, clock=lambda: now[0])
    cache.add_tier("ssd", io, namespaces=[Namespace("")])
    with LabEngine(DENSE, cache=cache) as lab:
        lab.submit(words(1, 40), 4).wait().check()
        settled(lab, now)
        lab.between_steps(partial(cache.set_room, 0))
        lab.between_steps(partial(cache.set_room, 1 << 40))
        settled(lab, now)
        before = io.n_tries
        io.fault = lambda name: None
        settled(lab, now)
        assert io.n_tries == before
        assert records_of(cache) == []


class TalkativeWorker(SickWorker):
    """Reports what a scan found before each end of a write."""

    def write(self, order: WriteOrder) -> bool:
        self.seen(())
        return super().write(order)


def test_what_arrives_while_the_engine_waits_for_a_write_is_left_for_the_next_poll() -> None:
    ids = words(1, 9)
    cache = tree(DENSE, block=BLOCK)
    cache.add_tier("ssd", TalkativeWorker(lambda name: None), namespaces=[Namespace("")])
    cursor = cache.open(lab_prompt(ids), Namespace(""), CacheControl())
    row = LabRow(LabLayer([[]], DENSE))
    row.consume(ids[:8])
    cursor.commit(row)
    cache.tick(EngineLoad.NONE)
    tier, event = next(cache.records.tiers.take_writes(60.0))
    assert isinstance(event, RecordWritten)
    assert not tier.idle
    assert [*tier.poll(EngineLoad.NONE)] == [ScanBatch(())]
    assert tier.idle
    cursor.close(None)


@dataclass
class Reader:
    """Implements orders.Demand."""

    front: int = 0
    over: bool = False


class ReadingWorker(SickWorker):
    """Reads end when the test says so."""

    def __init__(self) -> None:
        super().__init__(lambda name: None)
        self.reads: list[ReadOrder] = []

    def read(self, order: ReadOrder) -> None:
        self.reads.append(order)


def test_a_read_given_up_is_ordered_again_if_somebody_wants_it_by_then() -> None:
    ids, io = words(1, 9), ReadingWorker()
    cache = tree(DENSE, block=BLOCK)
    cache.add_tier("ssd", io, namespaces=[Namespace("")])
    cursor = cache.open(lab_prompt(ids), Namespace(""), CacheControl())
    row = LabRow(LabLayer([[]], DENSE))
    row.consume(ids[:8])
    cursor.commit(row)
    cursor.close(None)
    for _ in range(2):
        cache.tick(EngineLoad.NONE)
    cache.set_room(0)
    (record,), (tier,) = records_of(cache), cache.records.tiers
    reader = Reader()
    tier.load(record, reader)
    io.end(io.reads[0], Unwanted())
    cache.tick(EngineLoad.NONE)
    assert len(io.reads) == 2
    assert tier.is_reading(record)
    reader.over = True
    io.end(io.reads[1], Unwanted())
    cache.tick(EngineLoad.NONE)
    assert len(io.reads) == 2
    assert not tier.is_reading(record)
    assert not record.reading


# --- records that were read in vain --------------------------------------------------------


class NoArrays(TierWorker):
    """Counts the records whose arrays could not be made."""

    n_failed = 0

    def arrays(self, order: ReadOrder, loaded: Loaded) -> Payload:
        try:
            return super().arrays(order, loaded)
        except RuntimeError:
            self.n_failed += 1
            raise


def test_who_waits_hears_at_once_that_no_arrays_could_be_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def from_host(*args: object) -> Payload:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(worker, "from_host", from_host)
    stored: dict[str, bytes] = {}
    ids = words(1, 41)
    writer = tree(DENSE, block=BLOCK)
    writer.add_tier(
        "ssd",
        TierWorker(DictTier(1 << 20, stored), n_threads=1),
        namespaces=[Namespace("")],
    )
    row = LabRow(LabLayer([[]], DENSE))
    row.consume(ids)
    cursor = writer.open(lab_prompt(ids), Namespace(""), CacheControl())
    cursor.close(row)
    writer.close()
    assert len(stored) > 4

    cache, woken = tree(DENSE, block=BLOCK), threading.Event()
    io = NoArrays(DictTier(1 << 20, stored), n_threads=1, wake=woken.set)
    cache.add_tier("ssd", io, namespaces=[Namespace("")])
    cursor = cache.open(lab_prompt(ids), Namespace(""), CacheControl())
    assert cursor.racing
    while cursor.racing:
        assert woken.wait(20.0)
        woken.clear()
        cache.tick(EngineLoad.NONE)
    assert set(cache.stats.faults) == {"read: no arrays"}
    assert io.n_failed == sum(cache.stats.faults.values()), "the tier hears of each"
    assert cache.records.counts.of(Namespace("")).faults == cache.stats.faults
    cursor.restore()
    assert cursor.admission.why == "read failed"
    cursor.close(None)
    cache.close()


class LateWorker(SickWorker):
    """Writes end when the test says so."""

    def __init__(self) -> None:
        super().__init__(lambda name: None)
        self.waiting: list[WriteOrder] = []
        self.deleted: list[Name] = []

    def delete(self, names: Iterable[Name]) -> None:
        self.deleted += names

    def write(self, order: WriteOrder) -> bool:
        self.waiting.append(order)
        return True


def test_what_leaves_memory_counts_until_every_tier_has_it() -> None:
    late, ids = LateWorker(), words(1, 9)
    cache = tree(DENSE, block=BLOCK)
    for name, io in (("fast", SickWorker(lambda name: None)), ("slow", late)):
        cache.add_tier(name, io, namespaces=[Namespace("")])
    cursor = cache.open(Prompt(np.array(ids, dtype=np.int64)), Namespace(""), CacheControl())
    row = LabRow(LabLayer([[]], DENSE))
    row.consume(ids[:8])
    cursor.commit(row)
    cursor.close(None)
    (record,) = records_of(cache)
    cache.set_room(0)
    cache.tick(EngineLoad.NONE)
    assert record.is_stored(0)
    assert cache.records.ledger.leaving_nbytes == record.nbytes
    (order,) = late.waiting
    late.end(order, WriteResult(1, new=True))
    cache.tick(EngineLoad.NONE)
    assert cache.records.ledger.leaving_nbytes == 0
    assert record.arrays is None


# --- what tiers hear -----------------------------------------------------------------------


@pytest.mark.parametrize("stops", [False, True])
def test_a_tier_learns_of_a_use_after_the_step_in_which_it_was(stops: bool) -> None:
    """A long prompt's restore has no time for it."""
    now, ids = [0.0], words(1, 41)
    io = SickWorker(lambda name: None)
    cache = tree(DENSE, block=BLOCK, clock=lambda: now[0], wall=lambda: now[0])
    cache.add_tier("ssd", io, namespaces=[Namespace("")])
    with LabEngine(DENSE, cache=cache) as lab:
        lab.submit(ids, 4).wait().check()
        settled(lab, now)
        now[0] += 1000.0
        io.touched.clear()
        prompt = Prompt(np.array(ids, dtype=np.int64))
        cursor = cache.open(prompt, Namespace(""), CacheControl(write=False))
        assert isinstance(cursor, PrefixCursor)
        assert cursor.restore() is not None
        used = {Name(n.key, Part.PAGES) for n in cursor.committed.node.path()}
        assert len(used) == 5
        assert not io.touched
        assert not cache.records.tiers.idle, "a poll is due"
        if stops:
            list(cache.records.tiers.close())
        else:
            cache.tick(EngineLoad.NONE)
        assert io.touched == [used]
        cursor.close(None)


def test_what_is_cleared_before_its_write_has_begun_is_not_written() -> None:
    late, ids = LateWorker(), words(1, 17)
    cache = tree(DENSE, block=BLOCK)
    cache.add_tier("ssd", late, namespaces=[Namespace("")])
    cursor = cache.open(lab_prompt(ids), Namespace(""), CacheControl())
    row = LabRow(LabLayer([[]], DENSE))
    row.consume(ids[:16])
    cursor.commit(row)
    cursor.close(None)
    cache.tick(EngineLoad.NONE)
    first, second = late.waiting
    assert first.record is not None
    cache.records.forget(first.record.node)
    assert (first.wanted, second.wanted) == (False, True)
    cache.records.clear(Namespace(""))
    assert not second.wanted
    for order in late.waiting:
        late.end(order, Unwanted())
    cache.tick(EngineLoad.NONE)
    assert records_of(cache) == []


@pytest.mark.parametrize("is_back", [False, True])
def test_the_end_of_an_outdated_write_spares_what_is_written_anew(is_back: bool) -> None:
    """It had begun before it was cleared. Its record has the new one's name."""
    late, ids = LateWorker(), words(1, 9)
    cache = tree(DENSE, block=BLOCK)
    cache.add_tier("ssd", late, namespaces=[Namespace("")])

    def compute() -> None:
        cursor = cache.open(lab_prompt(ids), Namespace(""), CacheControl())
        row = LabRow(LabLayer([[]], DENSE))
        row.consume(ids[:8])
        cursor.commit(row)
        cursor.close(None)
        cache.tick(EngineLoad.NONE)

    compute()
    cache.records.clear(Namespace(""))
    if is_back:
        compute()
    (old, *new) = late.waiting
    assert len(new) == is_back
    late.end(old, WriteResult(1, new=True))
    cache.tick(EngineLoad.NONE)
    assert late.deleted == ([] if is_back else [old.header.name])


def test_an_engine_that_leaves_results_for_later_is_not_done(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody wakes it for them again."""
    monkeypatch.setitem(desk.POLL_S, EngineLoad.NONE, -1.0)
    late, ids = LateWorker(), words(1, 17)
    cache = tree(DENSE, block=BLOCK)
    cache.add_tier("ssd", late, namespaces=[Namespace("")])
    cursor = cache.open(lab_prompt(ids), Namespace(""), CacheControl())
    row = LabRow(LabLayer([[]], DENSE))
    row.consume(ids[:16])
    cursor.commit(row)
    cursor.close(None)
    cache.tick(EngineLoad.NONE)
    assert cache.settled
    for order in late.waiting:
        late.end(order, WriteResult(1, new=True))
    cache.tick(EngineLoad.NONE)
    assert not cache.settled
    cache.tick(EngineLoad.NONE)
    assert cache.settled


class HungTier(DictTier):
    """Has noted and deleted nothing when the server stops."""

    def __init__(self) -> None:
        super().__init__(1 << 20)
        self.gate = threading.Event()

    def bury(self, root: str, at: float) -> None:
        self.gate.wait(20.0)

    def buried(self) -> Mapping[str, float]:
        return {}


def test_a_stop_ends_what_was_promised() -> None:
    tier, cache = HungTier(), tree(DENSE, block=BLOCK)
    cache.add_tier(
        "ssd", TierWorker(tier, n_threads=1, flush_timeout_s=0.05), namespaces=[Namespace("")]
    )
    promises = [p for _ in range(2) for p in cache.records.clear(Namespace("")).promises]
    cache.close()
    for promise in promises:
        with pytest.raises(NotForgotten):
            promise.result(0)
    tier.gate.set()
