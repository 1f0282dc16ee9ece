"""Several tokens a step on real (tiny) models: the text is that of one token a step."""

from __future__ import annotations

import dataclasses
import json
import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from firn.backends import named
from firn.core.values import RequestId, Sampling
from firn.models.decode.raggedcheck import ragged_fault, rewind_fault
from firn.models.speculation.drafters.lookup import Lookup
from firn.models.speculation.step_times import StepShape, StepTimes
from tests.harness import GREEDY, Harness, Result, running
from tests.models.alone import TIE, beginning, plain, prompt_of, said_alone
from tests.models.decode.test_batching import CountedModel
from tests.models.grammar.grammar_lab import PROMPT, compiled, sampled, text_of, tokenizer
from tests.models.speculation.drafting import AnyWidth, KnownReplies
from tests.zoo import VOCAB_SIZE, build

KINDS = {
    "qwen3": "KVCache",
    "gemma3_text": "RotatingKVCache and KVCache",
    "qwen3_next": "ArraysCache and KVCache",
    "mamba2": "ArraysCache",
    "falcon_h1": "CacheList of ArraysCache and KVCache",
    "deepseek_v3": "MLA",
    "deepseek_v32": "CacheList of two KVCaches",
    "llama4": "ChunkedKVCache: no batched form",
}
every_kind = pytest.mark.parametrize("name", KINDS)
MASK_BY_HAND = ("deepseek_v3", "deepseek_v32")
"""Their attention accepts boolean masks only."""
RIGHT = {"always": 1.0, "never": 0.0, "often": 0.7}
SAMPLINGS = {
    "greedy": GREEDY,
    "seeded": Sampling(temperature=1.0, seed=7, top_p=0.95, top_k=40),
    "penalised": Sampling(
        temperature=0.8,
        seed=3,
        repetition_penalty=1.2,
        presence_penalty=0.5,
        frequency_penalty=0.7,
        logit_bias=((20, 2.0), (30, -5.0)),
    ),
}
Story = list[tuple[list[int], int, int, Sampling]]
"""Requests: prompt, tokens of the reply, choices, sampling."""


def story(
    seed: int, *, samplings: Sequence[Sampling], n_requests: int = 8, longest: int = 40
) -> Story:
    rng = random.Random(seed)
    requests: Story = []
    for i in range(n_requests):
        prompt = prompt_of(rng, rng.choice([3, 20, 31, 33, 64, 100]))
        n = 2 if i % 4 == 3 else 1
        requests.append((prompt, rng.randint(5, longest), n, samplings[i % len(samplings)]))
    return requests


def tell(harness: Harness, requests: Story) -> list[Result]:
    """All together: more than there are rows, so they join and leave at every step."""
    results = [harness.submit(p, n, n=c, sampling=s) for p, n, c, s in requests]
    return [result.wait() for result in results]


def known(requests: Story, results: Sequence[Result]) -> dict[Any, list[int]]:
    return {
        (tuple(prompt), choice): reply
        for (prompt, *_), result in zip(requests, results, strict=True)
        for choice, reply in result.tokens.items()
    }


def assert_equal(got: Result, want: Result) -> int:
    """Assert equality token by token, up to a tie; return how many could be compared."""
    n = 0
    assert got.error is None
    assert want.error is None
    assert set(got.tokens) == set(want.tokens)
    for choice, reply in want.tokens.items():
        said = got.tokens[choice]
        for i, token in enumerate(reply):
            if i >= len(said) or said[i] != token:
                margin = want.margins[choice][i]
                assert margin < TIE, f"token {i} of {len(reply)}: {said[i : i + 3]}, not {token}"
                break
            assert got.logprobs[choice][i] == pytest.approx(want.logprobs[choice][i], abs=1e-3)
            n += 1
        else:
            assert len(said) == len(reply)
            assert got.reasons[choice] == want.reasons[choice]
    return n


ONE_BY_ONE: dict[str, Any] = {"chunk": 32, "cache_nbytes": None, "max_rows": 4}


@cache
def one_by_one(name: str) -> tuple[Story, list[Result]]:
    requests = story(3, samplings=list(SAMPLINGS.values()), n_requests=5, longest=24)
    with running(plain(name), **ONE_BY_ONE) as harness:
        return requests, tell(harness, requests)


