"""Steps with drafts that are dispatched before the previous one is read give the same text."""

from __future__ import annotations

import dataclasses
import random
import types
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from firn.backends import named
from firn.backends.cuda.traced import TracedSteps
from firn.core.values import RequestId, Sampling
from firn.models.decode import pipelined, verify
from firn.models.decode.batch import VACANT_STEPS, Group
from firn.models.decode.pipelined import Pipeline, PipelinedVerification
from firn.models.decode.sampling import to_host
from firn.models.speculation.speculator import DraftPlan
from tests.backends.cuda.test_traced import at_once
from tests.harness import GREEDY, Harness, Result, running
from tests.models.alone import assert_same, beginning, plain, prompt_of, said_alone
from tests.models.decode.test_drafts_in_flight import FORCED, at_token, request_of
from tests.models.speculation.drafting import AnyWidth, KnownReplies
from tests.models.speculation.test_speculation import (
    SAMPLINGS,
    Story,
    assert_equal,
    cancel_others,
    known,
    story,
    tell,
)
from tests.sparse.test_placing import thin_of
from tests.zoo import VOCAB_SIZE, build

WARM = Sampling(temperature=0.9, seed=5)
CHANGING = (4, 8, 16)
PROMPTS = [prompt_of(random.Random(n), n) for n in (20, 35, 50, 28, 33, 47)]
"""Used by nearly all tests, so that the replies are computed once."""
LONGEST = 90


class Steady(AnyWidth):
    """Every step has the same width, or a random one of `widths`."""

    def __init__(self, *args: Any, widths: Sequence[int], **options: Any) -> None:
        super().__init__(*args, **options)
        self._widths, self._rng = widths, random.Random(5)

    def _plan(self, group: Group, *, step_in_flight: bool = False) -> DraftPlan:
        return DraftPlan(self._rng.choice(self._widths))


