"""A tier of a sharded model: what all ranks have, and nothing else."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from firn.cache.arrays.payload import Payload
from firn.cache.parts import Part
from firn.cache.storage.container import Header, Label, Loaded, Name, TierEntry
from firn.cache.storage.faults import Damaged, Missing, Refused, TierFault, Unwanted
from firn.cache.storage.orders import (
    Changes,
    Order,
    Outcome,
    ReadOrder,
    ReadOver,
    ScanBatch,
    ScanEnded,
    ScanOrder,
    WriteOrder,
    WriteOver,
)
from firn.cache.tiers import Gone, WriteResult
from firn.core.keys import Key
from firn.core.values import PackedTokens
from firn.ranks.cache.mirror import Mirror, number_of
from firn.ranks.cache.worker import RankWorker
from firn.ranks.calls import OnAnswer, RankCall, RankLost
from tests.cache.fake_worker import FakeWorker

LAYOUT = "kv16;float32 rank 0 of 3;block4;full"
TOKENS = np.arange(4, dtype=np.uint64)


def name(number: int) -> Name:
    return Name(Key(bytes([number]) * 32), Part.PAGES)


def header(number: int, *, layout: str = LAYOUT) -> Header:
    return Header(
        key=name(number).key,
        parent=Key(bytes(32)),
        root=Key(bytes(32)),
        part=Part.PAGES,
        start=0,
        fingerprint=b"f",
        namespace="",
        created=1.0,
        mark=0,
        tokens=TOKENS,
        layout=layout,
        tensors=(),
        places=(),
    )


def entry(number: int, *, layout: str = LAYOUT) -> TierEntry:
    h = header(number, layout=layout)
    fields = (f for f in Label.__dataclass_fields__ if f not in ("tensors", "places"))
    return TierEntry(Label(**{f: getattr(h, f) for f in fields}), 10, 1.0, PackedTokens(TOKENS))


@dataclass(eq=False)
class Others:
    """Implements calls.Followers: two followers that answer what the test tells them to."""

    n_followers: int = 2
    is_lost: bool = False
    told: list[RankCall] = field(default_factory=list)
    hearers: dict[str, OnAnswer] = field(default_factory=dict)

    def tell(self, name: str, *args: Any, blob: bytes = b"") -> None:
        self.told.append(RankCall(name, args, blob))

    def tell_later(self, name: str, *args: Any) -> None:
        self.told.append(RankCall(name, args))

    def on_answer(self, name: str, take: OnAnswer) -> None:
        self.hearers[name] = take

    def end_group(self, why: str) -> RankLost:
        return RankLost(why)

    def say(self, rank: int, what: str, *args: Any) -> None:
        self.hearers[what](rank, RankCall(what, args))

    def were_told(self, what: str) -> list[RankCall]:
        return [call for call in self.told if call.name == what]


class OwnWorker(FakeWorker):
    """Rank 0's own tier; the test decides how its orders end."""

    def __init__(self) -> None:
        super().__init__()
        self.results = self
        self.orders: list[Order] = []
        self.deleted: list[Name] = []
        self.takes = True
        self.n_nudges = 0

    def nudge(self) -> None:
        self.n_nudges += 1

    def write(self, order: WriteOrder) -> bool:
        self.orders.append(order)
        return self.takes

    def read(self, order: ReadOrder) -> None:
        self.orders.append(order)

    def scan(self, order: ScanOrder) -> None:
        self.orders.append(order)

    def delete(self, names: Iterable[Name]) -> None:
        self.deleted += names

    def arrays(self, order: ReadOrder, loaded: Loaded) -> Payload:
        return Payload((), ())

    def done(self, result: Any) -> None:
        """End the last order."""
        self.end(self.orders[-1], result)

    def batch(self, changes: Changes) -> None:
        self.seen(changes)


