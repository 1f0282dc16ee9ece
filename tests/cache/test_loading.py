"""A load that is under way: whether it is worth waiting for, and what it keeps in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from firn.cache import records
from firn.cache.cursor import MAX_LATE, Loading
from firn.cache.loading import DEADLINE_FACTOR, MIN_DEADLINE_S
from firn.cache.parts import Part
from firn.cache.prefix import PrefixCursor
from firn.cache.storage.orders import ReadOrder
from firn.core.keys import packed_tokens
from firn.core.ports import EngineLoad
from firn.core.values import CacheControl, KeyTokens, Namespace, PackedTokens
from tests.cache.lab import (
    DENSE,
    HYBRID,
    WINDOWED,
    LabEngine,
    LabLayer,
    LabRow,
    Shape,
    n_leases,
    prompt_of,
    records_of,
    tree,
)
from tests.cache.planning.test_plan import Told
from tests.cache.storage.test_desk import SickWorker
from tests.cache.test_cache_over_tier import DictWorker
from tests.cache.test_decisions import Hasty
from tests.hash_runner import prompt_of as words

BLOCK, GIB = 8, 1 << 30
EVERYONE = Namespace("")


def loading(
    *,
    n_arrived: int,
    n_missing: int,
    last_at: float,
    front: int = 0,
    taken_at: float | None = None,
    engine_s: float = 0.0,
) -> Loading:
    missing: Any = set(range(n_missing))
    return Loading(
        16_000,
        missing,
        began=0.0,
        patience_until=0.0,
        busy_patience_until=0.0,
        deadline=9.0,
        compute_s=1.0,
        front=front,
        n_arrived=n_arrived,
        last_at=last_at,
        taken_at=last_at if taken_at is None else taken_at,
        engine_s=engine_s,
    )


def test_nothing_is_known_before_something_has_come() -> None:
    assert not loading(n_arrived=0, n_missing=64, last_at=0.0).beats_computing(0.0)


@pytest.mark.parametrize(("pace_s", "wins"), [(0.005, True), (0.02, False)])
def test_a_load_wins_that_takes_half_as_long_as_computing(pace_s: float, wins: bool) -> None:
    """44 records are missing; computing everything would take a second."""
    came_at = 20 * pace_s
    under_way = loading(n_arrived=20, n_missing=44, last_at=came_at)
    assert under_way.beats_computing(came_at + pace_s) == wins


def test_what_is_computed_already_is_no_reason_to_wait() -> None:
    """Most of it: the rest is computed sooner than loaded."""
    under_way = loading(n_arrived=20, n_missing=44, last_at=0.1, front=12_000)
    assert not under_way.beats_computing(0.1)


def test_a_load_that_stalls_is_not_waited_for() -> None:
    under_way = loading(n_arrived=20, n_missing=44, last_at=0.1)
    assert under_way.beats_computing(0.1 + 0.005 * MAX_LATE)
    assert not under_way.beats_computing(0.1 + 0.005 * MAX_LATE + 0.01)


def test_what_was_read_while_a_chunk_ran_is_no_stall() -> None:
    """It was read long ago, but the engine has received it only now."""
    under_way = loading(n_arrived=20, n_missing=44, last_at=0.1, taken_at=0.4)
    assert under_way.beats_computing(0.41)


def test_a_load_whose_arrays_take_the_engine_longer_than_computing_does_not_win() -> None:
    under_way = loading(n_arrived=20, n_missing=44, last_at=0.1, engine_s=0.5)
    assert not under_way.beats_computing(0.1)


def test_a_jump_does_not_let_go_of_what_a_load_still_needs() -> None:
    """Blocks 6 and 7 are in memory, the rest is loaded; a neighbour computes the first four."""
    cache, io, ids = (
        tree(DENSE, block=BLOCK, limit_nbytes=GIB),
        DictWorker(Part.PAGES),
        words(1, 81),
    )
    cache.records.estimates = Hasty()
    cache.add_tier("ssd", io, namespaces=[EVERYONE])

    def run_orders() -> None:
        while io.orders:
            io.orders.popleft()("well")
            cache.tick(EngineLoad.NONE)

    def compute(n_tokens: int) -> None:
        cursor = cache.open(prompt_of(ids), EVERYONE, CacheControl(read=False))
        row = LabRow(LabLayer([[]], DENSE))
        row.consume(ids[:n_tokens])
        cursor.commit(row)
        cursor.close(None)

    compute(80)
    cache.tick(EngineLoad.NONE)
    run_orders()
    for record in records_of(cache):
        if record.node.start not in (48, 56):
            cache.records.ledger.release(record)
    cursor = cache.open(prompt_of(ids), EVERYONE, CacheControl())
    assert isinstance(cursor, PrefixCursor)
    assert cursor.restore() is None
    compute(32)
    ahead = cursor.advance(0)
    assert ahead is not None
    assert ahead.n_tokens == 32
    cache.set_room(0)
    cache.set_room(GIB)
    run_orders()
    ahead = cursor.advance(32)
    assert ahead is not None
    assert ahead.n_tokens == 80
    cursor.close(None)


# --- what a plan relies on -----------------------------------------------------------------


class Cached:
    """A cache over a tier that carries out its orders when it is told to."""

    def __init__(self, shape: Shape, ids: Sequence[int]) -> None:
        self.shape, self.ids = shape, ids
        self.cache, self.io = tree(shape, block=BLOCK, limit_nbytes=GIB), DictWorker(Part.PAGES)
        self.cache.records.estimates = Hasty()
        self.cache.add_tier("ssd", self.io, namespaces=[EVERYONE])

    def run_orders(self) -> None:
        while self.io.orders:
            self.io.orders.popleft()("well")
            self.cache.tick(EngineLoad.NONE)

    def compute(self, n_tokens: int) -> None:
        """The row is not kept; a recurrent state is committed where it ends."""
        prompt = prompt_of(self.ids[: n_tokens + 1], [n_tokens])
        cursor = self.cache.open(prompt, EVERYONE, CacheControl())
        restored = cursor.restore()
        layer = LabLayer([[]], self.shape)
        row = LabRow(layer)
        if restored is not None:
            restored.fill([layer])
            row.n_tokens = restored.n_tokens
            cursor.filled(row)
        row.consume(self.ids[row.n_tokens : n_tokens])
        cursor.commit(row)
        cursor.close(None)

    def open(self) -> PrefixCursor:
        cursor = self.cache.open(prompt_of(self.ids), EVERYONE, CacheControl())
        assert isinstance(cursor, PrefixCursor)
        return cursor

    def n_restored(self, cursor: PrefixCursor) -> int:
        restored = cursor.restore()
        return 0 if restored is None else restored.n_tokens


@pytest.fixture
def slow_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Orders are carried out only when a test says so, and any number of records may wait for them."""
    monkeypatch.setattr(records, "WRITE_WAIT_S", 0.0)
    monkeypatch.setattr(records, "LEAVING_SHARE", GIB)


