"""Thinned prompts in the engine: scored between steps, read in part, and in full later."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from firn.core.events import Admitted, Advanced, Prefilled
from firn.core.values import (
    CacheControl,
    Namespace,
    Prompt,
    Sampling,
)
from firn.engine.budget import Budget, RowCost
from firn.sparse.rules import Sparse
from firn.sparse.scorer import Scores
from firn.sparse.selection import select
from tests.dict_cache import DictCache
from tests.hash_engine import HashEngine, Outcome
from tests.hash_runner import Faults, HashRow, prompt_of, reply_to
from tests.waiting import wait_until

N_PROMPT = 640
HALF = Sparse(0.5, 100)
WARM = Sampling(temperature=1.0, seed=3)


def _nothing(*_: Any) -> None:
    pass


@dataclass(eq=False)
class Scoring:
    prompt: Prompt
    n_done: int = 0
    closed: bool = False


@dataclass(eq=False)
class DiceScorer:
    """Implements sparse.scorer.Scorer with random scores, the same for prompts of the same length."""

    at: dict[str, Callable[[], None]] = field(default_factory=dict)
    """Called at each stage, to raise or to interfere there."""
    recipe: str = "dice"
    max_tokens: int = 1 << 20
    n_slices: int = 4
    opened: list[Scoring] = field(default_factory=list)
    closed: bool = False

    def open(self, prompt: Prompt, namespace: Namespace, control: CacheControl) -> Scoring:
        self.at.get("open", _nothing)()
        self.opened.append(Scoring(prompt))
        return self.opened[-1]

    def read(self, reading: Scoring, n_tokens: int, *, alone: bool = False) -> None:
        assert not reading.closed
        assert n_tokens > 0
        self.at.get("read", _nothing)()

    def finish_slice(self, reading: Scoring) -> bool:
        assert not reading.closed
        self.at.get("finish_slice", _nothing)()
        reading.n_done += 1
        return reading.n_done == self.n_slices

    def n_left(self, reading: Scoring) -> int:
        return self.n_slices - reading.n_done

    def scores(self, reading: Scoring) -> Scores:
        return dice(len(reading.prompt))

    def close_reading(self, reading: Scoring) -> None:
        reading.closed = True

    def close(self) -> None:
        self.closed = True


def dice(n: int) -> Scores:
    return np.random.default_rng(n).random(n).astype(np.float32)


def thin_of(prompt: Sequence[int], *, start: int = 0, keep: float = 0.5) -> list[int]:
    kept = select(dice(len(prompt)), start=start, keep=keep)
    return [prompt[i] for i in kept]


def check_thin(outcome: Outcome, *, start: int = 0) -> None:
    """Check that the reply is the model's to the kept tokens."""
    assert outcome.wait().error is None
    job = outcome.job
    thin = thin_of(job.prompt.ids.tolist(), start=start)
    for choice in range(job.n):
        want = reply_to(thin, job.max_tokens, sampling=job.sampling, choice=choice)
        assert outcome.tokens(choice) == want
    assert told(outcome).n_skipped == len(job.prompt) - len(thin) > 0


def told(outcome: Outcome) -> Admitted:
    """The last admission that the client was sent."""
    news = outcome.of(Advanced)
    return news[-1].admission if news else outcome.of(Admitted)[-1]


def is_idle(lab: HashEngine) -> bool:
    return bool(lab.between_steps(lambda: not lab.engine._loop.busy))


def wait_idle(lab: HashEngine) -> None:
    wait_until(lambda: is_idle(lab))


def test_a_long_prompt_is_scored_and_thinned() -> None:
    scorer = DiceScorer()
    with HashEngine(cache=DictCache(), scorer=scorer) as lab:
        outcome = lab.submit(prompt_of(1, N_PROMPT), 20, sparse=HALF)
        check_thin(outcome)
        assert outcome.of(Admitted)[0].keep == 0.5, "decided before it is scored"
        done = [e for e in outcome.events if isinstance(e, Prefilled)]
        assert done[-1].n_total == N_PROMPT, "progress is told in tokens of the whole prompt"
        assert [e.n_done for e in done] == sorted(e.n_done for e in done)
        wait_idle(lab)
        assert lab.leftovers() == {}
    assert scorer.closed
    assert all(r.closed for r in scorer.opened)


@pytest.mark.parametrize(
    ("n_prompt", "sparse"), [(90, HALF), (N_PROMPT, None), (N_PROMPT, Sparse(1.0, 0)), (1, HALF)]
)
def test_short_prompts_and_those_that_do_not_ask_are_read_in_full(
    n_prompt: int, sparse: Sparse | None
) -> None:
    scorer = DiceScorer()
    with HashEngine(cache=DictCache(), scorer=scorer) as lab:
        outcome = lab.submit(prompt_of(1, n_prompt), 10, sparse=sparse).wait()
        outcome.check()
        assert told(outcome).n_skipped == 0
        assert told(outcome).keep is None
    assert scorer.opened == []