@pytest.fixture
def followers(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Iterator[list[PipelinedVerification]]:
    """The steps that were launched behind an unread one. Each began where the host expected."""
    seen: list[PipelinedVerification] = []
    launch = Pipeline.launch

    def watched(self: Pipeline, group: Group, drafts: Any) -> PipelinedVerification | None:
        step = launch(self, group, drafts)
        seen.extend([step] if step is not None else [])
        return step

    monkeypatch.setattr(Pipeline, "launch", watched)
    yield seen
    assert "each step with drafts is read before the next" not in caplog.text


@cache
def profile(name: str) -> Any:
    model = build(name)
    own = named("cuda").step_profile(model, lambda: list(make_prompt_cache(model)))
    return dataclasses.replace(own, columns=dataclasses.replace(own.columns, block=64))


def steady(replies: Any, *widths: int, right: float = 0.7, name: str = "qwen3") -> Steady:
    drafter = KnownReplies(replies, right=right, vocab_size=VOCAB_SIZE)
    return Steady(drafter, widths=widths or (4,), profile=profile(name))


def guessing(speculation: Steady, *, name: str = "qwen3", **options: Any) -> Any:
    """An engine that traces steps from the first on: only traced steps can be followed unread."""
    return running(plain(name), traced=at_once, speculation=lambda: speculation, **options)


def replies_to(prompts: list[list[int]], n_reply: int, sampling: Sampling = GREEDY) -> list[Result]:
    return [beginning(r, n_reply) for r in said_alone("qwen3", prompts, LONGEST, sampling)]


def together(
    harness: Harness, prompts: list[list[int]], n_reply: int, sampling: Sampling
) -> list[Result]:
    """All of them begin with the same step."""
    return harness.between_steps(
        lambda: [harness.submit(p, n_reply, sampling=sampling) for p in prompts]
    )


def by_prompt(prompts: list[list[int]], results: list[Result]) -> dict[Any, list[int]]:
    return {(tuple(p), 0): r.reply for p, r in zip(prompts, results, strict=True)}


TOGETHER: dict[str, Any] = {"chunk": 32, "cache_nbytes": None, "max_rows": 3}


@cache
def told(name: str) -> tuple[Story, list[Result]]:
    greedy, seeded, penalised = SAMPLINGS.values()
    samplings = [greedy, seeded, greedy, seeded, penalised]
    requests = [(p, n + 50, c, s) for p, n, c, s in story(4, samplings=samplings, n_requests=6)]
    with running(plain(name), **TOGETHER) as harness:
        return requests, tell(harness, requests)


@pytest.mark.parametrize(
    ("name", "widths", "right"),
    [
        ("qwen3", (4,), 0.5),
        ("qwen3", (16,), 0.97),
        ("qwen3", CHANGING, 0.9),
        ("llama", (8,), 0.9),
        ("deepseek_v3", (4,), 0.8),
    ],
)
def test_an_engine_says_the_same(
    name: str,
    widths: tuple[int, ...],
    right: float,
    followers: list[PipelinedVerification],
) -> None:
    """Rows join and leave. Those with penalties draw from other logits after each token: no step may
    follow theirs unread."""
    requests, want = told(name)
    speculation = steady(known(requests, want), *widths, right=right, name=name)
    with guessing(speculation, name=name, **TOGETHER) as harness:
        got = tell(harness, requests)
    n_said = sum(len(reply) for result in want for reply in result.tokens.values())
    assert sum(assert_equal(g, w) for g, w in zip(got, want, strict=True)) > 0.8 * n_said
    assert len(followers) > 1
    assert not any(row.picker.reshapes for f in followers for row in f.rows if row.picker)


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "seeded"])
@pytest.mark.parametrize("n_rows", [1, 3])
@pytest.mark.parametrize("right", [0.0, 0.5, 1.0])
def test_most_steps_follow_one_that_is_not_read(
    sampling: Sampling, n_rows: int, right: float, followers: list[PipelinedVerification]
) -> None:
    prompts = PROMPTS[:n_rows]
    want = replies_to(prompts, 60, sampling)
    speculation = steady(by_prompt(prompts, want), right=right)
    with guessing(speculation, cache_nbytes=None, max_rows=n_rows) as harness:
        got = together(harness, prompts, 60, sampling)
        for g, w in zip(got, want, strict=True):
            assert_equal(g.wait(), w)
    taken = [t for f in followers for t in f.read()]
    n_right, n_drafted = sum(t.n_right for t in taken), sum(t.n_drafted for t in taken)
    assert len(followers) > 0.7 * speculation.totals.n_draft_steps
    assert 0.9 * n_drafted < n_right if right == 1.0 else n_right < (right + 0.1) * n_drafted
    assert n_drafted > 2.5 * len(taken), "their texts are long enough"


def test_the_reply_to_a_thinned_prompt_keeps_its_positions() -> None:
    """Its tokens' positions are ahead of their cells, and a trace counts cells."""
    thin = thin_of()
    with running(plain("qwen3"), cache_nbytes=None) as harness:
        want = harness.ask(thin, 60)
    speculation = steady({(tuple(thin.whole.ids.tolist()), 0): want.reply}, right=0.9)
    with guessing(speculation, cache_nbytes=None) as harness:
        got = harness.ask(thin, 40)
    assert assert_equal(got, beginning(want, 40)) > 30
    assert speculation.totals.n_draft_steps > 5


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "seeded"])
@pytest.mark.parametrize("n_rows", [1, 3])
def test_a_step_may_follow_one_of_another_width(
    n_rows: int, sampling: Sampling, followers: list[PipelinedVerification]
) -> None:
    prompts = PROMPTS[:n_rows]
    want = replies_to(prompts, 90, sampling)
    speculation = steady(by_prompt(prompts, want), *CHANGING, right=0.6)
    with guessing(speculation, cache_nbytes=None, max_rows=n_rows) as harness:
        got = together(harness, prompts, 90, sampling)
        for g, w in zip(got, want, strict=True):
            assert_equal(g.wait(), w)
    assert {f.width for f in followers} == set(CHANGING)
    assert len(followers) > 0.7 * speculation.totals.n_draft_steps


