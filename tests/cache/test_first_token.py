"""Any call to a store may be slow, or hang: the first token waits only for a bounded time.

There are no threads and no real clock: only a store whose every call takes as long as the test
says, and a loop that does what the engine does with a lone prompt. Time passes only in computing
and waiting, so how much later a first token is than without a store is known to the microsecond.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeVar

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from firn.cache.loading import ASK_PATIENCE_S
from firn.cache.planning.estimates import Estimates
from firn.cache.storage.container import Name, pack, unpack
from firn.cache.storage.faults import Missing, TierError, TierFault, Unwanted
from firn.cache.storage.orders import AskOrder, Order, ReadOrder, WriteOrder
from firn.cache.storage.spill_policy import spill_policy
from firn.cache.storage.store_search import search
from firn.cache.tiers import FoundRecord, WriteResult
from firn.cache.tiers._store import DEADLINE_S
from firn.core.ports import EngineLoad
from firn.core.values import CacheControl, Namespace
from firn.engine.engine import LOAD_TICK_S
from firn.engine.scheduler import chunk_end
from tests.cache.fake_worker import FakeWorker
from tests.cache.lab import DENSE, SHAPES, LabLayer, LabRow, Shape, prompt_of, tree
from tests.clocks import SetClock
from tests.hash_runner import prompt_of as words

T = TypeVar("T")
BLOCK, CHUNK = 8, 32
N_TOKENS = 161
ENDS = (40, 80, 150)
EVERYONE = Namespace("")
HANGS = math.inf
N_THREADS = 8
"""Reads that run at the same time."""


@dataclass
class Time:
    now: float = 1000.0
    events: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    serial: Any = field(default_factory=count)

    def __call__(self) -> float:
        return self.now

    def after(self, seconds: float, call: Callable[[], None]) -> None:
        if seconds < HANGS:
            heapq.heappush(self.events, (self.now + seconds, next(self.serial), call))

    def run(self) -> None:
        """Call whatever is due by now."""
        while self.events and self.events[0][0] <= self.now:
            heapq.heappop(self.events)[2]()


@dataclass
class Takes:
    """Seconds per call; a call that takes longer than the deadline fails at the deadline."""

    find: float = 0.001
    read: float = 0.001
    write: float = 0.001
    deadline: float = DEADLINE_S
    n_reads: int = 1 << 30
    """How many reads are answered before the others hang."""


class SlowStore(FakeWorker):
    """Records are shared; time is the test's."""

    is_store = True

    def __init__(self, time: Time, records: dict[Name, bytes], takes: Takes) -> None:
        super().__init__(time)
        self.time = time
        self.records = records
        self.takes = takes
        self.free_at = [0.0] * N_THREADS
        """When each thread is done with what it was given."""

        self.deadline_s = takes.deadline

    def _call(self, seconds: float, order: Order, work: Callable[[], object]) -> None:
        def end() -> None:
            try:
                if seconds > self.takes.deadline:
                    raise TierFault("too slow")
                self.end(order, work())
            except TierError as e:
                self.end(order, e)

        self.time.after(min(seconds, self.takes.deadline), end)

    def ask(self, order: AskOrder) -> None:
        n_rounds, under_way = 1, search(order.question)
        try:
            names = next(under_way)
            while True:
                there = {name: self.records[name] for name in names if name in self.records}
                found = {n: FoundRecord(str(n), len(raw), 1e9) for n, raw in there.items()}
                names = under_way.send(found)
                n_rounds += 1
        except StopIteration as end:
            entries = end.value
        self._call(self.takes.find * n_rounds, order, lambda: entries)

    def read(self, order: ReadOrder) -> None:
        def work() -> object:
            if not order.wanted:
                raise Unwanted
            if order.name not in self.records:
                raise Missing
            return unpack(self.records[order.name])

        self.takes.n_reads -= 1
        seconds = self.takes.read if self.takes.n_reads >= 0 else HANGS
        thread = self.free_at.index(min(self.free_at))
        begins = max(self.free_at[thread], self.time.now)
        self.free_at[thread] = begins + min(seconds, self.takes.deadline)
        self.time.after(begins - self.time.now, lambda: self._call(seconds, order, work))

    def write(self, order: WriteOrder) -> bool:
        assert order.content is not None
        content = order.content

        def work() -> object:
            record = b"".join(pack(order.header, content.fetch()).pieces)
            self.records[order.header.name] = record
            return WriteResult(len(record), new=True)

        self._call(self.takes.write, order, work)
        return True


