"""Every row of a batch picks by its own settings, against a plain NumPy reference."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from firn.core.errors import InvalidValue
from firn.core.events import TokenLogprob
from firn.core.values import Sampling
from firn.models.decode import sampling
from firn.models.decode.sampling import Picker, pick, read_logprobs
from tests.harness import running
from tests.models.alone import Built, plain, prompt_of, with_caches
from tests.zoo import build

VOCAB = 48
FlatArray = Any


def picker_of(
    sampling: Sampling,
    *,
    choice: int = 0,
    prompt: Sequence[int] = (),
    top_logprobs: int | None = None,
    vocab_size: int = VOCAB,
) -> Picker:
    return Picker(
        sampling,
        choice=choice,
        vocab_size=vocab_size,
        prompt=np.array(prompt, dtype=np.int64),
        top_logprobs=top_logprobs,
    )


def logits_of(seed: int, rows: int = 1, *, spread: float = 2.0) -> FlatArray:
    return np.random.default_rng(seed).normal(0, spread, (rows, VOCAB)).astype(np.float32)


def picked(logits: FlatArray, pickers: Sequence[Picker]) -> list[int]:
    tokens: list[int] = pick(mx.array(logits), pickers).tokens.tolist()
    return tokens


def softmax(logits: FlatArray) -> FlatArray:
    e = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


# --- which tokens may come -----------------------------------------------------------------


def support(logits: FlatArray, s: Sampling) -> set[int]:
    """The tokens that top-k, top-p and min-p leave."""
    order = np.argsort(-logits)
    probs = softmax(logits)[order]
    before = np.cumsum(probs) - probs
    keep = np.ones(len(order), dtype=bool)
    if s.top_k:
        keep[s.top_k :] = False
    if s.top_p < 1.0:
        keep &= before < s.top_p
    if s.min_p:
        keep &= probs >= s.min_p * probs[0]
    keep[0] = True
    return {int(t) for t in order[keep]}


def drawn(logits: FlatArray, s: Sampling, n: int = 1024) -> set[int]:
    """Tokens of many draws, at a high temperature so that each token of the support occurs."""
    hot = replace(s, temperature=50.0)
    pickers = [picker_of(replace(hot, seed=i)) for i in range(n)]
    return set(picked(np.repeat(logits[None], n, axis=0), pickers))


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(top_k=1),
        Sampling(top_k=7),
        Sampling(top_k=VOCAB + 5),
        Sampling(top_p=0.0),
        Sampling(top_p=0.5),
        Sampling(top_p=0.95),
        Sampling(min_p=0.1),
        Sampling(min_p=1.0),
        Sampling(top_k=9, top_p=0.8),
        Sampling(top_k=12, top_p=0.9, min_p=0.05),
    ],
    ids=str,
)
def test_exactly_the_support_comes(sampling: Sampling) -> None:
    logits = logits_of(1)[0]
    assert drawn(logits, sampling) == support(logits, sampling)


def test_a_mass_of_exactly_top_p_is_enough() -> None:
    logits = np.full(VOCAB, -np.inf, dtype=np.float32)
    logits[:3] = math.log(2), 0.0, 0.0
    half = mx.softmax(mx.array(logits)).max().item()
    assert half == pytest.approx(0.5)
    assert drawn(logits, Sampling(top_p=half)) == {0}


@given(
    seed=st.integers(0, 1 << 20),
    top_k=st.integers(0, VOCAB),
    top_p=st.floats(0.05, 1.0),
    min_p=st.floats(0.0, 0.5),
)
@settings(max_examples=25, deadline=None)
def test_any_settings_leave_their_support(
    seed: int, top_k: int, top_p: float, min_p: float
) -> None:
    s = Sampling(top_k=top_k, top_p=top_p, min_p=min_p)
    logits = logits_of(seed)[0]
    down = np.sort(softmax(logits))[::-1]
    mass = np.cumsum(down)
    assume(np.abs(mass - top_p).min() > 1e-4)  # nothing within rounding of a border
    assume(np.abs(down - min_p * down[0]).min() > 1e-5)
    assert drawn(logits, s, 512) <= support(logits, s)
    assert len(drawn(logits, s, 512)) >= min(len(support(logits, s)), 20)


@given(
    seed=st.integers(0, 1 << 20),
    vocab=st.integers(2, 3000),
    n=st.integers(1, 64),
    n_values=st.integers(1, 1 << 16),
)
@settings(max_examples=50, deadline=None)
def test_the_likeliest_are_those_of_the_whole_vocabulary(
    seed: int, vocab: int, n: int, n_values: int
) -> None:
    """Many of them may be equal, and a grammar may forbid most."""
    rng, n = np.random.default_rng(seed), min(n, vocab)
    logits = rng.integers(0, n_values, (3, vocab)).astype(np.float32)
    logits[1, rng.random(vocab) < 0.9] = -np.inf
    found = np.array(sampling._likeliest(mx.array(logits), n))
    assert (found == -np.sort(-logits, axis=-1)[:, :n]).all()


def test_the_vocabulary_is_sorted_only_for_top_p_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    vocab, n_sorted = 32_000, list[int]()
    sort, argsort = mx.sort, mx.argsort

    def noting(function: Any) -> Any:
        def call(array: mx.array, **options: Any) -> mx.array:
            n_sorted.append(array.shape[-1])
            sorted_: mx.array = function(array, **options)
            return sorted_

        return call

    monkeypatch.setattr(mx, "sort", noting(sort))
    monkeypatch.setattr(mx, "argsort", noting(argsort))
    logits = mx.random.normal((3, vocab), key=mx.random.key(1))
    both = Sampling(temperature=0.7, top_p=0.9, top_k=20, seed=1)
    for rows in (
        (both, Sampling(temperature=1.0, seed=2), Sampling(temperature=0.0)),
        (both, Sampling(temperature=1.0, top_k=64, min_p=0.1, seed=2)),
    ):
        pick(logits[: len(rows)], [picker_of(s, vocab_size=vocab) for s in rows])
        assert sum(n_sorted) < vocab // 8
        n_sorted.clear()
    pick(logits[:1], [picker_of(Sampling(temperature=0.7, top_p=0.9), vocab_size=vocab)])
    assert n_sorted == [vocab]


def test_a_row_draws_alike_where_others_need_the_whole_order() -> None:
    """Its own limits decide, to the last bit, whatever is sorted for its group."""
    vocab, n_steps = 4000, 200
    own = Sampling(temperature=0.9, top_p=0.8, top_k=40, seed=3)
    other = Sampling(temperature=0.9, top_p=0.8, seed=4)
    alone, *group = [picker_of(s, vocab_size=vocab) for s in (own, own, other)]
    for i in range(n_steps):
        logits = 3.0 * mx.random.normal((2, vocab), key=mx.random.key(i))
        (token,) = pick(logits[:1], [alone]).tokens.tolist()
        assert pick(logits, group).tokens.tolist()[0] == token


def test_settings_are_each_rows_own() -> None:
    """In one batch: every row keeps to its own support, greedy rows to the best token."""
    rows = [
        Sampling(temperature=0.0),
        Sampling(temperature=50.0, top_k=3),
        Sampling(temperature=50.0, top_p=0.4),
        Sampling(temperature=50.0, min_p=0.3),
        Sampling(temperature=50.0),
    ]
    logits = logits_of(2, len(rows))
    seen: list[set[int]] = [set() for _ in rows]
    pickers = [picker_of(replace(s, seed=i)) for i, s in enumerate(rows)]
    for _ in range(300):
        for tokens, token in zip(seen, picked(logits, pickers), strict=True):
            tokens.add(token)
    assert seen[0] == {int(logits[0].argmax())}
    for row, s, tokens in zip(logits[1:], rows[1:], seen[1:], strict=True):
        assert tokens == support(row, s)


@pytest.mark.parametrize("temperature", [1e-4, 1e-6, 1e-30, 1e-40, 5e-324])
def test_a_vanishing_temperature_is_greedy(temperature: float) -> None:
    logits = logits_of(3, 64)
    pickers = [picker_of(Sampling(temperature=temperature, seed=i)) for i in range(64)]
    assert picked(logits, pickers) == logits.argmax(axis=-1).tolist()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_distribution(temperature: float) -> None:
    """Fixed seeds and wide bounds: a wrong temperature or biased noise is far outside."""
    n = 1 << 14
    logits = np.array([2.0, 1.0, 0.5, 0.0, -0.5, -1.0, -2.0, -3.0], dtype=np.float32)
    pickers = [picker_of(Sampling(temperature=temperature, seed=i), vocab_size=8) for i in range(n)]
    tokens = picked(np.repeat(logits[None], n, axis=0), pickers)
    share = np.bincount(tokens, minlength=8) / n
    assert np.abs(share - softmax(logits / temperature)).max() < 0.02


# --- seeds ---------------------------------------------------------------------------------


def draws(pickers: Sequence[Picker], n: int, *, seed: int = 4) -> list[list[int]]:
    """n tokens of each row; a row's logits do not depend on the others'."""
    steps = [logits_of(seed + i)[0] for i in range(n)]
    by_step = [picked(np.repeat(step[None], len(pickers), axis=0), pickers) for step in steps]
    return [list(row) for row in zip(*by_step, strict=True)]


def test_a_seed_gives_the_same_tokens_alone_and_in_any_company() -> None:
    seeded = Sampling(seed=123)
    (alone,) = draws([picker_of(seeded)], 40)
    others = [picker_of(Sampling(seed=i, top_k=i, temperature=i / 4)) for i in range(15)]
    for place in (0, 7, 15):
        batch = [*others[:place], picker_of(seeded), *others[place:]]
        assert draws(batch, 40)[place] == alone
    assert draws([picker_of(seeded)], 40)[0] == alone


def test_seeds_and_choices_differ() -> None:
    pickers = [picker_of(Sampling(seed=s), choice=c) for s in (0, 1, 2, -1) for c in range(3)]
    replies = draws(pickers, 30)
    assert len({tuple(row) for row in replies}) == len(pickers)


def test_without_a_seed_no_two_requests_agree() -> None:
    replies = draws([picker_of(Sampling()) for _ in range(8)], 30)
    assert len({tuple(row) for row in replies}) == 8


def test_a_replayed_picker_goes_on_where_the_first_one_was() -> None:
    """As after a failed step: draws, counts and history as if nothing had happened."""
    s = Sampling(seed=9, repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.7)
    prompt = [1, 2, 3]
    (whole,) = draws([picker_of(s, prompt=prompt)], 20)
    again = picker_of(s, prompt=prompt)
    again.replay(whole[:12])
    assert draws([again], 8, seed=4 + 12)[0] == whole[12:]


@pytest.mark.parametrize("name", ["qwen3", "qwen3_next"])
def test_seeds_reproduce_through_the_engine(name: str) -> None:
    """Alone, and in a batch with others that have settings of their own."""
    rng = random.Random(5)
    prompt = prompt_of(rng, 25)
    seeded = Sampling(temperature=1.0, seed=42, top_p=0.9)
    with running(plain(name), cache_nbytes=None) as h:
        alone = h.ask(prompt, 24, sampling=seeded).reply
        others = [
            h.submit(prompt_of(rng, 5 + i), 10 + i, sampling=Sampling(seed=i, top_k=i))
            for i in range(8)
        ]
        beside = h.submit(prompt, 24, sampling=seeded)
        more = [h.submit(prompt_of(rng, 5 + i), 30, sampling=Sampling(seed=i)) for i in range(7)]
        other_seed = h.submit(prompt, 24, sampling=replace(seeded, seed=43))
        assert beside.wait().reply == alone
        assert other_seed.wait().reply != alone
        for result in others + more:
            assert result.wait().error is None
        choices = h.ask(prompt, 24, sampling=seeded, n=3).tokens
        assert choices[0] == alone
        assert len({tuple(t) for t in choices.values()}) == 3
        assert h.ask(prompt, 24, sampling=seeded, n=3).tokens == choices


# --- penalties and bias --------------------------------------------------------------------


class Reference:
    """Bias and penalties, spelled out."""

    def __init__(self, s: Sampling, prompt: Sequence[int]) -> None:
        self.s = s
        self.seen = set(prompt)
        self.counts = np.zeros(VOCAB)

    def shape(self, logits: FlatArray) -> FlatArray:
        out = logits.astype(np.float64)
        for t in self.seen:
            factor = self.s.repetition_penalty
            out[t] = out[t] * factor if out[t] < 0 else out[t] / factor
        out -= self.s.presence_penalty * (self.counts > 0)
        out -= self.s.frequency_penalty * self.counts
        for t, bias in self.s.logit_bias:
            out[t] += bias
        return out

    def remember(self, token: int) -> None:
        self.seen.add(token)
        self.counts[token] += 1


PENALISED = [
    Sampling(temperature=0.0, repetition_penalty=1.3),
    Sampling(temperature=0.0, repetition_penalty=0.7),
    Sampling(temperature=0.0, presence_penalty=1.5),
    Sampling(temperature=0.0, presence_penalty=-2.0),
    Sampling(temperature=0.0, frequency_penalty=0.4),
    Sampling(temperature=0.0, frequency_penalty=-0.4),
    Sampling(temperature=0.0, logit_bias=((3, 2.5), (7, -4.0))),
    Sampling(
        temperature=0.0, repetition_penalty=1.2, presence_penalty=0.3, frequency_penalty=0.2,
        logit_bias=((0, 1.0), (VOCAB - 1, 1.0)),
    ),
]  # fmt: skip


@pytest.mark.parametrize("sampling", PENALISED, ids=str)
def test_penalties_are_those_of_the_reference(sampling: Sampling) -> None:
    prompt = [2, 2, 5, 11, VOCAB - 1]
    picker, reference = picker_of(sampling, prompt=prompt), Reference(sampling, prompt)
    for i in range(30):
        logits = logits_of(100 + i, spread=0.7)
        want = reference.shape(logits[0])
        assert np.allclose(np.array(picker.reshape(mx.array(logits)))[0], want, atol=1e-5)
        (token,) = picked(logits, [picker])
        assert token == int(want.argmax())
        reference.remember(token)


def test_a_prompt_counts_for_repetition_only() -> None:
    """OpenAI's penalties are about the reply; repetition_penalty is about all of the text."""
    logits = logits_of(6)
    best = int(logits[0].argmax())
    for s in (Sampling(presence_penalty=9.0), Sampling(frequency_penalty=9.0)):
        greedy = replace(s, temperature=0.0)
        assert picked(logits, [picker_of(greedy, prompt=[best])]) == [best]
    penalised = Sampling(temperature=0.0, repetition_penalty=100.0)
    assert picked(logits, [picker_of(penalised, prompt=[best])]) != [best]