def test_a_prompt_of_which_nothing_can_be_skipped_is_read_in_full() -> None:
    with HashEngine(cache=DictCache(), scorer=DiceScorer()) as lab:
        outcome = lab.submit(prompt_of(1, 40), 10, sparse=Sparse(0.5, 0)).wait()
        outcome.check()
        assert told(outcome).keep is None, "the client is told that it is exact after all"


def test_without_a_scorer_every_prompt_is_read_in_full() -> None:
    with HashEngine(cache=DictCache()) as lab:
        lab.submit(prompt_of(1, N_PROMPT), 10, sparse=HALF).wait().check()


def test_the_exact_chain_is_resumed_from_and_never_written() -> None:
    cache, prompt = DictCache(), prompt_of(1, N_PROMPT)
    with HashEngine(cache=cache, scorer=DiceScorer()) as lab:
        lab.submit(prompt[:128], 1).wait().check()
        outcome = lab.submit(prompt, 20, sparse=HALF)
        check_thin(outcome, start=128)
        assert told(outcome).n_cached == 128
        wait_idle(lab)
        exact = lab.submit(prompt, 20).wait()
        exact.check()
        whole = [*prompt, *outcome.tokens()]
        for owner, tokens in cache.store:
            if not owner:
                others = [*prompt, *exact.tokens()]
                assert list(tokens) in (whole[: len(tokens)], others[: len(tokens)])
        assert any(owner.endswith("keep 0.50") for owner, _ in cache.store)


def test_the_row_of_the_whole_prompt_leaves_when_a_thinned_one_is_resumed() -> None:
    faults, rows = [ValueError("this reply cannot begin")], list[HashRow]()

    def refuse(*_: object) -> None:
        if faults:  # after a fault, the whole prompt is not read later on
            raise faults.pop()

    with HashEngine(Faults(join=refuse), cache=DictCache(), scorer=DiceScorer()) as lab:
        start = lab.runner.start

        def started(restored: Any) -> HashRow:
            rows.append(start(restored))
            return rows[-1]

        lab.runner.start = started  # type: ignore[method-assign]
        assert lab.submit(prompt_of(1, N_PROMPT), 20, sparse=HALF).wait().error is not None
        outcome = lab.submit(
            prompt_of(1, N_PROMPT), 20, sparse=HALF, control=CacheControl(write=False)
        )
        check_thin(outcome)
        assert told(outcome).n_cached > 0
        wait_idle(lab)
        assert all(row.layer is None for row in rows)


def test_a_prompt_that_can_be_resumed_near_enough_is_exact() -> None:
    cache, prompt, scorer = DictCache(), prompt_of(1, N_PROMPT), DiceScorer()
    with HashEngine(cache=cache, scorer=scorer) as lab:
        lab.submit(prompt[:560], 1).wait()
        lab.submit(prompt, 20, sparse=HALF).wait().check()
    assert scorer.opened == []


def test_replies_take_a_step_between_two_slices_of_scoring() -> None:
    """Other requests decode between two slices."""
    steps: list[int] = []
    scorer = DiceScorer(n_slices=30)
    with HashEngine(Faults(launch=lambda rows: steps.append(len(rows))), scorer=scorer) as lab:
        at_slice: list[int] = []
        scorer.at["read"] = lambda: at_slice.append(len(steps))
        gate = lab.hold()
        other = lab.submit(prompt_of(2, 8), 60)
        outcome = lab.submit(prompt_of(1, N_PROMPT), 10, sparse=HALF)
        gate.set()
        check_thin(outcome)
        other.wait().check()
    decoding = [n for n in at_slice if 0 < n < 60]
    assert len(decoding) > 20
    assert len(set(decoding)) == len(decoding)


@dataclass(eq=False)
class ReadingScorer(DiceScorer):
    """Needs as many slices as it takes to read all tokens."""

    asked: list[tuple[int, bool]] = field(default_factory=list)
    """For each slice: its tokens, and whether no other request waited."""

    def read(self, reading: Scoring, n_tokens: int, *, alone: bool = False) -> None:
        super().read(reading, n_tokens, alone=alone)
        self.asked.append((n_tokens, alone))
        reading.n_done = min(reading.n_done + n_tokens, len(reading.prompt))

    def finish_slice(self, reading: Scoring) -> bool:
        return reading.n_done == len(reading.prompt)

    def n_left(self, reading: Scoring) -> int:
        return len(reading.prompt) - reading.n_done


