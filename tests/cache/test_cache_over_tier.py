"""Random use of the cache over a tier that is slow, loses records, evicts and fails, in any order."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule, run_state_machine_as_test

from firn.cache import records
from firn.cache.admin import control as admin
from firn.cache.parts import Part
from firn.cache.storage.container import Header, Loaded, Name, TierEntry
from firn.cache.storage.faults import (
    Damaged,
    Missing,
    TierError,
    TierFault,
    TierFull,
    Unwanted,
)
from firn.cache.storage.orders import ReadOrder, ScanOrder, WriteOrder
from firn.cache.tiers import Gone, TierStatus, TierUsage, WriteResult
from firn.core.ports import EngineLoad
from firn.core.values import Namespace, PackedTokens
from tests.cache.fake_worker import FakeWorker
from tests.cache.lab import SHAPES, Shape, check_tree, n_leases, records_of
from tests.cache.test_cache_tree import NAMES, Machine
from tests.cache.test_decisions import Hasty

Fate = str
FATES = st.sampled_from(["well", "well", "well", "well", "fault", "evict", "evict", "damaged"])


class DictWorker(FakeWorker):
    """A tier whose orders wait until they are told to run, and may then end badly."""

    def __init__(self, carrier: Part) -> None:
        super().__init__()
        self.carrier = carrier
        """The part of a block that the next block needs."""
        self.stored: dict[Name, tuple[Header, list[memoryview]]] = {}
        self.stamps: dict[Name, float] = {}
        self.orders: deque[Callable[[Fate], None]] = deque()
        self.damaged: set[Name] = set()
        self.gone: list[Name] = []
        """Records that somebody else deleted; the next scan reports them."""
        self.rng = random.Random(3)
        self.paused = self.scanned = False

    def write(self, order: WriteOrder) -> bool:
        if not self.has_room(0):
            return False
        self.orders.append(lambda fate: self.end(order, self._write(order, fate)))
        return True

    def _write(self, order: WriteOrder, fate: Fate) -> WriteResult[Name] | TierError:
        header = order.header
        if not order.wanted or order.content is None:
            return Unwanted()
        self.paused = fate == "fault"
        if self.paused:
            return TierFault("disk full")
        evicted = []
        if fate == "evict" and self.stored:
            oldest = min(self.stored, key=lambda name: self.stamps[name])
            if self.stamps[oldest] > order.used_at:
                return TierFull()
            assert not self.is_needed(oldest), "evicted before what needs it"
            evicted.append(oldest)
            del self.stored[oldest]
        self.stored[header.name] = header, [memoryview(bytes(b)) for b in order.content.fetch()]
        self.stamps[header.name] = order.used_at
        self.gone = [name for name in self.gone if name != header.name]
        return WriteResult(1, new=True, evicted=tuple(evicted))

    def is_needed(self, name: Name) -> bool:
        """Whether something else can be resumed from only with it."""
        others = (header for other, (header, _) in self.stored.items() if other != name)
        return self.is_whole(name) and any(name.key in (h.key, h.above) for h in others)

    def is_whole(self, name: Name) -> bool:
        """Whether it carries a chain of which nothing is missing."""
        if name.part is not self.carrier or name not in self.stored:
            return False
        above = self.stored[name][0].above
        return above is None or self.is_whole(Name(above, self.carrier))

    def has_room(self, nbytes: int) -> bool:
        return len(self.orders) < 12

    def read(self, order: ReadOrder) -> None:
        self.orders.append(lambda fate: self.end(order, self._read(order, fate)))

    def _read(self, order: ReadOrder, fate: Fate) -> Loaded | TierError:
        name = order.name
        if not order.wanted:
            return Unwanted()
        if name not in self.stored:
            return Missing()
        if fate == "damaged" or name in self.damaged:
            self.damaged.discard(name)
            del self.stored[name]
            return Damaged("bad checksum")
        return Loaded(*self.stored[name])

    def delete(self, names: Iterable[Name]) -> None:
        for name in names:
            self.stored.pop(name, None)

    def touch(self, stamps: Mapping[Name, float]) -> None:
        for name, stamp in stamps.items():
            if name in self.stored:
                self.stamps[name] = max(self.stamps[name], stamp)

    def scan(self, order: ScanOrder) -> None:
        """In any order: a tier's stamps may come from a clock that was wrong."""
        gone, self.gone = self.gone, []
        self.seen([Gone(name) for name in gone])
        if not self.scanned:
            self.scanned = True
            every = [
                TierEntry(h, sum(map(len, raw)), self.stamps[name], PackedTokens(h.tokens))
                for name, (h, raw) in self.stored.items()
            ]
            self.rng.shuffle(every)
            self.seen(every)
        self.end(order, None)

    def usage(self) -> TierUsage:
        return TierUsage(0, 1 << 20, TierStatus("paused" if self.paused else "ok"))


