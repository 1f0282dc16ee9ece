"""A model that cannot be batched is detected at load, whatever its layers promise."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from firn.models.decode.batch import why_not_batchable
from firn.models.load.selfcheck import batch_fault
from tests.models.alone import with_caches
from tests.zoo import build


def fault_of(name: str, *, dtype: mx.Dtype = mx.float32) -> str | None:
    model, make_layers = with_caches(build(name, dtype=dtype))
    return why_not_batchable(make_layers()) or batch_fault(model, make_layers, name)


@pytest.mark.parametrize(
    "name", ["qwen3", "gemma3_text", "qwen3_next", "mamba2", "falcon_h1", "qwen3_moe"]
)
def test_a_model_that_batches_has_no_fault(name: str) -> None:
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
def test_a_model_that_cannot_be_batched_says_why(name: str, why: str) -> None:
    fault = fault_of(name)
    assert fault is not None
    assert why in fault


class RulesTokensOut:
    """A model that rules four tokens out. batched: their logits in a batch."""

    def __init__(self, *, batched: float) -> None:
        self.model = build("qwen3")
        self.batched = batched

    def __call__(self, ids: mx.array, *, cache: list[Any]) -> mx.array:
        logits: mx.array = self.model(ids, cache=cache)
        value = self.batched if ids.shape[0] > 1 else -mx.inf
        return mx.concatenate([mx.full((*logits.shape[:-1], 4), value), logits], axis=-1)


@pytest.mark.parametrize(("batched", "fine"), [(-mx.inf, True), (0.0, False)])
def test_a_batch_must_rule_out_the_same_tokens(batched: float, fine: bool) -> None:
    model = RulesTokensOut(batched=batched)
    _, make_layers = with_caches(model.model)
    fault = batch_fault(model, make_layers, "qwen3")
    assert (fault is None) is fine


def test_a_batch_of_nans_is_a_fault() -> None:
    class Broken(RulesTokensOut):
        def __call__(self, ids: mx.array, *, cache: list[Any]) -> mx.array:
            logits: mx.array = self.model(ids, cache=cache)
            return logits * mx.nan if ids.shape[0] > 1 else logits

    model = Broken(batched=0.0)
    _, make_layers = with_caches(model.model)
    assert batch_fault(model, make_layers, "qwen3") is not None
