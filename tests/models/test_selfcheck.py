"""A model that cannot be batched is found out when it is loaded, whatever its layers promise."""

from __future__ import annotations

import mlx.core as mx
import pytest

from firn.models.batch import can_batch
from firn.models.selfcheck import batch_fault
from tests.models.alone import with_caches
from tests.zoo import build


def fault_of(name: str, *, dtype: mx.Dtype = mx.float32) -> str | None:
    model, make_layers = with_caches(build(name, dtype=dtype))
    return can_batch(make_layers()) or batch_fault(model, make_layers, name)


@pytest.mark.parametrize(
    "name", ["qwen3", "gemma3_text", "qwen3_next", "mamba2", "falcon_h1", "qwen3_moe"]
)
def test_a_model_that_batches_is_let_through(name: str) -> None:
    assert fault_of(name) is None


@pytest.mark.parametrize("name", ["qwen3", "gemma3_text", "mamba2", "falcon_h1"])
def test_the_rounding_of_half_precision_is_no_fault(name: str) -> None:
    assert fault_of(name, dtype=mx.bfloat16) is None


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("gemma2", "fails"),  # confuses rows and heads
        ("gpt_bigcode", "fails"),  # takes one offset for all rows
        ("afm7", "come out different"),  # rotates by the padded length
        ("minimax_m3_vl", "key blocks"),  # only when long: known by name
        ("llama4", "ChunkedKVCache"),  # has no batched form, and says so
    ],
)
def test_a_model_that_does_not_says_why(name: str, why: str) -> None:
    fault = fault_of(name)
    assert fault is not None
    assert why in fault
