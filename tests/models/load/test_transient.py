"""Transient memory of a prefill chunk, estimated from a model's configuration."""

from __future__ import annotations

from typing import Any

import pytest

from firn.backends import named
from firn.core.units import GIB
from firn.models.load.transient import transient_of

METAL = named("metal").profile.fused_head_dims

QWEN = {"hidden_size": 2560, "num_attention_heads": 32, "head_dim": 128, "intermediate_size": 9728}
WIDE = {"hidden_size": 5120, "num_attention_heads": 24, "head_dim": 256, "intermediate_size": 17408}


def test_fused_attention_costs_no_scores_and_others_do() -> None:
    assert transient_of(QWEN, fused_head_dims=METAL, dtype="bfloat16").per_score_nbytes == 0
    assert transient_of(QWEN, fused_head_dims=frozenset(), dtype="float32").per_score_nbytes == 128
    wide = transient_of(WIDE, fused_head_dims=METAL, dtype="bfloat16")
    assert wide.per_score_nbytes == 48
    published = (39.78 - 28.54) * 1e9  # peak at 128K, chunks of 2048 against 512 (mlx-lm#1781)
    assert wide.chunk_nbytes(2048, 131072) - wide.chunk_nbytes(512, 131072) == pytest.approx(
        published, rel=0.25
    )


@pytest.mark.parametrize(
    ("dim", "scores"),
    [(64, 0), (72, 0), (80, 0), (96, 0), (128, 0), (112, 48), (192, 48), (256, 48), (512, 48)],
)
def test_scores_are_counted_where_mlx_keeps_them_on_metal(dim: int, scores: int) -> None:
    """As it chooses for chunks of more than 8 tokens, whatever kernels it has."""
    config = {**WIDE, "head_dim": dim}
    transient = transient_of(config, fused_head_dims=METAL, dtype="bfloat16")
    assert transient.per_score_nbytes == scores


@pytest.mark.parametrize(
    ("config", "scores"),
    [
        ({"text_config": WIDE, "hidden_size": 1}, True),
        ({**QWEN, "global_head_dim": 512}, True),
        ({**QWEN, "qk_rope_head_dim": 64, "qk_nope_head_dim": 128}, True),
        ({"n_embd": 768, "n_head": 12}, False),
        ({"hidden_size": 2048}, False),
        ({"hidden_size": "large", "num_attention_heads": None}, False),
        ({**QWEN, "intermediate_size": [1024, 4096]}, False),
    ],
)
def test_odd_configurations_have_an_estimate(config: dict[str, Any], scores: bool) -> None:
    transient = transient_of(config, fused_head_dims=METAL, dtype="bfloat16")
    assert bool(transient.per_score_nbytes) == scores
    assert 0 <= transient.chunk_nbytes(2048, 8192) < 16 * GIB


def test_experts_count_as_often_as_a_token_uses_them() -> None:
    moe = {**QWEN, "num_experts_per_tok": 8, "moe_intermediate_size": 4096}
    one, many = (transient_of(c, fused_head_dims=METAL, dtype="bfloat16") for c in (QWEN, moe))
    assert many.per_token_nbytes > one.per_token_nbytes
