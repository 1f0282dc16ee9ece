"""Which models can be divided among ranks, and why others cannot."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx import nn
from mlx.nn.layers.distributed import shard_linear

from firn.backends.cpu.dtype import widen
from firn.core.errors import SetupError
from firn.ranks.group import check

HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}


def fault(config: dict[str, Any], size: int, *, text_only: bool = False) -> str | None:
    try:
        check(config, size, name="M", text_only=text_only)
    except SetupError as e:
        return str(e)
    return None


@pytest.mark.parametrize(
    ("config", "size"),
    [
        ({"model_type": "llama", **HEADS}, 4),
        ({"model_type": "qwen3_moe", **HEADS}, 2),
        ({"model_type": "qwen3_5", "text_config": {**HEADS, "num_key_value_heads": 2}}, 4),
        ({"model_type": "deepseek_v3", **HEADS, "num_key_value_heads": 1, "kv_lora_rank": 8}, 8),
    ],
    ids=["dense", "experts", "kv heads that are repeated", "latent attention"],
)
def test_models_that_ranks_can_share_are_accepted(config: dict[str, Any], size: int) -> None:
    assert fault(config, size) is None


@pytest.mark.parametrize(
    ("config", "size", "said"),
    [
        ({"model_type": "gemma3_text", **HEADS}, 2, "architecture gemma3_text"),
        ({"model_type": "llama", **HEADS}, 3, "8 attention heads"),
        ({"model_type": "llama", **HEADS}, 8, "4 key-value heads"),
        (
            {"model_type": "qwen3_5", "text_config": {**HEADS, "linear_num_key_heads": 3}},
            2,
            "3 key",
        ),
        ({"model_type": "qwen3_5", "vision_config": {"depth": 1}, **HEADS}, 2, "--text-only"),
    ],
)
def test_models_that_ranks_cannot_share_are_refused_with_a_reason(
    config: dict[str, Any], size: int, said: str
) -> None:
    assert said in (fault(config, size) or "")


def test_the_text_of_a_vision_model_can_be_shared() -> None:
    config = {"model_type": "qwen3_5", "vision_config": {"num_heads": 3}, **HEADS}
    assert fault(config, 2, text_only=True) is None


@pytest.mark.parametrize("sharding", ["all-to-sharded", "sharded-to-all"])
def test_a_slice_that_is_widened_is_still_a_slice(sharding: str) -> None:
    """Its result is summed with the others', by the group that it was made for."""
    whole = nn.QuantizedLinear.from_linear(nn.Linear(64, 64), group_size=32, bits=4)
    owner = nn.Module()
    owner.part = shard_linear(whole, sharding, group=mx.distributed.init())
    x = mx.random.normal((1, 64))
    before = owner.part(x)
    widen(owner)
    assert owner.part.weight.dtype == mx.float32
    assert mx.allclose(owner.part(x), before, atol=1e-3).item()
