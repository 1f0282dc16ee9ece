"""A step's time is split into the parts that the timed model has."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.models.cache import make_prompt_cache

from firn.models import timing
from firn.models.timing import DEPTH, TimeSplit, measure
from tests.zoo import build


@pytest.mark.parametrize("name", ["llama", "mamba2", "gemma3_text", "qwen3_next"])
def test_a_chunk_and_a_step_are_split_into_parts(name: str) -> None:
    model = build(name)
    measured = measure(model, lambda: make_prompt_cache(model), chunk=DEPTH // 4)
    assert (measured.prefill.n_tokens, measured.decode.n_tokens) == (DEPTH // 4, 1)
    for split in (measured.prefill, measured.decode):
        assert split.total_s > 0
        assert split.products_s > 0
        assert (split.attention_s > 0) == (name != "mamba2")
        assert split.python_s > 0


def test_the_rest_is_never_negative() -> None:
    assert TimeSplit(1, 1.0, 0.2, 0.3, 0.1).rest_s == pytest.approx(0.4)
    assert TimeSplit(1, 1.0, 0.9, 0.3, 0.1).rest_s == 0


def test_no_part_is_more_than_the_whole() -> None:
    """Parts are measured alone, and may take longer than together."""
    split = TimeSplit(1, 1.0, 1.67, 0.3, 0.1)
    parts = (split.products_s, split.attention_s, split.python_s, split.rest_s)
    assert sum(parts) == pytest.approx(split.whole_s)


class LargeHead:
    """A model with a large vocabulary."""

    VOCABULARY = 1 << 17

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, ids: mx.array, *, cache: list[Any]) -> mx.array:
        return self._model(ids, cache=cache)[..., :1] * mx.ones((1, 1, self.VOCABULARY))


@pytest.mark.parametrize("n", [256, 1])
def test_a_step_computes_logits_and_a_chunk_none(n: int) -> None:
    model = build("llama")
    layers = make_prompt_cache(model)
    timing._feed(model, layers, n)
    mx.clear_cache()
    before = mx.get_active_memory()
    mx.reset_peak_memory()
    timing._feed(LargeHead(model), layers, n)
    used = mx.get_peak_memory() - before
    assert (used >= 4 * n * LargeHead.VOCABULARY) == (n == 1)


@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_the_head_is_a_product_of_a_step_and_not_of_a_chunk(name: str) -> None:
    """gemma3_text's is its embedding."""
    model = build(name)
    n_vocabulary = model.args.vocab_size

    def heads(n: int) -> list[tuple[int, ...]]:
        products = timing._products(model, n)
        return [product.shape for product in products if product.shape[-1] == n_vocabulary]

    assert heads(16) == []
    assert heads(1) == [(1, 1, n_vocabulary)]
