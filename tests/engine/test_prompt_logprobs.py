"""Logprobs of prompts, and prompts without a reply."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firn.core.events import Admitted, ChoiceDone, JobDone, Prefilled, PromptLogprobs, Token
from firn.core.reuse import Cause, Reason
from firn.core.values import CacheControl, Sampling
from firn.engine.loop import GROW_EVERY
from tests.dict_cache import DictCache
from tests.hash_engine import HashEngine
from tests.hash_runner import VOCAB_SIZE, Faults, HashRow, prompt_of, scores_of


@pytest.mark.parametrize("length", [1, 2, 8, 9, 10, 40])
@pytest.mark.parametrize("n_reply", [0, 1, 5])
def test_every_token_but_the_first_gets_one_logprob(length: int, n_reply: int) -> None:
    with HashEngine(chunk=8) as lab:
        outcome = lab.submit(prompt_of(length, length), n_reply, scored=2).wait()
        outcome.check()
        assert lab.leftovers() == {}


def test_prompt_logprobs_come_before_the_reply() -> None:
    prompt = prompt_of(1, 10)
    with HashEngine(chunk=4) as lab:
        events = lab.submit(prompt, 1, scored=0).wait().events
    assert events == [
        Admitted(0, reason=Reason(Cause.NO_CACHE)),
        PromptLogprobs(1, tuple(scores_of(prompt, 0, 4))),
        Prefilled(4, 10),
        PromptLogprobs(5, tuple(scores_of(prompt, 4, 9))),
        Prefilled(9, 10),
        events[-3],
        ChoiceDone(0, "length"),
        JobDone(),
    ]
    assert isinstance(events[-3], Token)


def test_without_asking_there_are_no_prompt_logprobs() -> None:
    with HashEngine() as lab:
        assert lab.submit(prompt_of(1, 20), 3).wait().of(PromptLogprobs) == []


def test_a_prompt_with_logprobs_is_computed_and_stored() -> None:
    prompt = prompt_of(2, 33)
    with HashEngine(cache=DictCache()) as lab:
        lab.submit(prompt, 2).wait().check()
        again = lab.submit(prompt, 2, scored=1).wait()
        again.check()
        assert again.n_cached == 0
        other = [*prompt_of(3, 33)]
        lab.submit(other, 0, scored=1).wait().check()
        after = lab.submit([*other, 7], 2).wait()
        after.check()
        assert after.n_cached == 32
        assert lab.leftovers() == {}


def test_a_neighbour_with_the_same_prompt_takes_no_logprobs_away() -> None:
    """Of two equal prompts at a time, the one with logprobs must not skip ahead; the other may."""
    prompt = prompt_of(4, 80)
    with HashEngine(cache=DictCache(), chunk=8) as lab:
        gate = lab.hold()
        scored, plain = lab.submit(prompt, 3, scored=0), lab.submit(prompt, 3)
        gate.set()
        scored.wait().check()
        plain.wait().check()


def test_a_large_vocabulary_makes_short_chunks() -> None:
    with HashEngine(chunk=8, logprobs_chunk_nbytes=4 * VOCAB_SIZE * 3) as lab:
        lab.submit(prompt_of(5, 10), 0, scored=0).wait().check()
        assert [end - start for start, end in lab.runner.prefills] == [3, 3, 3]
        lab.submit(prompt_of(6, 9), 1).wait().check()
        assert lab.runner.prefills[3:] == [(0, 8)]


def test_aligned_chunks_keep_their_size_with_logprobs() -> None:
    with HashEngine(chunk=8, aligned=True, logprobs_chunk_nbytes=4 * VOCAB_SIZE * 3) as lab:
        lab.submit(prompt_of(5, 20), 0, scored=0).wait().check()
        assert lab.runner.prefills == [(0, 8), (8, 16), (16, 19)]


def test_choices_of_zero_tokens_all_end() -> None:
    with HashEngine(cache=DictCache()) as lab:
        outcome = lab.submit(prompt_of(7, 30), 0, n=3, sampling=Sampling(seed=1)).wait()
        outcome.check()
        assert outcome.of(Token) == []
        assert [e.choice for e in outcome.of(ChoiceDone)] == [0, 1, 2]
        assert lab.leftovers() == {}
        # It was read and stored, so the next one need not be read.
        assert lab.submit(prompt_of(7, 30), 2).wait().n_cached == 29
        # Nothing is left to read, and no reply is asked for.
        lab.submit(prompt_of(7, 30), 0).wait().check()
        assert lab.leftovers() == {}


def test_a_fault_with_logprobs_ends_that_request_alone() -> None:
    bad = prompt_of(8, 30)

    def fail(row: object, chunk: object) -> None:
        if list(chunk)[:2] == bad[16:18]:  # type: ignore[call-overload]
            raise RuntimeError("injected")

    with HashEngine(Faults(prefill=fail), chunk=8) as lab:
        gate = lab.hold()
        first, second = lab.submit(bad, 3, scored=1), lab.submit(prompt_of(9, 30), 3, scored=1)
        gate.set()
        assert first.wait().error is not None
        second.wait().check()
        assert lab.leftovers() == {}


def test_a_row_that_is_read_again_sends_no_logprobs_again() -> None:
    broken: list[int] = []

    def fail(rows: object) -> None:
        if not broken:
            broken.append(1)
            raise RuntimeError("injected")

    with HashEngine(Faults(launch=fail), chunk=8) as lab:
        lab.submit(prompt_of(10, 30), 6, scored=1).wait().check()
        assert broken


@pytest.mark.parametrize("n", [1, 2])
def test_a_request_that_is_preempted_before_its_first_token_sends_no_logprobs_again(n: int) -> None:
    def shrink(row: HashRow) -> None:
        if row.job is not None and row.job.prompt_logprobs:  # memory gets short in the next step
            lab.budget.capacity_nbytes = 1
            lab.engine._loop._n_steps = GROW_EVERY - 1

    with HashEngine(Faults(join=shrink), chunk=8) as lab:
        gate = lab.hold()
        older, scored = (
            lab.submit(prompt_of(11, 10), 60),
            lab.submit(prompt_of(12, 30), 5, n=n, scored=1),
        )
        gate.set()
        older.wait().check()
        scored.wait().check()
        assert len(lab.runner.prefills) > 2 + 4, "its prompt was read twice"
        assert lab.leftovers() == {}


@given(st.data())
@settings(max_examples=25, deadline=None)
def test_jobs_with_and_without_logprobs_do_not_affect_each_other(data: st.DataObject) -> None:
    jobs = data.draw(
        st.lists(
            st.tuples(
                st.integers(0, 2),
                st.integers(1, 40),
                st.integers(0, 6),
                st.none() | st.integers(0, 2),
                st.booleans(),
            ),
            min_size=2,
            max_size=6,
        )
    )
    with HashEngine(cache=DictCache(), chunk=8, max_rows=3) as lab:
        outcomes = [
            lab.submit(
                prompt_of(seed, 60)[:length],
                n_reply,
                scored=scored,
                control=CacheControl(write=writes),
            )
            for seed, length, n_reply, scored, writes in jobs
        ]
        for outcome in outcomes:
            outcome.wait().check()
        assert lab.leftovers() == {}