def test_seats_that_stayed_vacant_are_removed_between_steps(
    followers: list[PipelinedVerification],
) -> None:
    """The remaining two rows take more steps than a vacant seat is kept for."""
    prompts, lengths = PROMPTS[:3], (15, 80, 90)
    want = [replies_to([p], n)[0] for p, n in zip(prompts, lengths, strict=True)]
    speculation = steady(by_prompt(prompts, want), right=0.5)
    with guessing(speculation, cache_nbytes=None, max_rows=3) as harness:
        got = [harness.submit(p, n) for p, n in zip(prompts, lengths, strict=True)]
        for g, w in zip(got, want, strict=True):
            assert_equal(g.wait(), w)
    n_seats = [len(step.rows) for step in followers]
    assert n_seats.count(3) > VACANT_STEPS
    assert n_seats.count(2) > 5


def test_what_the_device_feeds_next() -> None:
    """Each row is fed the token it picked after its right drafts, then the rest of its text."""
    fed = verify.DeviceFeed(
        ids=mx.array([[9, 11, 12, 13], [9, 21, 22, 23], [9, 31, 0, 0], [9, 0, 0, 0]]),
        begins=mx.array([100, 200, 300, 400]),
        n_drafted=mx.array([3, 3, 1, 0]),
        places=mx.array([[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 9, 9], [10, 10, 10, 10]]),
    )
    picked = mx.array([11, 12, 13, 14, 21, 99, 98, 97, 31, 0, 0], dtype=mx.uint32)
    texts = [range(11, 18), range(21, 28), range(31, 35), ()]
    after, n_right = pipelined.next_feed(picked, fed, [tuple(text) for text in texts], 4)
    assert n_right.tolist() == [3, 1, 1, 0], "padding that happens to be picked is not right"
    assert after.ids.tolist() == [[14, 15, 16, 17], [99, 23, 24, 25], [0, 33, 34, 0], [0] * 4]
    assert after.n_drafted.tolist() == [3, 3, 2, 0]
    assert after.begins.tolist() == [104, 202, 302, 401]
    assert after.ids.dtype == fed.ids.dtype, "or the step would be traced again"
    assert after.begins.dtype == fed.begins.dtype
    narrow, _ = pipelined.next_feed(picked, fed, [tuple(text) for text in texts], 2)
    assert narrow.ids.tolist() == [[14, 15], [99, 23], [0, 33], [0, 0]]
    assert narrow.n_drafted.tolist() == [1, 1, 1, 0]
    wide, _ = pipelined.next_feed(
        picked, fed, [(*text, 50, 51) for text in texts[:2]] + [(), ()], 6
    )
    assert wide.ids.tolist()[:2] == [[14, 15, 16, 17, 50, 51], [99, 23, 24, 25, 26, 27]]
    assert wide.n_drafted.tolist() == [5, 5, 0, 0]


@pytest.mark.parametrize("n_rows", [1, 3])
def test_a_reply_is_stored_to_its_end_token(
    n_rows: int, followers: list[PipelinedVerification]
) -> None:
    """The next step is already under way when the end token is read."""
    prompts = PROMPTS
    whole = replies_to(prompts, 60)
    speculation = steady(by_prompt(prompts, whole), right=0.4)
    with guessing(speculation, block=16, max_rows=n_rows) as harness:
        asked = [
            harness.submit(p, 60, eos=frozenset(r.reply[30:33]))
            for p, r in zip(prompts, whole, strict=True)
        ]
        for prompt, result, all_of_it in zip(prompts, asked, whole, strict=True):
            reply = result.wait().reply
            assert reply == all_of_it.reply[: len(reply)]
            assert reply[-1] in all_of_it.reply[30:33]
            again = harness.ask([*prompt, *reply, 50, 51, 52], 8)
            assert len(prompt) + len(reply) - 1 <= again.n_cached <= len(prompt) + len(reply)
            assert_same("qwen3", [*prompt, *reply, 50, 51, 52], again.reply)
    ended = [f for f in followers if len(f.read()) < len(f.rows)]
    assert ended, "a row has ended while the next step was under way"