class Case:
    def __init__(self) -> None:
        self.own, self.others = OwnWorker(), Others()
        self.mirror = Mirror(self.others)
        own: Any = self.own
        self.worker = RankWorker(own, self.others, self.mirror, layout=LAYOUT)
        self._outcomes: list[Outcome] = []

    def _polled(self) -> list[Outcome]:
        while (outcome := self.worker.poll()) is not None:
            self._outcomes.append(outcome)
        return self._outcomes

    @property
    def results(self) -> list[Any]:
        """How reads and writes have ended."""
        return [o.result for o in self._polled() if isinstance(o, ReadOver | WriteOver)]

    @property
    def scans(self) -> int:
        return sum(isinstance(o, ScanEnded) for o in self._polled())

    def order(self, number: int) -> WriteOrder:
        payload = self.mirror.made(Payload((), ()), "cut")
        record: Any = SimpleNamespace(arrays=payload)
        return WriteOrder(header(number), None, 1.0, record)

    def write(self, number: int) -> int:
        """Returns the order's number."""
        self.worker.submit(self.order(number))
        return int(self.others.were_told("write")[-1].args[0])

    def read(self, number: int) -> int:
        self.worker.submit(ReadOrder(name(number), TOKENS))
        return int(self.others.were_told("read")[-1].args[0])

    def scan(self) -> None:
        self.worker.submit(ScanOrder())

    def _seen(self) -> list[Any]:
        return [c for o in self._polled() if isinstance(o, ScanBatch) for c in o.changes]

    def there(self) -> list[Name]:
        return [change.name for change in self._seen() if isinstance(change, TierEntry)]

    def gone(self) -> list[Name]:
        return [change.name for change in self._seen() if isinstance(change, Gone)]

    def taken(self) -> Payload:
        """What the tree makes of the read that has just ended."""
        (outcome,) = self._polled()
        assert isinstance(outcome, ReadOver)
        assert isinstance(outcome.result, Loaded)
        return self.worker.arrays(outcome.order, outcome.result)


# --- writing -------------------------------------------------------------------------------


def test_written_when_all_have_written() -> None:
    case = Case()
    serial = case.write(1)
    case.others.say(2, "written", serial, None, [])
    case.own.done(WriteResult(10, new=True))
    assert not case.results
    case.others.say(1, "written", serial, None, [])
    assert case.results == [WriteResult(10, new=True)]


def test_what_one_cannot_write_nobody_keeps() -> None:
    for fault, kind in ((["fault", "disk full"], TierFault), (["refused", "full"], Refused)):
        case = Case()
        serial = case.write(1)
        case.own.done(WriteResult(10, new=True))
        case.others.say(1, "written", serial, fault, [])
        case.others.say(2, "written", serial, None, [])
        assert isinstance(case.results[0], kind)
        assert "rank 1" in case.results[0].reason
        assert case.own.deleted == [name(1)]
        assert case.others.were_told("delete")[0].args == ([str(name(1))],)


def test_what_rank_0_does_not_want_any_more() -> None:
    case = Case()
    serial = case.write(1)
    for rank in (1, 2):
        case.others.say(rank, "written", serial, None, [])
    case.own.done(Unwanted())
    assert isinstance(case.results[0], Unwanted)
    assert case.others.were_told("delete")


def test_a_full_queue_here_asks_nobody() -> None:
    case = Case()
    case.own.takes = False
    order = case.order(1)
    case.others.told.clear()
    assert not case.worker.submit(order)
    assert not case.others.told


def test_what_one_evicts_goes_everywhere() -> None:
    case = Case()
    case.scan()
    serial = case.write(1)
    case.own.done(WriteResult(10, new=True, evicted=(name(8),)))
    case.others.say(1, "written", serial, None, [str(name(9))])
    case.others.say(2, "written", serial, None, [])
    assert case.gone() == [name(9)]
    assert case.own.deleted == [name(9)]
    deleted = [text for call in case.others.were_told("delete") for text in call.args[0]]
    assert set(deleted) == {str(name(8)), str(name(9))}
    assert case.results == [WriteResult(10, new=True, evicted=(name(8),))]


# --- reading -------------------------------------------------------------------------------