def test_slices_are_longer_while_nobody_waits() -> None:
    scorer = ReadingScorer()
    with HashEngine(scorer=scorer, chunk=32, largest_chunk=256) as lab:
        check_thin(lab.submit(prompt_of(1, N_PROMPT), 10, sparse=HALF))
        assert scorer.asked == [(32, True), (512, True), (512, True)]
        scorer.asked.clear()
        gate = lab.hold()
        other = lab.submit(prompt_of(2, 8), 60)
        outcome = lab.submit(prompt_of(1, N_PROMPT), 10, sparse=HALF)
        gate.set()
        check_thin(outcome)
        other.wait().check()
    assert max(n for n, alone in scorer.asked if not alone) <= 32


def test_a_prompt_is_read_in_chunks_of_few_shapes() -> None:
    with HashEngine(cache=DictCache(), chunk=64, common_chunk=16) as lab:
        outcome = lab.submit(prompt_of(1, 101), 5).wait()
        outcome.check()
        assert [e.n_done for e in outcome.of(Prefilled)] == [64, 96, 100]


@pytest.mark.parametrize("n", [1, 3])
def test_thinned_and_whole_prompts_share_a_batch(n: int) -> None:
    with HashEngine(cache=DictCache(), scorer=DiceScorer(), max_rows=32) as lab:
        gate = lab.hold()
        thin = [
            lab.submit(prompt_of(i, N_PROMPT + i), 20, n=n, sampling=WARM, sparse=HALF)
            for i in range(4)
        ]
        whole = [lab.submit(prompt_of(50 + i, 50), 40, sampling=WARM) for i in range(4)]
        gate.set()
        for outcome in thin:
            check_thin(outcome)
        for outcome in whole:
            outcome.wait().check()
        wait_idle(lab)
        assert lab.leftovers() == {}


