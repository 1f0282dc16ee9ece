"""Replies that outgrow memory: records give way, then the youngest requests wait with their tokens."""

from __future__ import annotations

from collections import Counter
from functools import partial
from typing import Any

import pytest

from firn.core.errors import StepFailed
from firn.core.events import Admitted, ChoiceDone, Prefilled
from firn.core.ports import Restored
from firn.core.values import Job, Sampling
from firn.engine.budget import Budget, RowCost
from tests.dict_cache import DictCache, DictCursor, DictPrefix
from tests.hash_engine import HashEngine
from tests.hash_runner import Faults, HashRow, prompt_of

WARM = Sampling(temperature=1.0, seed=3)


def small(capacity: int) -> Budget:
    """One byte per token; 16 tokens are reserved for any reply, then 16 more."""
    return Budget(RowCost(1, 0), capacity_nbytes=capacity, reserve_tokens=16, grow_tokens=16)


class Most:
    """The most tokens and rows that a step had."""

    def __init__(self) -> None:
        self.n_tokens = 0
        self.n_rows = 0

    def __call__(self, rows: list[HashRow]) -> None:
        self.n_tokens = max(self.n_tokens, sum(row.n_tokens for row in rows))
        self.n_rows = max(self.n_rows, len(rows))


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("cached", [True, False])
def test_no_reply_is_cut_off_when_replies_outgrow_memory(cached: bool, n: int) -> None:
    most = Most()
    cache = DictCache() if cached else None
    with HashEngine(Faults(launch=most), cache=cache, budget=small(600 * n), max_rows=64) as lab:
        outcomes = [lab.submit(prompt_of(i, 20), 150, n=n, sampling=WARM) for i in range(12)]
        for outcome in outcomes:
            outcome.wait().check()
        assert lab.leftovers() == {}
    assert most.n_rows > 4 * n, "they did run together"
    assert most.n_tokens <= (600 + 12 * 16 * 2) * n, "and stayed near the budget"


