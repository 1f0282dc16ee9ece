"""A record that could not be written is not forgotten: it is written when the tier recovers."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import pytest

from firn.cache.arrays.payload import Payload
from firn.cache.parts import Part
from firn.cache.prefix import PrefixCursor
from firn.cache.storage import client
from firn.cache.storage.container import Loaded, Name
from firn.cache.storage.events import ReadFailed, ScanBatch
from firn.cache.storage.faults import Missing, Refused, TierError, TierFault
from firn.cache.storage.io import Changes, ReadOrder, TierIo, WriteOrder
from firn.cache.storage.threads import Done, IoThreads
from firn.cache.tiers import TierStatus, TierUsage, WriteResult
from firn.cache.tree import Mark
from firn.core.ports import EngineLoad
from firn.core.values import CacheControl, Namespace, PackedTokens, Prompt
from tests.cache.lab import DENSE, LabEngine, LabLayer, LabRow, records_of, tree
from tests.cache.lab import prompt_of as lab_prompt
from tests.dict_tier import DictTier
from tests.hash_runner import prompt_of as words

BLOCK = 8


@dataclass
class SickIo:
    """Writes fail as `fault` decides; others count as stored. Runs on the caller's thread."""

    fault: Callable[[Name], TierError | None]
    status: TierStatus = TierStatus()
    written: list[Name] = field(default_factory=list)
    n_tries: int = 0
    touched: list[set[Name]] = field(default_factory=list)

    def try_write(self, order: WriteOrder, done: Done[WriteResult[Name]]) -> bool:
        name = order.header.name
        self.n_tries += 1
        fault = self.fault(name)
        if fault is None:
            self.written.append(name)
        done(fault or WriteResult(1, new=True))
        return True

    def has_room(self, nbytes: int) -> bool:
        return True

    def defer_writes(self, defer: bool) -> None: ...

    def read(self, order: ReadOrder, done: Done[Loaded]) -> None:
        raise AssertionError("nothing is read here")

    def delete(self, names: Iterable[Name]) -> None: ...

    def touch(self, stamps: Mapping[Name, float]) -> None:
        self.touched.append(set(stamps))

    def scan(self, batch: Callable[[Changes], None], done: Done[None]) -> None:
        done(None)

    def usage(self) -> TierUsage:
        return TierUsage(0, 1 << 20, self.status)

    def close(self) -> None: ...


def settled(lab: LabEngine, now: list[float]) -> None:
    """Let enough time pass for a retry, and enough steps to process its result."""
    now[0] += client.RESCAN_S + 1
    for _ in range(8):
        lab.between_steps(partial(lab.cache.tick, EngineLoad.NONE))  # type: ignore[union-attr]


def test_a_fault_that_ends() -> None:
    now, ids = [0.0], words(1, 40)
    io = SickIo(lambda name: TierFault("disk full"), TierStatus("paused", "disk full"))
    cache = tree(DENSE, block=BLOCK, clock=lambda: now[0])
    cache.add_tier("ssd", io, namespaces=[Namespace("")], wake=lambda: None)
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
    io = SickIo(lambda name: None)
    cache = tree(DENSE, block=BLOCK, clock=lambda: now[0])
    cache.add_tier("ssd", io, namespaces=[Namespace("")], wake=lambda: None)
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
    io = SickIo(lambda name: None)
    cache = tree(DENSE, block=BLOCK, clock=lambda: now[0])
    cache.add_tier("ssd", io, namespaces=[Namespace("")], wake=lambda: None)
    with LabEngine(DENSE, cache=cache) as lab:
        lab.submit(ids, 4, control=CacheControl(ttl_s=1000.0)).wait().check()
        settled(lab, now)
        assert io.written == []
        lab.submit(ids, 4).wait().check()
        settled(lab, now)
        assert len(io.written) >= 5, "now somebody wants it to stay"


def test_a_stop_writes_more_than_the_queue_holds() -> None:
    stored: dict[str, bytes] = {}
    io = TierIo(DictTier(1 << 20, stored), IoThreads(1, max_write_nbytes=1))
    cache = tree(DENSE, block=BLOCK)
    cache.add_tier("ssd", io, namespaces=[Namespace("")], wake=lambda: None)
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
    io = SickIo(lambda name: Refused("write budget"))
    cache = tree(DENSE, block=BLOCK, clock=lambda: now[0])
    cache.add_tier("ssd", io, namespaces=[Namespace("")], wake=lambda: None)
    with LabEngine(DENSE, cache=cache) as lab:
        lab.submit(words(1, 40), 4).wait().check()
        settled(lab, now)
        n_records = len([r for r in records_of(cache) if r.arrays is not None])
        settled(lab, now)
        settled(lab, now)
        assert io.n_tries == n_records


def test_what_left_memory_meanwhile_is_not_held_on_to() -> None:
    now = [0.0]
    io = SickIo(lambda name: TierFault("disk full"))
    cache = tree(DENSE, block=BLOCK, clock=lambda: now[0])
    cache.add_tier("ssd", io, namespaces=[Namespace("")], wake=lambda: None)
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


