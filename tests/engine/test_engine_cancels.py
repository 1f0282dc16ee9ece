"""When a client hangs up, its request's memory is free at the next step, in every stage."""

from __future__ import annotations

import random

import pytest

from firn.core.events import ChoiceDone, JobDone, Token
from firn.core.values import Sampling
from tests.dict_cache import DictCache
from tests.hash_engine import HashEngine, Outcome
from tests.hash_runner import Faults, HashRow, prompt_of, reply_to

WARM = Sampling(temperature=1.0, seed=3)


class Script:
    """Runs a function on the engine thread at the n-th chunk or decode step."""

    def __init__(self) -> None:
        self.faults = Faults(prefill=self._on_chunk, launch=self._on_step)
        self.at_chunk: dict[int, object] = {}
        self.at_step: dict[int, object] = {}
        self.n_chunks = 0
        self.n_steps = 0
        self.rows: list[list[HashRow]] = []
        """The rows of each decode step."""

    def _on_chunk(self, row: HashRow, chunk: list[int]) -> None:
        self.n_chunks += 1
        self._run(self.at_chunk.pop(self.n_chunks, None))

    def _on_step(self, rows: list[HashRow]) -> None:
        self.n_steps += 1
        self.rows.append(list(rows))
        self._run(self.at_step.pop(self.n_steps, None))

    def _run(self, action: object) -> None:
        if callable(action):
            action()


# --- cancel --------------------------------------------------------------------------------


def test_a_request_cancelled_in_the_queue_never_starts() -> None:
    with HashEngine(cache=DictCache(), max_rows=1) as lab:
        gate = lab.hold()
        first = lab.submit(prompt_of(1, 9), 20)
        gone = lab.submit(prompt_of(2, 9), 20)
        last = lab.submit(prompt_of(3, 9), 20)
        lab.cancel(gone)
        gate.set()
        first.wait().check()
        last.wait().check()
        assert gone.events == []
        assert lab.leftovers() == {}


def test_a_request_cancelled_in_prefill_leaves_its_blocks_in_the_cache() -> None:
    script, cache = Script(), DictCache()
    with HashEngine(script.faults, cache=cache, chunk=8) as lab:
        gate = lab.hold()
        prompt = prompt_of(1, 81)
        gone = lab.submit(prompt, 20)
        script.at_chunk[3] = lambda: lab.cancel(gone)
        gate.set()
        while script.n_chunks < 3:
            lab.between_steps()
        assert lab.leftovers() == {}
        assert script.n_chunks == 3, "it got no further chunk"
        assert gone.tokens() == []
        assert not gone.finished.is_set()
        again = lab.submit(prompt, 5).wait()
        again.check()
        assert again.n_cached == 24, "the blocks done so far stay in the cache"


def test_a_request_cancelled_in_decode_frees_its_row_at_the_next_step() -> None:
    script = Script()
    with HashEngine(script.faults) as lab:
        gate = lab.hold()
        gone, other = lab.submit(prompt_of(1, 3), 50), lab.submit(prompt_of(2, 3), 50)
        script.at_step[12] = lambda: lab.cancel(gone)
        gate.set()
        other.wait().check()
        with_it = [i for i, rows in enumerate(script.rows) if len(rows) == 2]
        assert with_it[-1] == 11, "its row was gone at the next step"
        assert len(gone.tokens()) < 13
        assert not gone.finished.is_set()
        assert lab.leftovers() == {}


def test_a_cancelled_request_frees_the_rows_of_all_choices() -> None:
    script = Script()
    with HashEngine(script.faults, cache=DictCache()) as lab:
        gate = lab.hold()
        gone = lab.submit(prompt_of(1, 20), 50, n=4, sampling=WARM)
        other = lab.submit(prompt_of(2, 3), 80)
        script.at_step[30] = lambda: lab.cancel(gone)
        gate.set()
        other.wait().check()
        assert not gone.finished.is_set()
        assert lab.leftovers() == {}


def test_a_cancelled_request_gets_no_more_events() -> None:
    with HashEngine() as lab:
        gate = lab.hold()
        gone = lab.submit(prompt_of(1, 9), 10_000_000)
        gate.set()
        while not gone.tokens():
            lab.between_steps()
        lab.cancel(gone)
        lab.between_steps()
        n_heard = len(gone.events)
        lab.submit(prompt_of(2, 9), 20).wait().check()
        assert len(gone.events) == n_heard
        lab.cancel(gone)
        assert lab.leftovers() == {}


# --- stop one choice -----------------------------------------------------------------------


def test_a_stopped_choice_leaves_the_others_alone() -> None:
    script = Script()
    with HashEngine(script.faults, cache=DictCache()) as lab:
        gate = lab.hold()
        outcome = lab.submit(prompt_of(1, 9), 30, n=3, sampling=WARM)
        script.at_step[10] = lambda: lab.engine.stop_choice(outcome.job.id, 1)
        gate.set()
        outcome.wait()
        want = outcome.expected(1)
        stopped = outcome.tokens(1)
        assert stopped == want[: len(stopped)]
        assert 8 <= len(stopped) <= 11
        assert outcome.reason(1) is None, "whoever stopped it knows"
        for choice in (0, 2):
            assert outcome.tokens(choice) == outcome.expected(choice)
            assert outcome.reason(choice) == "length"
        assert outcome.events[-1] == JobDone()
        assert lab.leftovers() == {}