@pytest.mark.parametrize("n_reply", [21, 22, 23, 24])
def test_a_reply_has_as_many_tokens_as_were_asked_for(
    n_reply: int, followers: list[PipelinedVerification]
) -> None:
    prompts = PROMPTS[:3]
    whole = replies_to(prompts, 60)
    speculation = steady(by_prompt(prompts, whole), right=0.8)
    with guessing(speculation, block=16, max_rows=3) as harness:
        asked = [harness.submit(p, n_reply) for p in prompts]
        for result, all_of_it in zip(asked, whole, strict=True):
            assert result.wait().reply == all_of_it.reply[:n_reply]
            assert result.reasons == {0: "length"}
    assert followers


def test_tokens_that_are_forced_meanwhile_come_behind_it() -> None:
    for n, prompt in zip((5, 6, 9), PROMPTS[:3], strict=True):
        speculation = steady(by_prompt([prompt], replies_to([prompt], 60)), right=0.9)

        def force(harness: Harness, result: Result) -> None:
            harness.engine.force(request_of(harness), 0, FORCED, at=0)

        with guessing(speculation) as harness:
            said = at_token(harness, prompt, 40, n, force).reply
        at = next(i for i in range(n, 40) if said[i : i + len(FORCED)] == FORCED)
        assert assert_same("qwen3", prompt, said[:at]) > 2
        assert assert_same("qwen3", [*prompt, *said[: at + 4]], said[at + 4 :]) > 2


@pytest.mark.parametrize("widths", [(4,), CHANGING], ids=str)
def test_tokens_that_were_forced_before_are_said_in_their_place(
    widths: tuple[int, ...], followers: list[PipelinedVerification]
) -> None:
    prompts = PROMPTS[:3]
    speculation = steady(by_prompt(prompts, replies_to(prompts, 60)), *widths, right=0.8)
    with guessing(speculation, cache_nbytes=None, max_rows=3) as harness:
        results = harness.between_steps(lambda: [harness.submit(p, 60) for p in prompts])
        for i in range(len(prompts)):
            harness.engine.force(RequestId(str(i)), 0, FORCED, at=20 + i)
        for i, (prompt, result) in enumerate(zip(prompts, results, strict=True)):
            said = result.wait().reply
            assert said[20 + i : 24 + i] == FORCED
            assert_same("qwen3", prompt, said[: 20 + i])
            assert_same("qwen3", [*prompt, *said[: 24 + i]], said[24 + i :])
    assert followers


def test_a_reply_that_is_stopped_meanwhile_is_stored_as_far_as_it_is_known() -> None:
    for n, prompt in zip((5, 8, 13), PROMPTS[:3], strict=True):
        speculation = steady(by_prompt([prompt], replies_to([prompt], 90)), right=0.9)

        def stop(harness: Harness, result: Result) -> None:
            harness.engine.stop_choice(request_of(harness), 0)

        with guessing(speculation, block=16) as harness:
            result = at_token(harness, prompt, 60, n, stop)
            said = [*prompt, *result.reply]
            assert n <= len(result.reply) < 60
            again = harness.ask([*said, 50, 51, 52], 8)
            assert len(said) - 1 <= again.n_cached <= len(said)
            assert_same("qwen3", [*said, 50, 51, 52], again.reply)


def test_cancelled_rows_leave_the_others_undisturbed(
    followers: list[PipelinedVerification],
) -> None:
    prompts = PROMPTS[:4]
    want = replies_to(prompts, 60)
    speculation = steady(by_prompt(prompts, want), right=0.8)
    with guessing(speculation) as harness:
        cancel_others(harness, prompts, want)
    assert followers


