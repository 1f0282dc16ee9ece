"""Every architecture of mlx-lm with the prefix cache: a few on every run, all with `make sweep`.

Slow: each architecture answers some seventy requests twice.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.cache.tiny import tiny
from tests.sweep import table
from tests.sweep.checks import MODES, QUICK, Verdict, check
from tests.zoo import UNBUILDABLE, VOCAB_SIZE, ZOO

FAST = (
    "qwen3_moe",  # experts
    "deepseek_v3",  # latent attention
    "gemma4_text",  # window, KV shared between layers
    "llama4",  # chunked attention
    "deepseek_v32",  # sparse index: two caches per layer
    "plamo3",  # reused on chunks only
    "gemma2",  # decoded row by row
    "falcon_h1",  # attention and state space in one layer
    "baichuan_m1",  # convolution and window in one layer
    "gear",  # three kinds in one model
)
"""The plainest of each kind are tested in tests/cache."""
GOOD = ("supported", "chunks only")

# Quantised live, as by mlx-lm's --kv-bits: heads wide enough for a group, no sinks, no latents.
QUANTISED = (
    ("llama", {"head_dim": 32}),
    ("qwen3", {"head_dim": 32}),
    ("llama-sliding", {"head_dim": 32}),
    ("gemma3_text", {"head_dim": 32}),
    ("qwen3_next", {"head_dim": 32}),
    ("falcon_h1", {"head_dim": 32}),
)


@pytest.mark.parametrize("name", FAST)
def test_fast(name: str) -> None:
    row = table.row_of(name, QUICK)
    assert row.verdict.status in GOOD, row.verdict.detail
    assert table.written()[name] == str(row), (
        "docs/architectures.md is out of date: python -m tools.sweep"
    )


def test_the_table_has_every_module_and_no_other() -> None:
    assert set(table.written()) == {*ZOO, *UNBUILDABLE}


def test_the_table_says_of_none_that_it_is_wrong() -> None:
    for name, line in table.written().items():
        assert "**wrong**" not in line, name


@pytest.mark.sweep
@pytest.mark.parametrize("name", list(ZOO))
def test_all(name: str) -> None:
    row = table.row_of(name, MODES)
    assert row.verdict.status in GOOD, row.verdict.detail
    assert table.written()[name] == str(row), "docs/architectures.md is out of date"


@pytest.mark.sweep
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("name", "config"), QUANTISED, ids=lambda x: x if type(x) is str else "")
def test_quantised_live(name: str, config: dict[str, Any], bits: int) -> None:
    build = tiny(name, bits=bits, **config)
    verdict = check(build, ZOO[name].module, vocab=VOCAB_SIZE)
    assert verdict == Verdict("supported", "", "QuantizedKVCache has no batched form in mlx-lm")


@pytest.mark.sweep
@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_other_prompts(name: str, seed: int) -> None:
    verdict = check(table.builder(name), ZOO[name].module, vocab=VOCAB_SIZE, seed=seed)
    assert verdict.status in GOOD, verdict.detail
