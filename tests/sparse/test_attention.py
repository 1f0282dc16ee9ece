"""A small model's attention, as scores of a prompt's tokens."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import RotatingKVCache, make_prompt_cache

from firn.backends.cuda.shapes import find_buckets
from firn.cache.off import CacheOff
from firn.core.values import CacheControl, Namespace, Prompt
from firn.sparse.attention import N_LOOKAHEAD, AttentionScorer
from firn.sparse.rules import Sparse
from firn.sparse.scorer import Scores
from tests.cache.lab import n_leases, nodes_of
from tests.harness import model_info, running, scorer_of
from tests.models.alone import plain
from tests.zoo import VOCAB_SIZE, build

EVERYONE = Namespace("")


def prompt_of(n: int, seed: int = 0) -> Prompt:
    return Prompt(np.random.default_rng(seed).integers(1, VOCAB_SIZE, n))


def made(name: str) -> Any:
    model = build(name)
    return scorer_of(lambda: (model, lambda: make_prompt_cache(model)))


def scores_of(scorer: Any, prompt: Prompt, *, slice_tokens: int = 64) -> tuple[Scores, int]:
    """The prompt's scores, and how many slices they took."""
    reading = scorer.open(prompt, EVERYONE, CacheControl())
    n = 1
    scorer.read(reading, slice_tokens)
    while not scorer.finish_slice(reading):
        scorer.read(reading, slice_tokens)
        n += 1
    scores = scorer.scores(reading)
    assert scorer.n_left(reading) == 0
    scorer.close_reading(reading)
    scorer.close_reading(reading)
    return scores, n


