"""Forced tokens appear in a reply where they were asked for, as if they had been picked."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firn.core.events import Token
from firn.core.values import RequestId, Sampling
from tests.dict_cache import DictCache
from tests.hash_engine import HashEngine, Outcome
from tests.hash_runner import VOCAB_SIZE, Faults, HashRow, next_token, prompt_of, reply_to

WARM = Sampling(temperature=1.0, seed=3)


def said(
    prompt: Sequence[int],
    n_reply: int,
    forced: dict[int, int],
    *,
    sampling: Sampling | None = None,
    choice: int = 0,
) -> list[int]:
    """The model's reply if these positions are forced."""
    tokens = list(prompt)
    for i in range(n_reply):
        draw = (sampling.seed, choice, i) if sampling else None
        tokens.append(forced.get(i, next_token(tokens, draw)))
    return tokens[len(prompt) :]


def marked(outcome: Outcome, choice: int = 0) -> list[int]:
    """The positions of the reply that are marked as forced."""
    tokens = [e for e in outcome.of(Token) if e.choice == choice]
    return [i for i, event in enumerate(tokens) if event.forced]


@pytest.mark.parametrize("at", [0, 1, 2, 7, 15, 18])
@pytest.mark.parametrize("cached", [False, True])
def test_the_reply_continues_from_forced_tokens(at: int, cached: bool) -> None:
    prompt = prompt_of(1, 30)
    with HashEngine(cache=DictCache() if cached else None) as lab:
        if cached:
            lab.submit(prompt, 3).wait()
        gate = lab.hold()
        outcome = lab.submit(prompt, 20)
        lab.engine.force(outcome.job.id, 0, [5, 6, 7], at=at)
        gate.set()
        outcome.wait()
        want = said(prompt, 20, {at: 5, at + 1: 6, at + 2: 7})
        assert outcome.tokens() == want
        assert marked(outcome) == [i for i in range(at, at + 3) if i < 20]
        assert lab.leftovers() == {}
        if cached:  # the stored tokens are the forced ones
            longer = [*prompt, *want, 9]
            again = lab.submit(longer, 5).wait()
            assert again.n_cached >= len(prompt) + 19
            assert again.tokens() == reply_to(longer, 5)


def test_tokens_are_forced_on_the_named_choice_only() -> None:
    prompt = prompt_of(2, 20)
    with HashEngine() as lab:
        gate = lab.hold()
        outcome = lab.submit(prompt, 12, n=3, sampling=WARM)
        lab.engine.force(outcome.job.id, 1, [5, 6], at=4)
        gate.set()
        outcome.wait()
        for choice in range(3):
            forced = {4: 5, 5: 6} if choice == 1 else {}
            want = said(prompt, 12, forced, sampling=WARM, choice=choice)
            assert outcome.tokens(choice) == want


def test_tokens_forced_too_late_follow_those_already_picked() -> None:
    prompt = prompt_of(3, 10)
    n_launched = 0

    def launch(rows: Sequence[HashRow]) -> None:
        nonlocal n_launched
        n_launched += 1
        if n_launched == 10:
            lab.engine.force(outcome.job.id, 0, [5, 6], at=0)

    with HashEngine(Faults(launch=launch)) as lab:
        gate = lab.hold()
        outcome = lab.submit(prompt, 30)
        gate.set()
        outcome.wait()
    start = marked(outcome)[0]
    assert start == 10, "the token in flight stands"
    assert outcome.tokens() == said(prompt, 30, {start: 5, start + 1: 6})


def test_a_second_order_replaces_the_first() -> None:
    prompt = prompt_of(4, 10)
    with HashEngine() as lab:
        gate = lab.hold()
        outcome = lab.submit(prompt, 20)
        lab.engine.force(outcome.job.id, 0, [5, 6], at=3)
        lab.engine.force(outcome.job.id, 0, [8], at=9)
        gate.set()
        assert outcome.wait().tokens() == said(prompt, 20, {9: 8})


@pytest.mark.parametrize(("withdrawn_at", "forced"), [(3, False), (12, True), (40, True)])
def test_an_order_can_be_withdrawn_until_it_has_begun(withdrawn_at: int, forced: bool) -> None:
    prompt = prompt_of(5, 10)
    tokens = [5] * 10
    n_launched = 0

    def launch(rows: Sequence[HashRow]) -> None:
        nonlocal n_launched
        n_launched += 1
        if n_launched == withdrawn_at:
            lab.engine.force(outcome.job.id, 0, (), at=0)

    with HashEngine(Faults(launch=launch)) as lab:
        gate = lab.hold()
        outcome = lab.submit(prompt, 50)
        lab.engine.force(outcome.job.id, 0, tokens, at=8)
        gate.set()
        outcome.wait()
    want = dict(enumerate(tokens, start=8)) if forced else {}
    assert outcome.tokens() == said(prompt, 50, want)
    assert marked(outcome) == list(want)


@pytest.mark.parametrize("fails_at", [2, 6, 7, 8, 9, 12])
def test_a_failed_step_loses_no_forced_token(fails_at: int) -> None:
    """The row is read again from its tokens, and the rest of the forced tokens still follow."""
    prompt = prompt_of(6, 25)
    n_launched = 0

    def launch(rows: Sequence[HashRow]) -> None:
        nonlocal n_launched
        n_launched += 1
        if n_launched == fails_at:
            raise RuntimeError("a device fault")

    with HashEngine(Faults(launch=launch)) as lab:
        gate = lab.hold()
        outcome = lab.submit(prompt, 20)
        lab.engine.force(outcome.job.id, 0, [5, 6, 7], at=6)
        gate.set()
        outcome.wait()
        assert outcome.tokens() == said(prompt, 20, {6: 5, 7: 6, 8: 7})
        assert marked(outcome) == [6, 7, 8]
        assert lab.leftovers() == {}


orders = st.lists(
    st.tuples(st.integers(1, 25), st.integers(1, 14), st.integers(0, 16), st.integers(0, 4)),
    min_size=1,
    max_size=8,
)


@given(orders, st.integers(1, 4), st.integers(1, 9))
@settings(max_examples=40, deadline=None)
def test_any_mixture_of_jobs_gets_its_own_forced_tokens(
    mixture: list[tuple[int, int, int, int]], max_rows: int, chunk: int
) -> None:
    """Other requests prefill and decode meanwhile, so that steps are in flight or not."""
    with HashEngine(max_rows=max_rows, chunk=chunk) as lab:
        gate = lab.hold()
        outcomes = []
        for length, n_reply, at, n_forced in mixture:
            outcome = lab.submit(prompt_of(length, length), n_reply)
            forced = [(length + i) % VOCAB_SIZE for i in range(n_forced)]
            lab.engine.force(outcome.job.id, 0, forced, at=at)
            outcomes.append((outcome, dict(enumerate(forced, start=at))))
        gate.set()
        for outcome, forced_at in outcomes:
            outcome.wait()
            prompt = outcome.job.prompt.ids.tolist()
            assert outcome.tokens() == said(prompt, outcome.job.max_tokens, forced_at)
        assert lab.leftovers() == {}


def test_forcing_an_unknown_or_finished_request_does_nothing() -> None:
    with HashEngine() as lab:
        lab.engine.force(RequestId("nobody"), 3, [1], at=0)
        outcome = lab.submit(prompt_of(1, 5), 4)
        outcome.wait().check()
        lab.engine.force(outcome.job.id, 0, [1], at=9)
        assert lab.leftovers() == {}