def test_prompt_tokens_outside_the_logits_are_nothing_to_penalise() -> None:
    """A prompt may have ids beyond them, such as a picture's; the rest of it counts as usual."""
    logits = logits_of(7)
    best = int(logits[0].argmax())
    s = Sampling(temperature=0.0, repetition_penalty=100.0)
    strange = picker_of(s, prompt=[best, VOCAB, VOCAB + 100])
    assert picked(logits, [strange]) == picked(logits, [picker_of(s, prompt=[best])]) != [best]
    negative = picker_of(s, prompt=[best - VOCAB])
    assert picked(logits, [negative]) == [best], "not counted from the end"


def test_bias_forces_and_forbids() -> None:
    logits = logits_of(8, 200, spread=1.0)
    forced = [picker_of(Sampling(seed=i, logit_bias=((13, 100.0),))) for i in range(200)]
    assert set(picked(logits, forced)) == {13}
    banned = tuple((t, -100.0) for t in range(VOCAB) if t not in (4, 9))
    left = [picker_of(Sampling(seed=i, logit_bias=banned)) for i in range(200)]
    assert set(picked(logits, left)) == {4, 9}


@pytest.mark.parametrize("token", [-1, VOCAB, 1 << 40])
def test_a_bias_on_no_token_is_an_invalid_value(token: int) -> None:
    with pytest.raises(InvalidValue) as caught:
        picker_of(Sampling(logit_bias=((1, 1.0), (token, 1.0))))
    assert caught.value.param == "logit_bias"