KINDS = pytest.mark.parametrize(
    "shape", [DENSE, HYBRID, WINDOWED], ids=["dense", "hybrid", "window"]
)


@KINDS
@pytest.mark.parametrize("fate", ["well", "fault"])
@pytest.mark.usefixtures("slow_writes")
def test_what_a_request_will_resume_from_stays_when_it_is_written(shape: Shape, fate: str) -> None:
    """It was about to leave memory when the request was planned on it."""
    lab = Cached(shape, words(1, 81))
    lab.compute(80)
    lab.cache.tick(EngineLoad.NONE)
    lab.cache.set_room(1)
    assert any(r.leaving for r in records_of(lab.cache))
    cursor = lab.open()
    while lab.io.orders:
        lab.io.orders.popleft()(fate)
        lab.cache.tick(EngineLoad.DECODING)
    assert lab.n_restored(cursor) == 80
    assert cursor.admission.why == ""
    cursor.close(None)
    assert n_leases(lab.cache) == 0
    lab.cache.set_room(1)
    assert lab.cache.records.memory.nbytes == 0, "once it has resumed, it may go"


def test_what_can_be_resumed_at_once_stays_while_more_is_loaded() -> None:
    """A state in memory, and a later one on the disk that may never come."""
    lab = Cached(HYBRID, words(1, 81))
    lab.compute(40)
    lab.compute(80)
    lab.cache.tick(EngineLoad.NONE)
    lab.run_orders()
    for record in records_of(lab.cache):
        if record.node.end > 40:
            lab.cache.records.ledger.release(record)
    cursor = lab.open()
    assert cursor.loads.loading is not None
    lab.cache.set_room(0)
    assert lab.n_restored(cursor) == 40
    cursor.close(None)


@KINDS
def test_a_request_that_finds_less_than_was_planned_is_planned_again(shape: Shape) -> None:
    lab = Cached(shape, words(1, 81))
    lab.compute(80)
    lab.cache.tick(EngineLoad.NONE)
    lab.run_orders()
    cursor = lab.open()
    assert cursor.loads.loading is None, "all of it is in memory"
    lab.cache.records.drop(records_of(lab.cache))  # as when the device has no memory
    assert lab.n_restored(cursor) == 0
    lab.run_orders()
    ahead = cursor.advance(0)
    assert ahead is not None
    assert ahead.n_tokens == 80
    cursor.close(None)
    assert n_leases(lab.cache) == 0