class Server:
    """What the engine does with one prompt at a time, on the real cache."""

    def __init__(
        self, time: Time, shape: Shape, records: dict[Name, bytes], takes: Takes, *, token_s: float
    ) -> None:
        self.time, self.shape, self.token_s = time, shape, token_s
        self.tree = tree(shape, block=BLOCK, clock=time, wall=lambda: 1e9 + time.now)
        self.tree.records.estimates = Estimates(SetClock(time))
        self.store = SlowStore(time, records, takes)
        self.tree.add_tier(
            "store",
            self.store,
            namespaces=[EVERYONE],
            policy=spill_policy("all", BLOCK),
        )

    def late_s(self, ids: list[int]) -> float:
        """How much later its first token is than without a store, if none of it is in memory."""
        began = self.time.now
        cursor = self.tree.open(prompt_of(ids, ENDS), EVERYONE, CacheControl())
        row = self._row(cursor, cursor.restore())
        while row.n_tokens < len(ids) - 1:
            self.time.run()
            self.tree.tick(EngineLoad.PREFILLING)
            if cursor.should_wait(busy=False):
                self.time.now += LOAD_TICK_S
                continue
            ahead = cursor.advance(row.n_tokens)
            row = self._row(cursor, ahead) if ahead is not None else row
            if row.n_tokens < len(ids) - 1:
                self._compute(cursor, row, ids)
        self.time.now += self.token_s
        assert row.tokens == ids[:-1]
        first_at = self.time.now
        row.consume(ids[-1:])
        cursor.close(row)
        return first_at - began - len(ids) * self.token_s

    def _row(self, cursor: Any, restored: Any) -> LabRow:
        row = LabRow(LabLayer([[]], self.shape))
        if restored is not None:
            restored.fill([row.layer])
            row.n_tokens = restored.n_tokens
            cursor.filled(row)
        return row

    def _compute(self, cursor: Any, row: LabRow, ids: list[int]) -> None:
        start, stops = row.n_tokens, cursor.stops()
        end = chunk_end(start, len(ids) - 1, chunk=CHUNK, stops=stops)
        self.time.now += (end - start) * self.token_s
        row.consume(ids[start:end])
        self.tree.prefill.observe(start, end, (end - start) * self.token_s)
        cursor.commit(row)

    def settle(self) -> None:
        for _ in range(20):
            self.time.now += 1.0
            self.time.run()
            self.tree.tick(EngineLoad.NONE)


def written(shape: Shape, prompts: Sequence[list[int]]) -> dict[Name, bytes]:
    """What another server has left in the store."""
    records: dict[Name, bytes] = {}
    other = Server(Time(), shape, records, Takes(), token_s=1e-3)
    for ids in prompts:
        other.late_s(ids)
        other.settle()
    assert len(records) > len(prompts) * N_TOKENS // BLOCK // 2
    return records


PROMPTS = [words(i, N_TOKENS) for i in range(6)]
STORED = {name: written(SHAPES[name], PROMPTS) for name in ("dense", "hybrid")}


def test_a_store_that_is_well_saves_time() -> None:
    server = Server(Time(), DENSE, dict(STORED["dense"]), Takes(), token_s=5e-3)
    late = [server.late_s(ids) for ids in PROMPTS]
    assert max(late) < 0
    assert late[-1] < -0.9 * N_TOKENS * 5e-3, "once it knows the store, nearly all is loaded"


@pytest.mark.parametrize("token_s", [1e-4, 1e-3, 1e-2])
@pytest.mark.parametrize("deadline_s", [0.5, DEADLINE_S, HANGS])
def test_a_question_that_hangs(token_s: float, deadline_s: float) -> None:
    takes = Takes(find=HANGS, deadline=deadline_s)
    server = Server(Time(), DENSE, dict(STORED["dense"]), takes, token_s=token_s)
    first, *later = (server.late_s(ids) for ids in PROMPTS)
    assert first <= ASK_PATIENCE_S, "how fast the model is, nobody knows yet"
    assert max(later) <= min(ASK_PATIENCE_S, N_TOKENS * token_s / 2) + LOAD_TICK_S