@pytest.mark.parametrize("right", RIGHT)
@every_kind
def test_text_is_that_of_one_token_a_step(name: str, right: str) -> None:
    requests, want = one_by_one(name)
    drafter = KnownReplies(known(requests, want), right=RIGHT[right], vocab_size=VOCAB_SIZE)
    speculation = AnyWidth(drafter)
    with running(plain(name), speculation=lambda: speculation, **ONE_BY_ONE) as harness:
        got = tell(harness, requests)
    n_said = sum(len(reply) for result in want for reply in result.tokens.values())
    n_compared = sum(assert_equal(g, w) for g, w in zip(got, want, strict=True))
    assert n_compared > 0.8 * n_said, "too many ties to tell"
    totals = speculation.totals
    assert totals.n_drafted > 60
    if right == "always" and n_compared == n_said:
        assert totals.n_accepted == totals.n_drafted
    if right == "never":
        assert totals.n_accepted == 0


@every_kind
def test_steps_of_few_shapes_say_the_same(name: str) -> None:
    """As on CUDA: widths and columns are padded, where the layers can take the padding back."""
    requests, want = one_by_one(name)
    model = build(name)
    own = named("cuda").step_profile(model, lambda: list(make_prompt_cache(model)))
    assert own.columns.has_bias == (name not in MASK_BY_HAND)
    columns = dataclasses.replace(own.columns, block=64)
    profile = dataclasses.replace(own, shapes=(4, 9), columns=columns, layers_per_dispatch=2)
    drafter = KnownReplies(known(requests, want), right=0.7, vocab_size=VOCAB_SIZE)
    speculation = AnyWidth(drafter, profile=profile)
    with running(plain(name), speculation=lambda: speculation, **ONE_BY_ONE) as harness:
        got = tell(harness, requests)
    n_said = sum(len(reply) for result in want for reply in result.tokens.values())
    assert sum(assert_equal(g, w) for g, w in zip(got, want, strict=True)) > 0.8 * n_said
    assert speculation.totals.n_accepted > 50