# --- faults --------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["open", "read", "finish_slice"])
@pytest.mark.parametrize("error", [ValueError, RuntimeError])
def test_a_scorer_that_fails_costs_time_and_nothing_else(
    stage: str, error: type[Exception], caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise error("scorer")

    with HashEngine(cache=DictCache(), scorer=DiceScorer(at={stage: fail})) as lab:
        outcome = lab.submit(prompt_of(1, N_PROMPT), 20, sparse=HALF).wait()
        assert outcome.error is None
        assert outcome.tokens() == outcome.expected()
        assert told(outcome).n_skipped == 0
        assert told(outcome).keep is None
        assert lab.leftovers() == {}
    assert "is read in full" in caplog.text


def test_a_request_preempted_while_it_is_scored_and_then_read_in_full_says_so() -> None:
    """Most of its prompt has been cached meanwhile, so nothing is worth skipping any more."""
    prompt, cache, scorer = prompt_of(1, N_PROMPT), DictCache(), DiceScorer()
    prefix = prompt[: N_PROMPT - 20]

    def preempt() -> None:
        if not cache.store:
            cache.store["", tuple(prefix)] = list(prefix)
            lab.engine._loop._recovery.put_all_back(RuntimeError("the device failed"))

    scorer.at["read"] = preempt
    with HashEngine(cache=cache, scorer=scorer) as lab:
        outcome = lab.submit(prompt, 20, sparse=HALF).wait()
        outcome.check()
        assert outcome.of(Admitted)[0].keep == 0.5
        assert told(outcome).keep is None
        assert told(outcome).n_cached == len(prefix)
        assert lab.leftovers() == {}


@pytest.mark.parametrize("n_launched", [1, 3])
def test_a_step_that_fails_reads_the_same_tokens_again(n_launched: int) -> None:
    n = [0]

    def launch(rows: Sequence[HashRow]) -> None:
        n[0] += 1
        if n[0] == n_launched:
            raise ValueError("this once")

    with HashEngine(Faults(launch=launch), cache=DictCache(), scorer=DiceScorer()) as lab:
        check_thin(lab.submit(prompt_of(1, N_PROMPT), 20, sparse=HALF))


def test_after_a_late_device_fault_all_requests_are_computed_again() -> None:
    n = [0]

    def confirm() -> None:
        n[0] += 1
        if n[0] == 3:
            raise RuntimeError("late")

    with HashEngine(Faults(confirm=confirm), cache=DictCache(), scorer=DiceScorer()) as lab:
        outcomes = [lab.submit(prompt_of(i, N_PROMPT), 20, sparse=HALF) for i in range(2)]
        for outcome in outcomes:
            check_thin(outcome)
        wait_idle(lab)
        assert lab.leftovers() == {}


def test_slices_are_shorter_once_the_device_has_failed() -> None:
    late = [RuntimeError("late")]

    def confirm() -> None:
        if late:
            raise late.pop()

    scorer = ReadingScorer()
    faults = Faults(confirm=confirm)
    with HashEngine(faults, cache=DictCache(), scorer=scorer, chunk=32, largest_chunk=256) as lab:
        lab.submit(prompt_of(2, 80), 4).wait().check()
        assert not late
        check_thin(lab.submit(prompt_of(1, N_PROMPT), 10, sparse=HALF))
    assert max(n for n, _ in scorer.asked) == 256, "half of a scorer's largest"


def test_a_thinned_request_that_was_preempted_continues_as_it_was() -> None:
    budget = Budget(RowCost(1, 0), capacity_nbytes=900, reserve_tokens=16, grow_tokens=16)
    with HashEngine(cache=DictCache(), scorer=DiceScorer(), budget=budget) as lab:
        gate = lab.hold()
        outcomes = [lab.submit(prompt_of(i, N_PROMPT), 150, sparse=HALF) for i in range(3)]
        gate.set()
        for outcome in outcomes:
            check_thin(outcome)


# --- cancelled requests --------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["open", "read", "finish_slice"])
def test_a_request_can_be_cancelled_while_it_is_scored(stage: str) -> None:
    scorer, cache = DiceScorer(n_slices=10), DictCache()
    with HashEngine(cache=cache, scorer=scorer) as lab:
        gate = lab.hold()
        outcome = lab.submit(prompt_of(1, N_PROMPT), 20, sparse=HALF)
        scorer.at[stage] = lambda: lab.cancel(outcome)
        gate.set()
        while not scorer.opened:
            lab.between_steps()
        wait_idle(lab)
        assert lab.leftovers() == {}
        assert not outcome.tokens()
    assert all(r.closed for r in scorer.opened)


# --- deferred prefill ----------------------------------------------------------------------


def test_the_turn_after_a_sparse_one_resumes_from_the_exact_prompt() -> None:
    cache, prompt, scorer = DictCache(), prompt_of(1, N_PROMPT), DiceScorer()
    with HashEngine(cache=cache, scorer=scorer) as lab:
        first = lab.submit(prompt, 20, sparse=HALF)
        check_thin(first)
        wait_idle(lab)
        turn = [*prompt, *first.tokens(), *prompt_of(2, 30)]
        second = lab.submit(turn, 20, sparse=HALF).wait()
        second.check()
        assert second.n_cached >= N_PROMPT + 19
        assert lab.leftovers() == {}
    assert len(scorer.opened) == 1


def test_a_new_request_interrupts_deferred_prefill() -> None:
    chunks: list[int] = []
    cache, prompt = DictCache(), prompt_of(1, N_PROMPT)
    faults = Faults(
        prefill=lambda row, chunk: chunks.append(len(lab.engine._loop.inflight.sequences))
    )
    with HashEngine(faults, cache=cache, scorer=DiceScorer()) as lab:
        check_thin(lab.submit(prompt, 20, sparse=HALF))
        others = [lab.submit(prompt_of(i, 200), 50) for i in range(2, 6)]
        for other in others:
            other.wait().check()
        wait_idle(lab)
        exact = lab.submit(prompt, 5).wait()
        exact.check()
        assert exact.n_cached >= N_PROMPT - 8, "it was read all the same"
        assert lab.leftovers() == {}
    assert 0 in chunks, "with nobody there"


@pytest.mark.parametrize(
    "control", [CacheControl(write=False), CacheControl(read=False, write=False)]
)
def test_a_prompt_that_must_not_be_stored_is_not_deferred(control: CacheControl) -> None:
    cache = DictCache()
    with HashEngine(cache=cache, scorer=DiceScorer()) as lab:
        check_thin(lab.submit(prompt_of(1, N_PROMPT), 20, sparse=HALF, control=control))
        wait_idle(lab)
        n_read = sum(end - start for start, end in lab.runner.prefills)
        assert n_read < N_PROMPT, "the rest would be computed for nobody"
    assert cache.store == {}


def test_a_fault_in_deferred_prefill_gives_that_prompt_up() -> None:
    def fail(row: HashRow, chunk: Sequence[int]) -> None:
        if not lab.engine._loop.inflight.sequences:
            raise RuntimeError("behind")

    cache = DictCache()
    with HashEngine(Faults(prefill=fail), cache=cache, scorer=DiceScorer()) as lab:
        check_thin(lab.submit(prompt_of(1, N_PROMPT), 20, sparse=HALF))
        wait_idle(lab)
        lab.submit(prompt_of(1, N_PROMPT), 20).wait().check()
        assert lab.leftovers() == {}


def test_the_engine_stops_cleanly_during_deferred_prefill() -> None:
    cache = DictCache()
    with HashEngine(cache=cache, scorer=DiceScorer(), chunk=1) as lab:
        check_thin(lab.submit(prompt_of(1, N_PROMPT), 20, sparse=HALF))
    assert cache.closed
    assert lab.runner.closed