def test_a_shape_without_a_trace_waits_for_the_step_in_flight(
    followers: list[PipelinedVerification], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first steps of a shape are built, and those cannot be launched unread."""
    prompts = PROMPTS[:3]
    want = replies_to(prompts, 60)
    speculation = steady(by_prompt(prompts, want), *CHANGING, right=0.9)
    launch, n_refused = Pipeline.launch, []

    def watched(self: Pipeline, group: Group, drafts: Any) -> PipelinedVerification | None:
        step = launch(self, group, drafts)
        n_refused.extend([1] if step is None else [])
        return step

    monkeypatch.setattr(Pipeline, "launch", watched)
    built = running(
        plain("qwen3"),
        traced=lambda model, make_layers: TracedSteps(model, n_built=2),
        speculation=lambda: speculation,
        **TOGETHER,
    )
    with built as harness:
        results = together(harness, prompts, 60, GREEDY)
        for got, expected in zip(results, want, strict=True):
            assert_equal(got.wait(), expected)
    assert n_refused
    assert followers


@pytest.mark.parametrize("n_before", [1, 4])
def test_a_step_that_fails_takes_its_rows_back_to_their_tokens(
    n_before: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so does the step that was dispatched after it."""
    prompts = PROMPTS[:3]
    want = replies_to(prompts, 60)
    speculation = steady(by_prompt(prompts, want), right=0.8)
    n_read = []

    def failing(array: mx.array) -> list[int]:
        n_read.append(array)
        if len(n_read) == n_before:
            raise RuntimeError("the device failed")
        return to_host(array)

    monkeypatch.setattr(pipelined, "to_host", failing)
    with guessing(speculation, cache_nbytes=None, max_rows=3) as harness:
        got = [harness.submit(p, 60) for p in prompts]
        for g, w in zip(got, want, strict=True):
            assert_equal(g.wait(), w)
    assert len(n_read) >= n_before


@pytest.mark.parametrize("what", ["ids", "begins"])
def test_a_device_that_feeds_other_tokens_is_not_believed(
    what: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever went wrong, the rows are read again from their tokens."""
    prompts = PROMPTS[:3]
    want = replies_to(prompts, 60)
    next_feed, n = pipelined.next_feed, [0]

    def wrong(*args: Any) -> tuple[verify.DeviceFeed, mx.array]:
        fed, n_right = next_feed(*args)
        n[0] += 1
        if n[0] == 3:
            fed = dataclasses.replace(fed, **{what: mx.maximum(getattr(fed, what) - 1, 0)})
        return fed, n_right

    monkeypatch.setattr(pipelined, "next_feed", wrong)
    speculation = steady(by_prompt(prompts, want))
    with guessing(speculation, cache_nbytes=None, max_rows=3) as harness:
        for _ in range(2):
            got = [harness.submit(p, 60) for p in prompts]
            for g, w in zip(got, want, strict=True):
                assert_equal(g.wait(), w)
    assert 3 <= n[0] <= 4, "once is enough"
    assert caplog.text.count("from now on each step with drafts is read before") == 1
    assert caplog.text.count("a decode step failed") == 1
    assert "the device fed a row tokens that differ from its text and draft" in caplog.text


@pytest.mark.parametrize("when", ["it is made", "it is dispatched"])
def test_a_device_that_cannot_do_it_is_asked_once(
    when: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """No request fails because of it."""
    prompts = PROMPTS[:3]
    want = replies_to(prompts, 60)
    speculation = steady(by_prompt(prompts, want))
    n = []

    def failing(*_: Any) -> Any:
        n.append(1)
        raise RuntimeError("[Scan::eval_gpu] Not implemented.")

    if when == "it is made":
        monkeypatch.setattr(pipelined, "next_feed", failing)
    else:
        fake = types.SimpleNamespace(**{**vars(mx), "async_eval": failing})
        monkeypatch.setattr(pipelined, "mx", fake)
    with guessing(speculation, cache_nbytes=None, max_rows=3) as harness:
        for _ in range(2):
            got = [harness.submit(p, 60) for p in prompts]
            for g, w in zip(got, want, strict=True):
                assert_equal(g.wait(), w)
    assert len(n) == 1
    said = "from now on each step with drafts is read before the next is dispatched"
    assert caplog.text.count(said) == 1


def test_a_step_that_was_read_holds_none_of_those_before_it(
    followers: list[PipelinedVerification],
) -> None:
    prompt = PROMPTS[0]
    speculation = steady(by_prompt([prompt], replies_to([prompt], 60)))
    with guessing(speculation) as harness:
        harness.ask(prompt, 60)
    assert len(followers) > 5
    assert all(follower.follows is None for follower in followers[:-1])
