"""Random use of the cache over a tier that is slow, loses records, evicts and fails, in any order."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule, run_state_machine_as_test

from firn.cache import admin
from firn.cache.container import Header, Loaded, Name
from firn.cache.faults import Damaged, Missing, TierFault, Unwanted
from firn.cache.io import Changes, Done
from firn.cache.tiers import Gone, Status, Stored, Usage
from firn.core.keys import KeyTokens
from firn.core.ports import Load
from firn.core.values import Namespace
from tests.cache.lab import SHAPES, Shape, check_tree, n_leases, records_of
from tests.cache.test_cache_tree import NAMES, Machine
from tests.cache.test_decisions import Hasty

Fate = str
FATES = st.sampled_from(["well", "well", "well", "fault", "evict", "damaged"])


@dataclass
class DictIo:
    """A tier whose orders wait until they are told to run."""

    stored: dict[Name, tuple[Header, list[memoryview]]] = field(default_factory=dict)
    orders: deque[Callable[[Fate], None]] = field(default_factory=deque)
    gone: list[Name] = field(default_factory=list)
    rng: random.Random = field(default_factory=lambda: random.Random(3))

    def try_write(
        self,
        header: Header,
        buffers: Sequence[Any],
        *,
        used_at: float,
        done: Done,
        wanted: Callable[[], bool],
    ) -> bool:
        if not self.has_room(0):
            return False
        self.orders.append(lambda fate: done(self._write(header, buffers, wanted, fate)))
        return True

    def _write(
        self, header: Header, buffers: Sequence[Any], wanted: Callable[[], bool], fate: Fate
    ) -> object:
        if not wanted():
            return Unwanted()
        if fate == "fault":
            return TierFault("disk full")
        evicted = []
        if fate == "evict" and self.stored:
            evicted.append(self.rng.choice(list(self.stored)))
            del self.stored[evicted[0]]
        self.stored[header.name] = header, [memoryview(bytes(b)) for b in buffers]
        return Stored(1, new=True, evicted=tuple(evicted))

    def has_room(self, nbytes: int) -> bool:
        return len(self.orders) < 12

    def defer_writes(self, wanted: bool) -> None: ...

    def read(
        self, name: Name, expect: KeyTokens, done: Done, *, wanted: Callable[[], bool]
    ) -> None:
        self.orders.append(lambda fate: done(self._read(name, wanted, fate)))

    def _read(self, name: Name, wanted: Callable[[], bool], fate: Fate) -> object:
        if not wanted():
            return Unwanted()
        if name not in self.stored:
            return Missing()
        if fate == "damaged":
            del self.stored[name]
            return Damaged("bad checksum")
        return Loaded(*self.stored[name])

    def delete(self, names: Iterable[Name]) -> None:
        for name in names:
            self.stored.pop(name, None)

    def touch(self, stamps: Mapping[Name, float]) -> None: ...

    def scan(self, batch: Callable[[Changes], None], done: Done) -> None:
        gone, self.gone = self.gone, []
        batch([Gone(name) for name in gone])
        done(None)

    def usage(self) -> Usage:
        return Usage(0, 1 << 20, Status())

    def close(self) -> None: ...


class OverATier(Machine):
    @initialize(limit=st.sampled_from([60, 200, 600, 1 << 30]))
    def start(self, limit: int) -> None:
        super().start(limit)
        self.io = DictIo()
        self.tree.records.estimates = Hasty()
        names = [Namespace(name) for name in NAMES]
        self.tree.add_tier("ssd", self.io, namespaces=names, wake=lambda: None)

    @precondition(lambda self: self.io.orders)
    @rule(fates=st.lists(FATES, min_size=1, max_size=6), later=st.booleans())
    def run_orders(self, fates: list[Fate], later: bool) -> None:
        for fate in fates:
            if self.io.orders:
                order = self.io.orders.pop() if later else self.io.orders.popleft()
                order(fate)
        self.tree.tick(Load.DECODING)

    @precondition(lambda self: self.io.stored)
    @rule(pick=st.integers(0, 99))
    def somebody_else_evicts(self, pick: int) -> None:
        name = list(self.io.stored)[pick % len(self.io.stored)]
        del self.io.stored[name]
        self.io.gone.append(name)

    @rule()
    def rest(self) -> None:
        self.now += 11.0
        self.tree.tick(Load.NONE)

    @invariant()
    def in_order(self) -> None:
        if not hasattr(self, "io"):
            return
        check_tree(self.tree, whole=False)
        memory = self.tree.records.memory
        assert memory.nbytes <= max(memory.limit_nbytes, self.n_held), "grew past the limit"
        self.n_held = memory.nbytes
        faults = {f for f in self.tree.stats.faults if not f.startswith("read: ")}
        assert not faults
        self.check_leases()
        self.check_protected()

    def protect(self) -> None:
        super().protect()
        self.protected = {r: n for r, n in self.protected.items() if r.arrays is not None}

    def teardown(self) -> None:
        if not hasattr(self, "io"):
            return
        while self.requests:
            self.cancel(0, failed=False)
        while self.io.orders:
            self.run_orders(["well"], later=False)
        for _ in range(4):
            self.rest()
            while self.io.orders:
                self.run_orders(["well"], later=False)
        assert n_leases(self.tree) == 0
        assert self.tree.records.tree.leaving_nbytes == 0
        for end in [n for root in self.tree.records.tree.roots() for n in list(root.pinned)]:
            self.tree.records.unpin(end)
        assert self.tree.records.memory.shrink_to(0), "something cannot be evicted"
        admin.clear(self.tree)
        for _ in range(4):
            self.rest()
            while self.io.orders:
                self.run_orders(["well"], later=False)
        assert records_of(self.tree) == []
        assert self.tree.records.memory.nbytes == 0
        kept = {n for n in self.io.stored if n not in self.io.gone}
        assert not kept, "cleared, and still stored"


EACH = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
MODE = pytest.mark.parametrize("exact", [False, True], ids=["full", "exact"])


def run(shape: Shape, exact: bool, *, n_examples: int) -> None:
    run_state_machine_as_test(
        type("M", (OverATier,), {"shape": shape, "exact": exact}),
        settings=settings(
            max_examples=n_examples,
            stateful_step_count=50,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


@MODE
@EACH
def test_random_use_over_a_tier(shape: Shape, exact: bool) -> None:
    run(shape, exact, n_examples=15)


@pytest.mark.soak
@MODE
@EACH
def test_much_random_use_over_a_tier(shape: Shape, exact: bool) -> None:
    run(shape, exact, n_examples=200)