class OverATier(Machine):
    @initialize(limit=st.sampled_from([60, 200, 600, 1 << 30]))
    def start(self, limit: int) -> None:
        super().start(limit)
        self.io = DictWorker(Part.PAGES if self.shape.pages else Part.WINDOW)
        self.asked: list[tuple[int, int, list[int]]] = []
        self.add_tier()

    def add_tier(self) -> None:
        self.tree.records.estimates = Hasty()
        names = [Namespace(name) for name in NAMES]
        self.tree.add_tier("ssd", self.io, namespaces=names)

    @rule(
        base=st.integers(0, 2),
        n=st.integers(1, 60),
        tail=st.lists(st.integers(1, 3), max_size=3),
        ttl=st.sampled_from([None, None, 5.0]),
        fates=st.lists(FATES, min_size=1, max_size=4),
    )
    def serve(
        self, base: int, n: int, tail: list[int], ttl: float | None, fates: list[Fate]
    ) -> None:
        """A whole request, while the tier does what it likes."""
        self.asked.append((base, n, tail))
        self.arrive(base, n, tail, NAMES[0], ttl, True, True)
        request = self.requests[-1]
        self.run_orders(fates, later=False)
        self.admit(self.waiting().index(request))
        while request in self.reading():
            self.run_orders(fates[:1], later=True)
            self.read_chunk(self.reading().index(request))
        self.begin(self.read().index(request), 1)
        self.decode(self.decoding().index(request), 5)
        self.finish(self.decoding().index(request), ahead=True, failed=False)

    @precondition(lambda self: self.asked)
    @rule(pick=st.integers(0, 99), restarted=st.booleans(), fates=st.lists(FATES, min_size=1))
    def serve_again(self, pick: int, restarted: bool, fates: list[Fate]) -> None:
        if restarted:
            self.restart()
        base, n, tail = self.asked[pick % len(self.asked)]
        self.serve(base, n, tail, None, fates)

    @rule(fates=st.lists(FATES, min_size=1, max_size=12), later=st.booleans())
    def run_orders(self, fates: list[Fate], later: bool) -> None:
        for fate in fates:
            if self.io.orders:
                order = self.io.orders.pop() if later else self.io.orders.popleft()
                order(fate)
                self.tree.tick(EngineLoad.DECODING)

    @precondition(lambda self: self.io.stored)
    @rule(pick=st.integers(0, 99), n=st.integers(1, 4))
    def somebody_else_evicts(self, pick: int, n: int) -> None:
        for name in list(self.io.stored)[pick % len(self.io.stored) :][:n]:
            del self.io.stored[name]
            self.io.gone.append(name)

    @rule()
    def rest(self) -> None:
        """Everything that is wanted is written, and a scan reports what others did."""
        self.now += 11.0
        for _ in range(4):
            self.tree.tick(EngineLoad.NONE)
            while self.io.orders:
                self.io.orders.popleft()("well")
            self.tree.tick(EngineLoad.NONE)

    @rule()
    def restart(self) -> None:
        while self.requests:
            self.cancel(0, failed=True)
        self.rest()
        self.protected = {}
        self.n_held = 0
        self.io.scanned = False
        self.io.orders.clear()  # what the last process had queued died with it
        self.new_tree()
        self.add_tier()
        self.set_room(self.room)

    @rule(at=st.sampled_from([0.0, 1e9 - 3600, 1e9]), spread=st.sampled_from([0.0, 100.0]))
    def restart_on_a_copy(self, at: float, spread: float) -> None:
        """Copied files have the time of the copy, in any order."""
        for name in self.io.stored:
            self.io.stamps[name] = at + spread * self.rng.random()
        self.restart()

    @invariant()
    def in_order(self) -> None:
        if not hasattr(self, "io"):
            return
        check_tree(self.tree, whole=False)
        memory = self.tree.records.memory
        assert memory.nbytes <= max(memory.limit_nbytes, self.n_held), "grew past the limit"
        self.n_held = (
            memory.nbytes + self.tree.records.ledger.leaving_nbytes
        )  # it may stay after all
        faults = {f for f in self.tree.stats.faults if not f.startswith("read: ")}
        assert not faults
        self.check_leases()
        self.check_protected()

    def protect(self) -> None:
        """Once stored, what a lone request has computed may leave memory to make room."""
        super().protect()
        self.protected = {
            r: n
            for r, n in self.protected.items()
            if r.arrays is not None and (n.n_pins or n.n_leases > 1)
        }

    def teardown(self) -> None:
        """Whatever happened, all memory can be freed, and everything stored can be deleted."""
        if not hasattr(self, "io"):
            return
        while self.requests:
            self.cancel(0, failed=False)
        self.rest()
        tree = self.tree.records.tree
        assert n_leases(self.tree) == 0
        assert self.tree.records.ledger.leaving_nbytes == 0
        for root in tree.roots():
            for end in list(root.pinned):
                self.tree.records.unpin(end)
        assert self.tree.records.memory.shrink_to(0), "something cannot be evicted"
        admin.clear(self.tree)
        self.rest()
        assert records_of(self.tree) == []
        assert self.tree.records.memory.nbytes == 0
        assert not self.io.stored, "cleared, and still stored"


EACH = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
MODE = pytest.mark.parametrize("exact", [False, True], ids=["full", "exact"])


def run(shape: Shape, exact: bool, *, n_examples: int) -> None:
    run_state_machine_as_test(
        type("M", (OverATier,), {"shape": shape, "exact": exact}),
        settings=settings(
            max_examples=n_examples,
            stateful_step_count=50,
            deadline=None,
            report_multiple_bugs=False,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Orders run only when the machine runs them: waiting for them would be in vain."""
    monkeypatch.setattr(records, "WRITE_WAIT_S", 0.0)


@MODE
@EACH
def test_random_use_over_a_tier(shape: Shape, exact: bool) -> None:
    run(shape, exact, n_examples=10)


@pytest.mark.soak
@MODE
@EACH
def test_much_random_use_over_a_tier(shape: Shape, exact: bool) -> None:
    run(shape, exact, n_examples=200)