def test_a_request_that_was_preempted_is_read_from_the_cache(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cache = DictCache()
    with caplog.at_level("INFO", "firn.engine"):
        with HashEngine(cache=cache, budget=small(300), chunk=8) as lab:
            outcomes = [lab.submit(prompt_of(i, 40), 150) for i in range(2)]
            for outcome in outcomes:
                outcome.wait().check()
            prefills = lab.runner.prefills
        assert "memory is low" in caplog.text
    again = [end for start, end in prefills if start > 60]
    assert again, "the second was read again"
    assert len(again) < 4, "but only what the cache did not have"


def test_the_oldest_is_never_preempted() -> None:
    with HashEngine(budget=small(200)) as lab:
        gate = lab.hold()
        outcomes = [lab.submit(prompt_of(i, 10), 120) for i in range(3)]
        gate.set()
        for outcome in outcomes:
            outcome.wait().check()
        first = outcomes[0].events
        assert len([e for e in first if isinstance(e, Prefilled)]) <= 2, "its prompt, once"


def test_a_request_that_was_preempted_is_first_in_the_queue() -> None:
    with HashEngine(cache=DictCache(), budget=small(200), max_rows=2, chunk=256) as lab:
        gate = lab.hold()
        outcomes = [lab.submit(prompt_of(i, 10), 180) for i in range(2)]
        outcomes.append(lab.submit(prompt_of(5, 150), 5))
        gate.set()
        for outcome in outcomes:
            outcome.wait().check()
        *before, last = lab.runner.prefills
    assert last == (0, 149), "who waited all the time"
    assert any(start > 60 for start, _ in before), "who was preempted is read again"


def test_a_request_that_was_preempted_can_be_cancelled() -> None:
    def cancel(rows: list[HashRow]) -> None:
        if any(sequence.was_preempted for sequence in lab.engine._loop.inflight.waiting):
            lab.cancel(second)  # it cannot return before this is heard: the first has the memory

    with HashEngine(Faults(launch=cancel), cache=DictCache(), budget=small(200)) as lab:
        gate = lab.hold()
        first = lab.submit(prompt_of(1, 10), 180)
        second = lab.submit(prompt_of(2, 10), 180)
        gate.set()
        first.wait().check()
        assert lab.leftovers() == {}
        assert 0 < len(second.tokens()) < 180, "it was preempted within its reply"
        assert not second.finished.is_set(), "and never came back"


class KnowingCursor(DictCursor):
    """Every prompt is stored."""

    def restore(self) -> Restored | None:
        known = list(self.prompt[:-1])
        self.admission = Admitted(len(known))
        return DictPrefix(len(known), partial(self.cache.fill, known))


class Knowing(DictCache):
    cursor = KnowingCursor


def test_if_one_reply_of_a_preempted_request_fails_the_request_fails() -> None:
    """Both are restored in one step: the second must not be opened for a request that is over."""
    n_joined: Counter[str] = Counter()

    def choices(job: Job) -> None:
        n_joined[job.id] += 1
        if job.n == 2 and n_joined[job.id] == 2:
            raise ValueError("this reply cannot go on")

    with HashEngine(Faults(choices=choices), cache=Knowing(), budget=small(300)) as lab:
        gate = lab.hold()
        first = lab.submit(prompt_of(1, 10), 220)
        second = lab.submit(prompt_of(2, 10), 120, n=2)
        gate.set()
        assert isinstance(second.wait().error, StepFailed)
        first.wait().check()
        assert lab.leftovers() == {}
        assert second.n_ends == 1
        assert n_joined[second.job.id] == 2, "it was preempted once, and failed when it came back"


def test_a_lone_reply_ends_where_memory_ends() -> None:
    with HashEngine(budget=small(200)) as lab:
        outcome = lab.submit(prompt_of(1, 50), 10_000).wait()
        assert outcome.error is None
        assert [e.reason for e in outcome.of(ChoiceDone)] == ["length"]
        assert 150 <= len(outcome.tokens()) <= 200
        assert outcome.tokens() == outcome.expected()[: len(outcome.tokens())]
        assert lab.leftovers() == {}


def test_records_give_way_before_a_request_waits() -> None:
    cache = DictCache()
    with HashEngine(cache=cache, budget=small(1000)) as lab:
        rooms: list[int | None] = []
        lab.runner.faults.launch = lambda rows: rooms.append(cache.room_nbytes)
        outcomes = [lab.submit(prompt_of(i, 50), 200) for i in range(3)]
        for outcome in outcomes:
            outcome.wait().check()
        assert min(r for r in rooms if r is not None) < 1000 - 3 * 66, "as they grew"
        lab.between_steps()
        assert cache.room_nbytes == 1000


def test_the_youngest_request_is_preempted_when_the_capacity_shrinks() -> None:
    with HashEngine(cache=DictCache(), budget=small(10_000)) as lab:
        outcomes = [lab.submit(prompt_of(i, 20), 300, sampling=WARM) for i in range(6)]
        lab.engine.call(lambda parts: parts.set_capacity(400)).result(60)
        for outcome in outcomes:
            outcome.wait().check()
        assert lab.leftovers() == {}
        assert lab.runner.n_freed == 1, "other programs can have what was freed"
        lab.engine.call(lambda parts: parts.set_capacity(10_000)).result(60)
        assert lab.runner.n_freed == 1


def test_short_rows_do_not_raise_the_estimate_of_long_prompts() -> None:
    """Rows of a few tokens take a whole first buffer step, which says nothing about long prompts."""
    with HashEngine(budget=Budget(RowCost(1, 0, 256), capacity_nbytes=12_000)) as lab:
        lab.runner.live_nbytes = lambda: 256 * 64  # type: ignore[method-assign]
        for i in range(8):
            lab.submit(prompt_of(i, 5), 100).wait().check()
        assert lab.budget.factor == 1.0
        both = [lab.submit(prompt_of(i, 3000), 4) for i in range(2)]
        for outcome in both:
            outcome.wait().check()


class Rooms(DictCache):
    """Keeps every value that `set_room` was called with."""

    def __init__(self) -> None:
        super().__init__()
        self.rooms: list[int] = []

    def set_room(self, nbytes: int) -> None:
        super().set_room(nbytes)
        self.rooms.append(nbytes)


@pytest.mark.parametrize("stage", ["prefill", "launch", "confirm"])
@pytest.mark.parametrize(
    ("message", "gives_way"),
    [
        ("cudaMallocAsync(&data, size, stream) failed: out of memory", True),
        ("Command buffer execution failed: Insufficient Memory", True),
        ("[malloc] Unable to allocate 4096 bytes.", True),
        ("an illegal memory access was encountered", False),
    ],
)
def test_records_give_way_when_memory_runs_out(stage: str, message: str, gives_way: bool) -> None:
    """As when another program takes memory that the plan counted on."""
    left, cache = [message], Rooms()

    def fail(*_: Any) -> None:
        if left:
            raise RuntimeError(left.pop())
        assert cache.room_nbytes > 0, "what is computed again is stored"

    with HashEngine(Faults(**{stage: fail}), cache=cache) as lab:
        outcome = lab.submit(prompt_of(1, 20), 30).wait()
        outcome.check()
        assert not left
        assert (0 in cache.rooms) is gives_way
        assert (lab.runner.n_freed > 0) is gives_way
        assert lab.leftovers() == {}


def test_what_was_dispatched_before_memory_ran_out_ends_before_records_give_way() -> None:
    """Commands of the failed step may still write to its buffers, which would be reused."""
    left, cache = [1], Rooms()

    def fail(*_: Any) -> None:
        if left:
            left.pop()
            raise MemoryError

    waited = -1
    faults = Faults(prefill=fail, confirm=lambda: cache.rooms.append(waited))
    with HashEngine(faults, cache=cache) as lab:
        lab.submit(prompt_of(1, 20), 5).wait().check()
        assert waited in cache.rooms[: cache.rooms.index(0)]


def test_a_request_that_does_not_fit_even_so_fails_alone() -> None:
    def fail(row: HashRow, chunk: Any) -> None:
        if row.n_tokens > 50:
            raise MemoryError

    cache = Rooms()
    with HashEngine(Faults(prefill=fail), cache=cache) as lab:
        large = lab.submit(prompt_of(1, 200), 5)
        assert isinstance(large.wait().error, StepFailed)
        lab.submit(prompt_of(2, 20), 5).wait().check()
        assert lab.runner.n_freed == 1, "it was tried once more"