def test_read_when_all_have_read() -> None:
    case = Case()
    serial = case.read(1)
    loaded = Loaded(header(1), [])
    for rank in (1, 2):
        case.others.say(rank, "read", serial, "")
        assert not case.results
    case.own.done(loaded)
    assert case.results == [loaded]


def test_what_one_cannot_read_is_a_miss() -> None:
    case = Case()
    serial = case.read(1)
    case.own.done(Loaded(header(1), []))
    case.others.say(1, "read", serial, "")
    case.others.say(2, "read", serial, "bad checksum")
    assert isinstance(case.results[0], Missing)
    assert case.others.were_told("discard_read")[0].args == (serial,), (
        "rank 1 drops what it has read"
    )


def test_rank_0s_own_fault_is_told_as_it_is() -> None:
    case = Case()
    serial = case.read(1)
    for rank in (1, 2):
        case.others.say(rank, "read", serial, "")
    case.own.done(Damaged("bad checksum"))
    assert isinstance(case.results[0], Damaged)
    assert case.others.were_told("discard_read")


def test_another_ranks_slice_is_not_read() -> None:
    case = Case()
    serial = case.read(1)
    for rank in (1, 2):
        case.others.say(rank, "read", serial, "")
    case.own.done(Loaded(header(1, layout=LAYOUT.replace("rank 0", "rank 1")), []))
    assert isinstance(case.results[0], Missing)


def test_what_rank_0_has_no_arrays_for_nobody_keeps() -> None:
    case = Case()
    serial = case.read(1)
    for rank in (1, 2):
        case.others.say(rank, "read", serial, "")
    case.own.done(Loaded(header(1), []))

    def fail(order: ReadOrder, loaded: Loaded) -> Payload:
        raise MemoryError("no room")

    case.own.arrays = fail  # type: ignore[method-assign]
    with pytest.raises(MemoryError):
        case.taken()
    assert [call.args for call in case.others.were_told("discard_read")] == [(serial,)]
    assert not case.others.were_told("arrive")


def test_what_rank_0_takes_all_keep() -> None:
    case = Case()
    serial = case.read(1)
    for rank in (1, 2):
        case.others.say(rank, "read", serial, "")
    case.own.done(Loaded(header(1), []))
    taken = case.taken()
    assert [call.args for call in case.others.were_told("arrive")] == [(number_of(taken), serial)]
    assert not case.others.were_told("discard_read")


# --- what there is -------------------------------------------------------------------------


def test_there_is_what_all_have_found() -> None:
    case = Case()
    case.scan()
    case.others.say(1, "seen", [str(name(1)), str(name(2))], [])
    case.own.batch([entry(1), entry(2), entry(3)])
    assert case.there() == []
    case.others.say(2, "seen", [str(name(2)), str(name(3))], [])
    assert case.there() == [name(2)]
    case.others.say(1, "seen", [str(name(3))], [])
    assert case.there() == [name(2), name(3)]


def test_what_one_lost_is_gone_until_it_has_it_again() -> None:
    case = Case()
    case.scan()
    for rank in (1, 2):
        case.others.say(rank, "seen", [str(name(1))], [])
    case.others.say(2, "seen", [], [str(name(1))])
    assert case.gone() == [name(1)]
    case.own.batch([entry(1)])
    assert case.there() == []
    case.others.say(2, "seen", [str(name(1))], [])
    assert case.there() == [name(1)]


def test_another_ranks_records_are_not_seen() -> None:
    case = Case()
    case.scan()
    for rank in (1, 2):
        case.others.say(rank, "seen", [str(name(1))], [])
    case.own.batch([entry(1, layout=LAYOUT.replace("rank 0", "rank 2"))])
    assert case.there() == []


def test_a_scan_ends_when_all_have_scanned() -> None:
    case = Case()
    case.scan()
    case.others.say(1, "scanned")
    case.own.done(None)
    assert not case.scans
    case.others.say(2, "scanned")
    assert case.scans == 1
    assert case.own.n_nudges == 2, "the engine is woken for what others say"