# --- logprobs ------------------------------------------------------------------------------


def log_softmax(logits: FlatArray) -> FlatArray:
    return np.log(softmax(logits))


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.0),
        Sampling(seed=1, temperature=2.0, top_k=5),
        Sampling(seed=1, repetition_penalty=1.5, frequency_penalty=1.0, logit_bias=((4, 3.0),)),
    ],
    ids=["greedy", "sampled", "reshaped"],
)
def test_logprobs_are_of_the_raw_logits(sampling: Sampling) -> None:
    """Bias, penalties and temperature do not affect them."""
    picker = picker_of(sampling, prompt=[1, 2], top_logprobs=20)
    for i in range(10):
        logits = logits_of(200 + i)
        picks = pick(mx.array(logits), [picker])
        (logprob,) = read_logprobs(picks, [picker])
        assert logprob is not None
        want = log_softmax(logits[0])
        assert logprob.token == picks.tokens.tolist()[0]
        assert logprob.logprob == pytest.approx(want[logprob.token], abs=1e-4)
        order = np.argsort(-want)[:20]
        assert [t for t, _ in logprob.top] == order.tolist()
        assert [p for _, p in logprob.top] == pytest.approx(want[order].tolist(), abs=1e-4)


def test_each_row_gets_the_logprobs_it_asked_for() -> None:
    wanted = [None, 0, 1, 5, None, 20, VOCAB + 10]
    pickers = [picker_of(Sampling(seed=i), top_logprobs=k) for i, k in enumerate(wanted)]
    logits = logits_of(9, len(wanted))
    logprobs = read_logprobs(pick(mx.array(logits), pickers), pickers)
    for k, logprob, row in zip(wanted, logprobs, logits, strict=True):
        if k is None:
            assert logprob is None
            continue
        assert isinstance(logprob, TokenLogprob)
        assert len(logprob.top) == min(k, VOCAB - 1)
        values = [p for _, p in logprob.top]
        assert values == sorted(values, reverse=True)
        assert logprob.logprob == pytest.approx(log_softmax(row)[logprob.token], abs=1e-4)