@pytest.mark.parametrize(
    ("takes", "token_s", "why"),
    [
        (Takes(read=HANGS, deadline=HANGS), 5e-3, "not yet loaded"),
        (Takes(find=0.3, read=4.0), 5e-3, "not yet loaded"),
        (Takes(read=HANGS, deadline=0.05), 5e-3, "read failed"),
        (Takes(find=HANGS), 5e-3, "a store did not answer"),
    ],
    ids=["reads hang", "slow", "reads fail", "nothing is known"],
)
def test_a_store_that_answers_late_is_the_reason(takes: Takes, token_s: float, why: str) -> None:
    """When the prompt begins, nothing is known to be stored of it; by its end more is known."""
    server = Server(Time(), DENSE, dict(STORED["dense"]), takes, token_s=token_s)
    server.late_s(PROMPTS[0])
    assert dict(server.tree.stats.misses) == {why: 1}


@pytest.mark.parametrize("deadline_s", [0.5, DEADLINE_S, HANGS])
def test_writes_that_hang_keep_nobody_waiting(deadline_s: float) -> None:
    takes = Takes(write=HANGS, deadline=deadline_s)
    server = Server(Time(), DENSE, {}, takes, token_s=1e-3)
    for ids in PROMPTS:
        assert server.late_s(ids) <= 3 * LOAD_TICK_S


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(sorted(STORED)),
    token_s=st.sampled_from([1e-5, 1e-4, 1e-3, 5e-3, 2e-2]),
    deadline_s=st.sampled_from([0.5, 2.0, DEADLINE_S]),
    before=st.sampled_from([1e-4, 1e-3, 1e-2, 0.1, 0.4]),
    n_before=st.integers(0, 3),
    find_s=st.sampled_from([1e-3, 0.05, 0.24, 1.0, HANGS]),
    read_s=st.sampled_from([1e-3, 0.05, 0.3, 1.0, 4.0, HANGS]),
    n_reads=st.sampled_from([1, 3, 10, 30, 1 << 30]),
)
@example("dense", 2e-2, 0.5, 0.4, 1, 1e-3, HANGS, 1)
def test_whatever_is_slow_from_some_time_on(
    kind: str,
    token_s: float,
    deadline_s: float,
    before: float,
    n_before: int,
    find_s: float,
    read_s: float,
    n_reads: int,
) -> None:
    """A store known to be fast turns slow: no first token is late by more than the deadline."""
    takes = Takes(before, before, before, deadline_s)
    server = Server(Time(), SHAPES[kind], dict(STORED[kind]), takes, token_s=token_s)
    for ids in PROMPTS[:n_before]:
        server.late_s(ids)
    takes.find, takes.read, takes.n_reads = find_s, read_s, n_reads
    for ids in PROMPTS[n_before:]:
        assert server.late_s(ids) <= deadline_s + LOAD_TICK_S


@pytest.mark.parametrize("n_reads", [0, 3], ids=["from the first", "after some"])
def test_reads_that_hang_are_waited_for_a_few_times_and_no_more(n_reads: int) -> None:
    """Reads that do not arrive also tell how slow the store is."""
    takes = Takes(read=1e-3, deadline=HANGS)
    server = Server(Time(), DENSE, dict(STORED["dense"]), takes, token_s=5e-3)
    server.late_s(words(7, N_TOKENS))
    takes.n_reads = n_reads
    late = [server.late_s(ids) for ids in PROMPTS]
    assert late[0] > 0.05
    assert max(late[-2:]) <= 3 * LOAD_TICK_S


@pytest.mark.parametrize("is_read", [True, False], ids=["read", "hangs"])
def test_what_the_engine_has_had_no_time_to_take_is_not_late(is_read: bool) -> None:
    """The engine is busy for a second, then the request ends: only a hang counts as slow."""
    time = Time()
    takes = Takes(read=1e-3 if is_read else HANGS, deadline=HANGS)
    server = Server(time, DENSE, dict(STORED["dense"]), takes, token_s=5e-3)
    cursor = server.tree.open(prompt_of(PROMPTS[0], ENDS), EVERYONE, CacheControl())
    for _ in range(4):  # the question and its answer, then the first records
        time.now += 5e-4
        time.run()
        server.tree.tick(EngineLoad.PREFILLING)
    assert cursor.racing
    time.now += 1.0
    time.run()
    if not is_read:
        server.tree.tick(EngineLoad.PREFILLING)
    cursor.close(None)
    latency_s = server.tree.records.estimates.tiers["store"].latency_s.value
    assert latency_s == pytest.approx(0.002 if is_read else 1.0, rel=0.1)