def by_hand(model: Any, prompt: Prompt) -> Scores:
    """The same by definition: from all layers' queries and keys, one token after another."""
    weights: list[list[mx.array]] = []
    plain = mx.fast.scaled_dot_product_attention

    def attend(q: Any, k: Any, v: Any, *, scale: float, mask: Any, **more: Any) -> Any:
        repeated = mx.repeat(k, q.shape[1] // k.shape[1], axis=1)
        weights[-1].append(mx.softmax(q @ repeated.swapaxes(-1, -2) * scale, axis=-1)[0, :, 0])
        return plain(q, k, v, scale=scale, mask=mask, **more)

    layers, token = make_prompt_cache(model), mx.array([[int(prompt.ids[-1])]])
    model(mx.array(prompt.ids[None, :-1]), cache=layers)
    total = np.zeros(len(prompt))
    for _ in range(N_LOOKAHEAD):
        weights.append([])
        mx.fast.scaled_dot_product_attention = attend
        logits = model(token, cache=layers)
        mx.fast.scaled_dot_product_attention = plain
        token = mx.argmax(logits[:, -1:], axis=-1)
        most = np.stack([np.array(w).max(axis=0) for w in weights[-1]]).max(axis=0)
        total += most[: len(prompt)]
    return (total / N_LOOKAHEAD).astype(np.float32)


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_scores_are_the_largest_weights_of_any_head(name: str) -> None:
    prompt = prompt_of(200)
    scores, n_slices = scores_of(made(name), prompt)
    assert np.allclose(scores, by_hand(build(name), prompt), atol=1e-4)
    assert n_slices == 4 + N_LOOKAHEAD + 1


def test_slices_change_nothing_and_a_prompt_that_was_read_is_not_read_again() -> None:
    scorer, prompt = made("llama"), prompt_of(300)
    first, n_first = scores_of(scorer, prompt, slice_tokens=64)
    again, n_again = scores_of(scorer, prompt)
    assert n_again == N_LOOKAHEAD + 1 < n_first, "from its own prefix cache"
    assert np.allclose(first, again, atol=1e-4)
    longer, n_longer = scores_of(scorer, Prompt(np.concatenate([prompt.ids, prompt.ids[:50]])))
    assert n_longer == 1 + N_LOOKAHEAD + 1
    assert len(longer) == 350


@pytest.mark.parametrize("name", ["llama", "qwen3_next", "gemma3_text"])
def test_the_lookahead_is_one_slice_while_nobody_waits(name: str) -> None:
    """And what is stored on the way is the same."""
    scorer, prompt = made(name), prompt_of(300)
    patient, _ = scores_of(made(name), prompt)
    reading, n = scorer.open(prompt, EVERYONE, CacheControl()), 1
    scorer.read(reading, 64, alone=True)
    while not scorer.finish_slice(reading):
        scorer.read(reading, 64, alone=True)
        n += 1
    assert np.allclose(scorer.scores(reading), patient, atol=1e-4)
    assert n == 5 + 1 + 1
    scorer.close_reading(reading)
    assert scores_of(scorer, prompt)[1] == N_LOOKAHEAD + 1
    assert not scorer._cache.stats.faults


def test_padded_chunks_of_few_shapes_change_nothing() -> None:
    model, prompt = build("llama"), prompt_of(300)
    make_layers = partial(make_prompt_cache, model)
    padded = scorer_of(lambda: (model, make_layers), buckets=find_buckets(model, make_layers))
    scores, n_slices = scores_of(padded, prompt, slice_tokens=70)
    assert n_slices == 5 + N_LOOKAHEAD + 1
    assert np.allclose(scores, scores_of(made("llama"), prompt)[0], atol=1e-4)
    assert scores_of(padded, prompt)[1] == N_LOOKAHEAD + 1, (
        "what is stored is the row without padding"
    )
    assert not padded._cache.stats.faults


def test_the_lookahead_is_never_stored() -> None:
    """After the prompt, its rows hold the first tokens of a reply of the draft model's own."""
    scorer, prompt = made("llama"), prompt_of(96)
    scores_of(scorer, prompt)
    tree = scorer._cache.records.tree
    assert max(node.end for node in nodes_of(tree)) == len(prompt) - 1


def test_a_reading_that_is_given_up_keeps_what_it_has_read() -> None:
    scorer, prompt = made("llama"), prompt_of(300)
    reading = scorer.open(prompt, EVERYONE, CacheControl())
    scorer.read(reading, 128)
    scorer.finish_slice(reading)
    scorer.close_reading(reading)
    _, n = scores_of(scorer, prompt, slice_tokens=64)
    assert n == 3 + N_LOOKAHEAD + 1


def test_a_hybrid_scores_by_its_attention_layers() -> None:
    scores, _ = scores_of(made("qwen3_next"), prompt_of(150))
    assert len(scores) == 150
    assert np.all(scores > 0)


@pytest.mark.parametrize("n", [1, 22, 23, 60])
def test_windows_that_become_full_no_longer_count(n: int) -> None:
    """Layers with a window of 32 tokens see all of a short prompt, until the reply is longer."""
    scores, _ = scores_of(made("gemma3_text"), prompt_of(n))
    assert len(scores) == n
    assert np.all(scores > 0)


def test_a_prompt_longer_than_every_window_cannot_be_scored() -> None:
    """The engine reads such a prompt in full."""
    model = build("llama")
    windows = [RotatingKVCache(max_size=32) for _ in make_prompt_cache(model)]
    scorer = scorer_of(lambda: (model, lambda: copy.deepcopy(windows)))
    with pytest.raises(ValueError, match="the prompt is too long"):
        scores_of(scorer, prompt_of(200))


def test_tiny_prompts_and_unknown_ids_are_scored() -> None:
    for n in (1, 2, 33):
        assert len(scores_of(made("llama"), prompt_of(n))[0]) == n
    strange = Prompt(np.full(40, VOCAB_SIZE + 1000))
    assert len(scores_of(made("llama"), strange)[0]) == 40


@pytest.mark.parametrize("name", ["mamba2", "rwkv7"])
def test_a_model_without_attention_cannot_score(name: str) -> None:
    model = build(name)
    info = model_info(model, lambda: make_prompt_cache(model))
    with pytest.raises(ValueError, match="attends to the whole prompt"):
        AttentionScorer(model, info, make_layers=lambda: make_prompt_cache(model), cache=CacheOff())


def failing(*, n_tokens: int) -> Any:
    """A draft model whose passes of `n_tokens` tokens cannot be computed once it has read more than
    64. They fail when they are evaluated, each time, as on a device without memory."""
    model = build("llama")

    def run(ids: mx.array, cache: list[Any]) -> mx.array:
        logits: mx.array = model(ids, cache=cache)
        if ids.shape[1] != n_tokens or cache[0].offset <= 64:
            return logits
        halves = mx.zeros((1, 2, 2), dtype=mx.bfloat16)
        at = mx.array([0])
        fault = mx.gather_mm(halves, halves, lhs_indices=at, rhs_indices=at).sum()
        cache[0].keys = cache[0].keys + fault
        return logits + fault

    return run, partial(make_prompt_cache, model)


@pytest.mark.parametrize("n_tokens", [1, 64], ids=["lookahead", "chunk"])
def test_a_reading_that_cannot_be_computed_is_dropped_and_its_prompt_read_in_full(
    n_tokens: int,
) -> None:
    prompt = prompt_of(300).ids.tolist()
    with running(plain("llama"), cache_nbytes=None) as harness:
        want = harness.ask(prompt, 5).reply
    with running(plain("llama"), draft=lambda: failing(n_tokens=n_tokens)) as harness:
        for _ in range(2):
            result = harness.ask(
                prompt, 5, sparse=Sparse(0.3, 64), control=CacheControl(write=False)
            )
            assert result.reply == want
            assert result.n_skipped == 0
        scorer: Any = harness.engine._parts.preparer._scorer
        assert harness.between_steps(lambda: n_leases(scorer._cache)) == 0