# --- records that were read in vain --------------------------------------------------------


class NoArrays(TierIo):
    """Counts the records whose arrays could not be made."""

    n_failed = 0

    def received(self, name: Name, make: Callable[[], Payload]) -> Payload:
        try:
            return make()
        except RuntimeError:
            self.n_failed += 1
            raise


def test_who_waits_hears_at_once_that_no_arrays_could_be_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def from_host(*args: object) -> Payload:
        raise RuntimeError("out of memory")

    monkeypatch.setattr(client, "from_host", from_host)
    stored: dict[str, bytes] = {}
    ids = words(1, 41)
    writer = tree(DENSE, block=BLOCK)
    writer.add_tier(
        "ssd",
        TierIo(DictTier(1 << 20, stored), IoThreads(1)),
        namespaces=[Namespace("")],
        wake=lambda: None,
    )
    row = LabRow(LabLayer([[]], DENSE))
    row.consume(ids)
    cursor = writer.open(lab_prompt(ids), Namespace(""), CacheControl())
    cursor.close(row)
    writer.close()
    assert len(stored) > 4

    cache, woken = tree(DENSE, block=BLOCK), threading.Event()
    io = NoArrays(DictTier(1 << 20, stored), IoThreads(1))
    cache.add_tier("ssd", io, namespaces=[Namespace("")], wake=woken.set)
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


class LateIo(SickIo):
    """Writes end when the test says so."""

    def __init__(self) -> None:
        super().__init__(lambda name: None)
        self.waiting: list[Done[WriteResult[Name]]] = []

    def try_write(self, order: WriteOrder, done: Done[WriteResult[Name]]) -> bool:
        self.waiting.append(done)
        return True


def test_what_leaves_memory_counts_until_every_tier_has_it() -> None:
    late, ids = LateIo(), words(1, 9)
    cache = tree(DENSE, block=BLOCK)
    for name, io in (("fast", SickIo(lambda name: None)), ("slow", late)):
        cache.add_tier(name, io, namespaces=[Namespace("")], wake=lambda: None)
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
    (done,) = late.waiting
    done(WriteResult(1, new=True))
    cache.tick(EngineLoad.NONE)
    assert cache.records.ledger.leaving_nbytes == 0
    assert record.arrays is None


# --- scans that are faster than the engine -------------------------------------------------


class ManyIo(SickIo):
    """A scan of a thousand batches, on a thread of its own."""

    def __init__(self) -> None:
        super().__init__(lambda name: None)
        self.n_told = 0
        self.is_held_up = threading.Event()
        self.thread = threading.Thread(target=lambda: None)

    def scan(self, batch: Callable[[Changes], None], done: Done[None]) -> None:
        def tell() -> None:
            for _ in range(N_BATCHES):
                if self.n_told == client.MAX_BATCHES:
                    self.is_held_up.set()
                batch([])
                self.n_told += 1
            done(None)

        self.thread = threading.Thread(target=tell)
        self.thread.start()


N_BATCHES = 1000


def opened() -> tuple[ManyIo, client.TierClient]:
    cache, io = tree(DENSE, block=BLOCK), ManyIo()
    inner = cache.records
    made = client.TierClient(
        "many",
        io,
        inner.ledger,
        inner.tree,
        inner.catalogue,
        stamp=inner.tree.order.stamp,
        wake=lambda: None,
    )
    made.scan()
    assert io.is_held_up.wait(20.0)
    return io, made


def test_a_scan_waits_for_an_engine_that_has_no_time() -> None:
    io, made = opened()
    assert io.n_told <= client.MAX_BATCHES, "the rest would lie about in memory"
    n_seen = 0
    while made.scanning:
        n_seen += sum(isinstance(n, ScanBatch) for n in made.take_results(math.inf, wait_s=5.0))
    assert n_seen == N_BATCHES
    io.thread.join()


def test_a_stop_ends_a_scan_that_waits() -> None:
    io, made = opened()
    made.close()
    io.thread.join(20.0)
    assert not io.thread.is_alive()


def test_what_was_read_comes_before_what_a_scan_tells() -> None:
    io, made = opened()
    root = made._catalogue.root(Namespace(""))
    node = made._tree.child(root, PackedTokens(np.zeros(8, np.uint64)), 0, 8)
    record = made._tree.add(node, Part.PAGES, nbytes=1, mark=Mark.TURN)
    made._ledger.begin_read(record, made.number)
    made._done(partial(made._was_read, record), is_urgent=True)(Missing())
    assert isinstance(next(made.take_results(math.inf)), ReadFailed)
    made.close()
    io.thread.join(20.0)


@pytest.mark.parametrize("stops", [False, True])
def test_a_tier_learns_of_a_use_after_the_step_in_which_it_was(stops: bool) -> None:
    """A long prompt's restore has no time for it."""
    now, ids = [0.0], words(1, 41)
    io = SickIo(lambda name: None)
    cache = tree(DENSE, block=BLOCK, clock=lambda: now[0], wall=lambda: now[0])
    cache.add_tier("ssd", io, namespaces=[Namespace("")], wake=lambda: None)
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