def test_nobody_pays_for_logprobs_nobody_wants() -> None:
    picks = pick(mx.array(logits_of(1, 2)), [picker_of(Sampling()), picker_of(Sampling())])
    assert len(picks.arrays) == 1


def test_half_precision_logits_are_read_as_they_are() -> None:
    logits = logits_of(10)
    half = mx.array(logits).astype(mx.bfloat16)
    picker = picker_of(Sampling(temperature=0.0), top_logprobs=3)
    (logprob,) = read_logprobs(pick(half, [picker]), [picker])
    assert logprob is not None
    want = log_softmax(np.array(half.astype(mx.float32))[0])
    assert logprob.logprob == pytest.approx(want.max(), abs=1e-4)


# --- a mixed batch -------------------------------------------------------------------------


def mixed_settings(rng: random.Random) -> Sampling:
    return Sampling(
        temperature=rng.choice([0.0, 0.5, 1.0, 3.0]),
        top_k=rng.choice([0, 0, 1, 5, 40]),
        top_p=rng.choice([1.0, 0.9, 0.3]),
        min_p=rng.choice([0.0, 0.0, 0.05]),
        seed=rng.randrange(1000),
        repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
        presence_penalty=rng.choice([0.0, 0.5]),
        frequency_penalty=rng.choice([0.0, 0.3]),
        logit_bias=rng.choice([(), ((3, 2.0),)]),
    )


