"""A step's time is split into the parts that the timed model has."""

from __future__ import annotations

import pytest
from mlx_lm.models.cache import make_prompt_cache

from firn.models.timing import DEPTH, TimeSplit, measure
from tests.zoo import build


@pytest.mark.parametrize("name", ["llama", "mamba2", "gemma3_text", "qwen3_next"])
def test_a_chunk_and_a_step_are_split_into_parts(name: str) -> None:
    model = build(name)
    timing = measure(model, lambda: make_prompt_cache(model), chunk=DEPTH // 4)
    assert (timing.prefill.n_tokens, timing.decode.n_tokens) == (DEPTH // 4, 1)
    for split in (timing.prefill, timing.decode):
        assert split.total_s > 0
        assert split.products_s > 0
        assert (split.attention_s > 0) == (name != "mamba2")
        assert split.python_s > 0


def test_the_rest_is_never_negative() -> None:
    assert TimeSplit(1, 1.0, 0.2, 0.3, 0.1).rest_s == pytest.approx(0.4)
    assert TimeSplit(1, 1.0, 0.9, 0.3, 0.1).rest_s == 0