def test_seats_that_stayed_vacant_are_removed_between_steps_with_drafts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Drafts are made for the seats that exist when the step begins."""
    rng = random.Random(8)
    requests: Story = [(prompt_of(rng, 20), n, 1, GREEDY) for n in (4, 36, 36)]
    with running(plain("qwen3"), **ONE_BY_ONE) as harness:
        want = tell(harness, requests)
    drafter = KnownReplies(known(requests, want), right=0.0, vocab_size=VOCAB_SIZE)
    with (
        caplog.at_level("WARNING", "firn"),
        running(plain("qwen3"), speculation=lambda: AnyWidth(drafter), **ONE_BY_ONE) as harness,
    ):
        got = tell(harness, requests)
    assert sum(assert_equal(g, w) for g, w in zip(got, want, strict=True)) > 60
    assert not caplog.records, "a failed step is computed again, which hides it"


# --- with the prefix cache -----------------------------------------------------------------


@every_kind
def test_what_is_stored_is_what_was_accepted(name: str) -> None:
    """A second turn resumes after the first reply, which was written with wrong drafts in between."""
    requests = story(2, samplings=[GREEDY], n_requests=3)
    requests = [(p, 20 + 6 * i, 1, GREEDY) for i, (p, *_) in enumerate(requests)]  # over a block
    options: dict[str, Any] = {"chunk": 32, "block": 16, "max_rows": 3}
    with running(plain(name), cache_nbytes=None, **options) as harness:
        first = tell(harness, requests)
        turns = [
            ([*p, *r.reply, 50, 51, 52], 8, 1, GREEDY)
            for (p, *_), r in zip(requests, first, strict=True)
        ]
        want = tell(harness, turns)
    drafter = KnownReplies(known(requests, first), right=0.6, vocab_size=VOCAB_SIZE)
    with running(plain(name), speculation=lambda: AnyWidth(drafter), **options) as harness:
        again = tell(harness, requests)
        got = tell(harness, turns)
    for a, b in zip(again, first, strict=True):
        assert_equal(a, b)
    n_compared = sum(assert_equal(g, w) for g, w in zip(got, want, strict=True))
    assert n_compared > 0.6 * 8 * len(turns)
    same = [
        (r, t) for r, t, a, b in zip(got, turns, again, first, strict=True) if a.reply == b.reply
    ]
    assert same
    for result, (prompt, *_) in same:
        assert result.n_cached > len(prompt) - 3 - 16, "nearly all of the reply"


@cache
def said_together(name: str) -> tuple[list[list[int]], list[Result]]:
    rng = random.Random(8)
    prompts = [prompt_of(rng, rng.choice([20, 33, 47])) for _ in range(12)]
    with running(plain(name), cache_nbytes=None) as harness:
        return prompts, tell(harness, [(p, 24, 1, GREEDY) for p in prompts])


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text", "qwen3_next"])
@pytest.mark.parametrize("n_together", [1, 3])
def test_a_reply_is_stored_to_its_end_whatever_was_drafted_after_it(
    name: str, n_together: int
) -> None:
    """Its end token may be read early enough for drafts to follow it; none may."""
    prompts, whole = said_together(name)
    options: dict[str, Any] = {"chunk": 32, "block": 32, "max_rows": n_together}
    drafter = KnownReplies(
        {(tuple(p), 0): r.reply for p, r in zip(prompts, whole, strict=True)},
        right=1.0,
        vocab_size=VOCAB_SIZE,
    )
    with running(plain(name), speculation=lambda: AnyWidth(drafter), **options) as harness:
        asked = [
            harness.submit(p, 24, eos=frozenset(r.reply[9:14]))
            for p, r in zip(prompts, whole, strict=True)
        ]
        for prompt, result in zip(prompts, asked, strict=True):
            said = [*prompt, *result.wait().reply]
            again = harness.ask([*said, 50, 51, 52], 1)
            assert len(said) - 1 <= again.n_cached <= len(said)


# --- features ------------------------------------------------------------------------------


FORCED = [20, 21, 22, 23]


def tell_forced(harness: Harness, prompts: Sequence[list[int]]) -> list[Result]:
    def submit() -> list[Result]:
        results = [harness.submit(p, 30) for p in prompts]
        for i in range(len(prompts)):
            harness.engine.force(RequestId(str(i)), 0, FORCED, at=9 + i)
        return results

    return [r.wait() for r in harness.between_steps(submit)]


@cache
def forced_plainly(name: str) -> tuple[list[list[int]], list[Result]]:
    rng = random.Random(5)
    prompts = [prompt_of(rng, n) for n in (20, 50, 40)]
    with running(plain(name), chunk=64, cache_nbytes=None) as harness:
        return prompts, tell_forced(harness, prompts)


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text", "qwen3_next"])
@pytest.mark.parametrize("right", [1.0, 0.5])
def test_forced_tokens_are_drafts_that_are_right(name: str, right: float) -> None:
    prompts, want = forced_plainly(name)
    replies = {(tuple(p), 0): r.reply for p, r in zip(prompts, want, strict=True)}
    drafter = KnownReplies(replies, right=right, vocab_size=VOCAB_SIZE)
    speculation = AnyWidth(drafter, least=4)
    with running(plain(name), chunk=64, cache_nbytes=None, speculation=lambda: speculation) as h:
        got = tell_forced(h, prompts)
    assert sum(assert_equal(g, w) for g, w in zip(got, want, strict=True)) > 60
    for i, result in enumerate(got):
        assert result.reply[9 + i : 13 + i] == FORCED
    assert speculation.totals.n_accepted > 12


@pytest.mark.parametrize("right", [1.0, 0.0, 0.6])
def test_a_reply_ends_at_its_end_token_whatever_was_drafted_after_it(right: float) -> None:
    rng = random.Random(6)
    prompts = [prompt_of(rng, 20) for _ in range(4)]
    free = said_alone("qwen3", prompts, 40)
    replies = {(tuple(p), 0): r.reply for p, r in zip(prompts, free, strict=True)}
    eos = frozenset(r.reply[17] for r in free)
    ends = [next(i for i, t in enumerate(r.reply) if t in eos) for r in free]
    want = [beginning(r, end + 1, "stop") for r, end in zip(free, ends, strict=True)]
    speculation = AnyWidth(KnownReplies(replies, right=right, vocab_size=VOCAB_SIZE), least=8)
    with running(plain("qwen3"), cache_nbytes=None, speculation=lambda: speculation) as harness:
        got = [harness.submit(p, 40, eos=eos) for p in prompts]
        for g, w in zip(got, want, strict=True):
            assert_equal(g.wait(), w)


@pytest.mark.parametrize("name", ["qwen3", "qwen3_next"])
def test_grammars_hold_and_what_they_force_is_drafted(name: str) -> None:
    schema = json.dumps(
        {
            "type": "object",
            "properties": {
                "temperature": {"type": "integer", "minimum": 0, "maximum": 99},
                "description": {"type": "string", "maxLength": 12},
            },
            "required": ["temperature", "description"],
            "additionalProperties": False,
        }
    )
    grammar = compiled("json_schema", schema)
    samplings = [sampled(seed) for seed in range(4)]

    def tell_held(harness: Harness) -> list[Result]:
        results = [
            harness.submit(PROMPT, 80, sampling=s, grammar=g, eos=tokenizer().eos)
            for s in samplings
            for g in (grammar, None)
        ]
        return [r.wait() for r in results]

    with running(plain(name), cache_nbytes=None, max_rows=5) as harness:
        want = tell_held(harness)
    speculation = AnyWidth(Lookup())
    with running(
        plain(name), cache_nbytes=None, max_rows=5, speculation=lambda: speculation
    ) as harness:
        got = tell_held(harness)
    for i, (g, w) in enumerate(zip(got, want, strict=True)):
        assert_equal(g, w)
        if i % 2 == 0 and g.reasons[0] == "stop":
            assert set(json.loads(text_of(g.reply))) == {"temperature", "description"}
    assert speculation.totals.n_accepted > 20, "the names of its keys, at least"


def test_a_failed_verification_takes_its_rows_back_to_their_tokens() -> None:
    """The rows are read again, each alone; the reply is what it would have been."""
    rng = random.Random(9)
    prompts = [prompt_of(rng, n) for n in (20, 35, 50)]
    want = said_alone("qwen3", prompts, 30)
    replies = {(tuple(p), 0): r.reply for p, r in zip(prompts, want, strict=True)}
    failures = iter([True])
    model = CountedModel(
        "qwen3", fail_at=lambda rows, n: rows > 1 and n > 1 and next(failures, False)
    )
    speculation = AnyWidth(KnownReplies(replies, right=0.8, vocab_size=VOCAB_SIZE), least=3)
    with running(model.built, cache_nbytes=None, speculation=lambda: speculation) as harness:
        got = [harness.submit(p, 30) for p in prompts]
        for g, w in zip(got, want, strict=True):
            assert_equal(g.wait(), w)
    assert next(failures, None) is None, "a step failed"


def cancel_others(harness: Harness, prompts: list[list[int]], want: Sequence[Result]) -> None:
    """Ask these prompts along with others that are cancelled; the replies must stay the same."""
    rng = random.Random(11)
    for round_ in range(3):
        got = [harness.submit(p, len(w.reply)) for p, w in zip(prompts, want, strict=True)]
        gone = [harness.submit(prompt_of(rng, 30), 100_000) for _ in range(2)]
        got[round_].wait()
        for result in gone:
            harness.engine.cancel(next(i for i, r in harness.results.items() if r is result))
        for g, w in zip(got, want, strict=True):
            assert_equal(g.wait(), w)


def test_cancelled_rows_leave_the_others_undisturbed() -> None:
    rng = random.Random(10)
    prompts = [prompt_of(rng, n) for n in (20, 35, 50, 28)]
    want = said_alone("gemma3_text", prompts, 40)
    replies = {(tuple(p), 0): r.reply for p, r in zip(prompts, want, strict=True)}
    speculation = AnyWidth(KnownReplies(replies, right=0.8, vocab_size=VOCAB_SIZE))
    with running(plain("gemma3_text"), speculation=lambda: speculation) as harness:
        cancel_others(harness, prompts, want)


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text", "qwen3_next", "llama4"])
def test_a_prediction_is_used_from_an_empty_cache_on(name: str) -> None:
    """The caches are still empty when the first draft is made."""
    with running(plain(name), cache_nbytes=None) as harness:
        want = harness.ask([20], 40)
    speculation = AnyWidth(Lookup(), least=5)
    with running(plain(name), cache_nbytes=None, speculation=lambda: speculation) as harness:
        assert_equal(harness.ask([20], 40, prediction=want.reply), want)
    assert speculation.totals.n_accepted > 20


@pytest.mark.parametrize("lacking", [VOCAB_SIZE, -1])
def test_a_token_that_the_model_lacks_is_never_tried(lacking: int) -> None:
    """Tokenizers have ids past the end of the embedding table; some placeholders are negative."""
    sampling = Sampling(temperature=0.0, presence_penalty=0.1)
    (want,) = said_alone("qwen3", [[20]], 40, sampling)
    fed: set[int] = set()

    def watched() -> Any:
        model, make_layers = plain("qwen3")()

        def run(ids: mx.array, cache: list[Any]) -> mx.array:
            fed.update(ids.flatten().tolist())  # type: ignore[arg-type]
            out: mx.array = model(ids, cache=cache)
            return out

        return run, make_layers

    speculation = AnyWidth(Lookup(), least=5)
    prediction = [*want.reply[:20], lacking, *want.reply[20:]]
    with running(watched, cache_nbytes=None, speculation=lambda: speculation) as harness:
        assert_equal(harness.ask([20], 40, prediction=prediction, sampling=sampling), want)
    assert fed <= set(range(VOCAB_SIZE))
    assert speculation.totals.n_accepted > 12


def test_nothing_is_drafted_beyond_the_end_of_a_reply() -> None:
    prompt = prompt_of(random.Random(14), 30)
    (want,) = said_alone("qwen3", [prompt], 32)
    drafter = KnownReplies({(tuple(prompt), 0): want.reply}, right=1.0, vocab_size=VOCAB_SIZE)
    speculation = AnyWidth(drafter, least=8)
    with running(plain("qwen3"), cache_nbytes=None, speculation=lambda: speculation) as harness:
        assert harness.ask(prompt, 20).reply == want.reply[:20]
    assert speculation.totals.n_taken == 20


def test_a_request_without_speculation_runs_beside_others_with_it() -> None:
    rng = random.Random(12)
    prompts = [prompt_of(rng, 30) for _ in range(4)]
    with running(plain("qwen3"), cache_nbytes=None) as harness:
        want = [harness.submit(p, 40) for p in prompts]
        replies = {(tuple(p), 0): r.wait().reply for p, r in zip(prompts, want, strict=True)}
    speculation = AnyWidth(KnownReplies(replies, right=1.0, vocab_size=VOCAB_SIZE))
    with running(plain("qwen3"), cache_nbytes=None, speculation=lambda: speculation) as harness:
        got = [harness.submit(p, 40, speculates=i % 2 == 0) for i, p in enumerate(prompts)]
        for g, w in zip(got, want, strict=True):
            assert_equal(g.wait(), w)
    assert 0 < speculation.totals.n_accepted <= 80, "two of four"


@pytest.mark.parametrize("name", ["mamba", "jamba"])
def test_models_that_ignore_lengths_draft_alone(name: str) -> None:
    model = build(name)
    assert ragged_fault(model, lambda: list(make_prompt_cache(model))) is not None
    requests = story(13, samplings=[GREEDY], n_requests=4)
    with running(plain(name), cache_nbytes=None, max_rows=3) as harness:
        want = tell(harness, requests)
    drafter = KnownReplies(known(requests, want), right=0.8, vocab_size=VOCAB_SIZE)

    def speculation() -> AnyWidth:
        any_width = AnyWidth(drafter)
        any_width.in_groups = False
        return any_width

    with running(plain(name), cache_nbytes=None, max_rows=3, speculation=speculation) as harness:
        for g, w in zip(tell(harness, requests), want, strict=True):
            assert_equal(g, w)
        totals = harness.runner.speculator.totals  # type: ignore[union-attr]
        assert totals.n_accepted > 0


@pytest.mark.parametrize("name", [*KINDS, "gemma3n"])
def test_a_step_of_unequal_rows_is_tried_at_load(name: str) -> None:
    """gemma3n: its last layers use the keys and values of an earlier one."""
    model = build(name)
    assert rewind_fault(model, lambda: list(make_prompt_cache(model))) is None
    if name != "llama4":  # whose rows never share a step
        assert ragged_fault(model, lambda: list(make_prompt_cache(model))) is None


def test_a_model_whose_steps_leave_traces_drafts_nothing() -> None:
    model = build("phi3small")  # its blocks look ahead
    why = rewind_fault(model, lambda: list(make_prompt_cache(model)))
    assert why is not None
    assert "cannot be undone exactly" in why


@pytest.mark.parametrize(("name", "is_padded"), [("qwen3", True), ("qwen3_next", False)])
def test_a_width_is_priced_as_it_is_computed(name: str, is_padded: bool) -> None:
    """Steps of a hybrid model are not padded: the time of a step of two tokens counts for two."""
    model = build(name)
    profile = named("cuda").step_profile(model, lambda: list(make_prompt_cache(model)))
    times = StepTimes(profile)
    for _ in range(3):
        times.observe_plain(1, 1.0)
    width = 4 if is_padded else 2
    for _ in range(3):
        times.observe_wide(1, StepShape(width), 1.5)
    assert times.is_measured(1, 2)
    assert times.price(1, 2) == 1.5