def test_mixed_settings_in_one_batch_are_each_row_alone() -> None:
    rng = random.Random(17)
    rows = [mixed_settings(rng) for _ in range(24)]
    wanted = [rng.choice([None, 0, 3]) for _ in rows]

    def fresh(i: int) -> Picker:
        return picker_of(rows[i], choice=i % 3, prompt=[i, i + 1], top_logprobs=wanted[i])

    batch = [fresh(i) for i in range(len(rows))]
    alone = [fresh(i) for i in range(len(rows))]
    for step in range(25):
        logits = logits_of(300 + step, len(rows), spread=1.0)
        picks = pick(mx.array(logits), batch)
        tokens, logprobs = picks.tokens.tolist(), read_logprobs(picks, batch)
        for i, picker in enumerate(alone):
            single = pick(mx.array(logits[i : i + 1]), [picker])
            assert single.tokens.tolist() == [tokens[i]]
            (logprob,) = read_logprobs(single, [picker])
            assert_close(logprobs[i], logprob)


def assert_close(got: TokenLogprob | None, want: TokenLogprob | None) -> None:
    if got is None or want is None:
        assert got is want
        return
    assert got.token == want.token
    assert got.logprob == pytest.approx(want.logprob, abs=1e-5)
    assert [p for _, p in got.top] == pytest.approx([p for _, p in want.top], abs=1e-5)


