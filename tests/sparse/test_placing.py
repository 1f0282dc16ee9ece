"""Tokens are read at their own positions, whatever cells they are in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from firn.core.values import Prompt
from firn.models.patches import Patches
from firn.sparse.placing import ArgumentsByPosition, shifted, why_not_sparse
from firn.sparse.thinned import Thinned
from tests.zoo import VOCAB_SIZE, build

RUNS = ((0, 20), (64, 90), (91, 92), (300, 340))


def thin_of(runs: tuple[tuple[int, int], ...] = RUNS, seed: int = 1) -> Prompt:
    positions = np.concatenate([np.arange(*run) for run in runs]).astype(np.int64)
    rng = np.random.default_rng(seed)
    whole = Prompt(rng.integers(1, VOCAB_SIZE, int(positions[-1]) + 1))
    return Prompt(whole.ids[positions], positions=Thinned(positions, whole, "test"))


def read(model: Any, prompt: Prompt, *ends: int) -> tuple[mx.array, list[Any]]:
    layers, start = make_prompt_cache(model), 0
    for end in ends:
        ids = mx.array(prompt.ids[start:end].astype(np.int32))[None]
        with ArgumentsByPosition(Patches()).reading(layers, prompt, start, end) as placed:
            logits = model(ids, cache=placed)
        start = end
    return logits[0, -1], layers


@pytest.mark.parametrize("name", ["llama", "qwen3", "deepseek_v2", "qwen3_moe", "phi3", "olmo2"])
def test_runs_read_together_are_the_runs_read_one_by_one(name: str) -> None:
    model, thin = build(name), thin_of()
    ends = np.cumsum([b - a for a, b in RUNS]).tolist()
    together, layers = read(model, thin, len(thin))
    apart, _ = read(model, thin, *ends)
    near, _ = read(model, Prompt(thin.ids), len(thin))
    assert mx.allclose(together, apart, atol=1e-4).item()
    assert not mx.allclose(together, near, atol=1e-4).item(), "positions count"
    assert layers[0].offset == len(thin), "the cache counts cells"


def test_a_thinned_prompt_that_has_every_token_is_the_prompt_to_the_bit() -> None:
    model = build("llama")
    thin = thin_of(((0, 200),))
    got, _ = read(model, thin, 64, 200)
    want, _ = read(model, thin.whole, 64, 200)
    assert mx.array_equal(got, want).item()


def test_the_rotation_is_put_back_when_a_call_fails() -> None:
    plain, thin, patches = mx.fast.rope, thin_of(), Patches()

    def fail() -> None:
        with ArgumentsByPosition(patches).reading([], thin, 0, len(thin)):
            assert mx.fast.rope is not plain
            assert patches.names == ["mlx.core.fast.rope"]
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert mx.fast.rope is plain
    assert patches.names == []


def test_rows_without_gaps_see_their_own_caches() -> None:
    layers = make_prompt_cache(build("llama"))
    assert shifted(layers, [0, 0]) is layers
    layers[0].offset = 7
    assert shifted(layers, [5])[0].offset == 12


def layers_of(model: Any) -> Callable[[], list[Any]]:
    return lambda: make_prompt_cache(model)


@pytest.mark.parametrize("name", ["llama", "qwen3", "glm4", "deepseek_v3", "mixtral"])
def test_prompts_of_attention_models_can_be_thinned(name: str) -> None:
    model = build(name)
    assert why_not_sparse(model, layers_of(model), Patches()) is None


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("qwen3_next", "recurrent"),
        ("mamba2", "recurrent"),
        ("gemma3_text", "sliding-window"),
        ("gpt2", "does not accept positions"),
        ("mistral4", "does not accept positions"),
        ("phi3small", "positions are not those"),
    ],
)
def test_other_models_are_refused_with_a_reason(name: str, why: str) -> None:
    model = build(name)
    assert why in (why_not_sparse(model, layers_of(model), Patches()) or "")