@pytest.mark.parametrize("stage", ["queue", "prefill", "decode"])
def test_a_job_ends_when_all_its_choices_are_stopped(stage: str) -> None:
    script = Script()
    with HashEngine(script.faults, cache=DictCache(), max_rows=4) as lab:
        gate = lab.hold()
        first = lab.submit(prompt_of(2, 20), 200, n=3)
        outcome = lab.submit(prompt_of(1, 60), 200, n=1 if stage != "queue" else 2)

        def stop() -> None:
            for choice in range(outcome.job.n):
                lab.engine.stop_choice(outcome.job.id, choice)
                lab.engine.stop_choice(outcome.job.id, choice)

        if stage == "queue":
            stop()
        elif stage == "prefill":
            script.at_chunk[5] = stop
        else:
            script.at_step[40] = stop
        gate.set()
        outcome.wait()
        assert outcome.events[-1] == JobDone()
        assert outcome.of(ChoiceDone) == []
        assert bool(outcome.tokens()) == (stage == "decode")
        first.wait().check()
        assert lab.leftovers() == {}
        assert outcome.n_ends == 1


def test_a_choice_stopped_in_prefill_never_starts() -> None:
    script = Script()
    with HashEngine(script.faults, chunk=8) as lab:
        gate = lab.hold()
        outcome = lab.submit(prompt_of(1, 50), 10, n=3, sampling=WARM)
        script.at_chunk[2] = lambda: lab.engine.stop_choice(outcome.job.id, 0)
        gate.set()
        outcome.wait()
        assert outcome.tokens(0) == []
        assert [outcome.tokens(i) for i in (1, 2)] == [outcome.expected(i) for i in (1, 2)]
        assert lab.runner.largest_group == 2


# --- thousands of them ---------------------------------------------------------------------


class Crowd:
    """Clients that hang up, or stop a choice, at random moments."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.faults = Faults(
            start=self._maybe, prefill=self._maybe, finish_chunk=self._maybe, launch=self._maybe,
            collect=self._maybe,
        )  # fmt: skip
        self.lab: HashEngine | None = None
        self.open: list[Outcome] = []
        self.cancelled: set[str] = set()
        self.stopped: set[tuple[str, int]] = set()

    def _maybe(self, *_: object) -> None:
        if self.open and self.rng.random() < 0.08:
            self.open[:] = [o for o in self.open if not o.finished.is_set()]
            if self.open:
                self.interfere(self.rng.choice(self.open[:8]))  # these are probably running

    def interfere(self, outcome: Outcome) -> None:
        assert self.lab is not None
        if self.rng.random() < 0.8:
            self.cancelled.add(outcome.job.id)
            if outcome in self.open:
                self.open.remove(outcome)
            self.lab.cancel(outcome)
        else:
            choice = self.rng.randrange(outcome.job.n)
            self.stopped.add((outcome.job.id, choice))
            self.lab.engine.stop_choice(outcome.job.id, choice)


@pytest.mark.parametrize("group_rows", [1, 100])
def test_thousands_of_cancels_leave_nothing_behind(group_rows: int) -> None:
    crowd = Crowd(seed=group_rows)
    rng = random.Random(99)
    cache = DictCache()
    with HashEngine(crowd.faults, cache=cache, max_rows=6, chunk=4, group_rows=group_rows) as lab:
        crowd.lab = lab
        outcomes = []
        for wave in range(60):
            gate = lab.hold()
            for i in range(50):
                prompt = prompt_of(rng.randrange(20), rng.randint(1, 25))
                outcome = lab.submit(prompt, rng.randint(1, 12), n=rng.choice([1, 1, 2, 5]),
                                     sampling=Sampling(temperature=1.0, seed=i))  # fmt: skip
                outcomes.append(outcome)
                crowd.open.append(outcome)
                if rng.random() < 0.1:
                    crowd.interfere(outcome)
            gate.set()
            for outcome in outcomes:
                while outcome.job.id not in crowd.cancelled and not outcome.finished.wait(0.001):
                    pass
            lab.between_steps(crowd.open.clear)
            assert lab.leftovers() == {}, f"after wave {wave}"
            cache.store.clear()
        for outcome in outcomes:
            check_spoken(outcome, crowd)
    n_whole = sum(o.n_ends == 1 for o in outcomes)
    n_begun = sum(o.n_ends == 0 and bool(o.of(Token)) for o in outcomes)
    assert len(crowd.cancelled) > 1000
    assert n_whole > 100
    assert n_begun > 100


def check_spoken(outcome: Outcome, crowd: Crowd) -> None:
    """Every token is right and sent once; only cancelled requests have no end."""
    assert outcome.error is None
    assert outcome.n_ends <= 1
    if outcome.job.id not in crowd.cancelled:
        assert outcome.n_ends == 1
    prompt = outcome.job.prompt.ids.tolist()
    for choice in range(outcome.job.n):
        want = reply_to(
            prompt, outcome.job.max_tokens, sampling=outcome.job.sampling, choice=choice
        )
        tokens = outcome.tokens(choice)
        assert tokens == want[: len(tokens)]
        if outcome.n_ends and (outcome.job.id, choice) not in crowd.stopped:
            assert tokens == want