# --- many records --------------------------------------------------------------------------


@pytest.fixture
def few_orders(monkeypatch: pytest.MonkeyPatch) -> int:
    n_ordered = 4
    monkeypatch.setattr("firn.cache.loading.N_ORDERED", n_ordered)
    return n_ordered


def on_the_disk(shape: Shape = DENSE) -> Cached:
    """Ten blocks that only the tier has."""
    lab = Cached(shape, words(1, 81))
    lab.compute(80)
    lab.cache.tick(EngineLoad.NONE)
    lab.run_orders()
    for record in records_of(lab.cache):
        lab.cache.records.ledger.release(record)
    return lab


def test_reads_are_ordered_a_few_at_a_time(few_orders: int) -> None:
    """However long the prompts are: all of them together, between two steps."""
    lab = on_the_disk()
    first = lab.open()
    assert len(lab.io.orders) == few_orders
    lab.cache.tick(EngineLoad.DECODING)
    second = lab.open()
    n_before = len(lab.io.orders)
    lab.cache.tick(EngineLoad.DECODING)
    assert len(lab.io.orders) <= n_before + few_orders
    lab.run_orders()
    assert [lab.n_restored(cursor) for cursor in (first, second)] == [80, 80]
    for cursor in (first, second):
        cursor.close(None)
    assert n_leases(lab.cache) == 0


def test_a_prompt_that_was_packed_before_is_not_packed_by_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lab = Cached(DENSE, words(1, 81))
    lab.compute(80)
    prompt = prompt_of(lab.ids)
    packed_tokens(prompt)
    packed: list[int] = []
    pack = PackedTokens.__init__

    def counted(self: PackedTokens, tokens: KeyTokens) -> None:
        packed.append(len(tokens))
        pack(self, tokens)

    monkeypatch.setattr(PackedTokens, "__init__", counted)
    for _ in range(2):
        cursor = lab.cache.open(prompt, EVERYONE, CacheControl())
        assert isinstance(cursor, PrefixCursor)
        assert lab.n_restored(cursor) == 80
        cursor.close(None)
    assert lab.cache.probe(prompt, EVERYONE).match.n_tokens == 80
    assert len(prompt) not in packed


def test_what_is_evicted_before_its_read_is_ordered_is_planned_anew(few_orders: int) -> None:
    lab = on_the_disk()
    cursor = lab.open()
    assert cursor.loads.loading is not None
    last = cursor.loads.loading.to_order[-1]  # pages are read from the back
    assert last.node.start == 0
    second = cursor.loads.loading.to_order[-2]
    lab.cache.records.ledger.lost(second, 0)
    lab.run_orders()
    assert lab.n_restored(cursor) == 8
    assert cursor.admission.why == "evicted"
    cursor.close(None)
    assert n_leases(lab.cache) == 0


def test_what_is_computed_before_its_read_is_ordered_is_not_read(few_orders: int) -> None:
    lab = on_the_disk()
    cursor = lab.open()
    assert lab.n_restored(cursor) == 0
    loading = cursor.loads.loading
    assert loading is not None
    row = LabRow(LabLayer([[]], lab.shape))
    row.consume(lab.ids[:40])
    cursor.commit(row)
    cursor.advance(40)
    lab.cache.tick(EngineLoad.PREFILLING)
    assert len(lab.io.orders) == 5, "those of the last five blocks"
    cursor.close(None)


# --- how long it may take ------------------------------------------------------------------


class MuteWorker(SickWorker):
    """Reads never end."""

    def read(self, order: ReadOrder) -> None: ...


def test_a_load_that_should_take_long_is_given_time() -> None:
    now, load_s = [0.0], 60.0
    cache, ids = tree(DENSE, block=8, clock=lambda: now[0]), words(1, 400)
    cache.records.estimates = Told(lambda nbytes: load_s)
    cache.add_tier("ssd", MuteWorker(lambda name: None), namespaces=[EVERYONE])
    with LabEngine(DENSE, cache=cache) as lab:
        lab.submit(ids, 1).wait().check()
        lab.between_steps(lambda: cache.set_room(0))

        def load() -> None:
            cursor = cache.open(prompt_of([*ids, 1]), EVERYONE, CacheControl(write=False))
            assert isinstance(cursor, PrefixCursor)
            for now[0], is_loading in (
                (MIN_DEADLINE_S + 1, True),
                (DEADLINE_FACTOR * load_s + 1, False),
            ):
                cache.tick(EngineLoad.NONE)
                assert (cursor.loads.loading is not None) == is_loading
            cursor.close(None)
            assert cache.stats.faults["read: too slow"] == 1
            assert cache.records.counts.of(EVERYONE).faults == cache.stats.faults

        lab.between_steps(load)