# --- memory --------------------------------------------------------------------------------


class Metered:
    """A model that records how much memory is in use at each decode step."""

    def __init__(self, name: str) -> None:
        self.model = build(name)
        self.nbytes: list[int] = []

    def __call__(self, ids: mx.array, *, cache: list[Any]) -> mx.array:
        if ids.shape[1] == 1:
            self.nbytes.append(mx.get_active_memory())
        logits: mx.array = self.model(ids, cache=cache)
        return logits


@pytest.mark.parametrize("name", ["mamba2", "qwen3"])
def test_a_long_reply_keeps_memory_flat(name: str) -> None:
    """600 penalised steps of two rows: what grows is the KV of the tokens, and nothing else."""
    s = Sampling(temperature=1.0, seed=1, repetition_penalty=1.1, frequency_penalty=0.1, top_k=20)
    metered: list[Metered] = []

    def make() -> Built:
        metered.append(Metered(name))
        _, make_layers = with_caches(metered[0].model)
        return metered[0], make_layers

    with running(make, cache_nbytes=None) as h:
        results = [h.submit([20 + i, 21, 22], 600, sampling=s) for i in range(2)]
        for result in results:
            result.wait()
    nbytes = metered[0].nbytes
    # Keys and values of 3 layers, 2 heads, 16 numbers of 4 bytes; room is made for 256 at a time.
    per_token = 0 if name == "mamba2" else 2 * 3 * 2 * 16 * 4
    growth = 2 * per_token * (600 - 100 + 256)
    assert max(nbytes[500:]) - min(nbytes[100:200]) <= growth + (64 << 10)


def test_infinite_logits_are_never_drawn() -> None:
    """Some models mark ids they never emit with minus infinity."""
    logits = logits_of(11, 64)
    logits[:, ::2] = -math.inf
    for s in (Sampling(), Sampling(top_p=0.9), Sampling(top_k=40), Sampling(min_p=0.01)):
        pickers = [picker_of(replace(s, seed=i, temperature=5.0)) for i in range(64)]
        assert all(t % 2 for t in picked(logits, pickers))
