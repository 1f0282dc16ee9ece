"""Settings that cannot work are found before a model is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from firn import app
from firn.assembly.cache import check_settings
from firn.config import CacheConfig, Config, EngineConfig, ModelConfig, SparseConfig
from firn.core.errors import SetupError

BAD: list[tuple[dict[str, Any], str]] = [
    ({"kv_cache_quantization": True, "reuse": "exact"}, "cannot be used with --reuse exact"),
    ({"ssd_cache_key_file": Path("/no/such/key")}, "the cache key cannot be read"),
    ({"tiers": ("ftp://somewhere",)}, "an address must begin with one of"),
    ({"tiers": ("redis://127.0.0.1/0?spill=some",)}, "spill=some must be proved or all"),
    ({"tiers": ("redis://127.0.0.1/0?ttl=1",)}, "unknown setting ttl"),
]


@pytest.mark.parametrize(("options", "why"), BAD)
def test_what_cannot_work_is_said_before_the_model_is_looked_for(
    options: dict[str, Any], why: str
) -> None:
    config = Config(model=ModelConfig(path="/no/such/model"), cache=CacheConfig(**options))
    with pytest.raises(SetupError, match=why):
        app.build(config)


@pytest.mark.parametrize(
    ("sections", "why"),
    [
        ({"engine": EngineConfig(speculation="model")}, "needs --draft-model"),
        ({"engine": EngineConfig(speculation="lookup", draft_model="x")}, "is not used with"),
        ({"sparse": SparseConfig(sparse_prefill=True)}, "needs --draft-model"),
        ({"sparse": SparseConfig(sparse_prefill_over=100)}, "needs --sparse-prefill"),
        (
            {
                "engine": EngineConfig(draft_model="x"),
                "sparse": SparseConfig(sparse_prefill=True),
                "cache": CacheConfig(reuse="exact"),
            },
            "where reuse is exact",
        ),
    ],
)
def test_what_cannot_draft_or_score_is_said_before_the_model_is_looked_for(
    sections: dict[str, Any], why: str
) -> None:
    with pytest.raises(SetupError, match=why):
        app.build(Config(model=ModelConfig(path="/no/such/model"), **sections))


def test_a_draft_model_that_drafts_nothing_may_score_prompts() -> None:
    engine = EngineConfig(speculation="lookup", draft_model="x")
    sparse = SparseConfig(sparse_prefill=True)
    with pytest.raises(SetupError, match="/no/such/model"):  # which is looked for next
        app.build(Config(model=ModelConfig(path="/no/such/model"), engine=engine, sparse=sparse))


def test_without_a_cache_its_settings_do_not_matter() -> None:
    for options, _ in BAD:
        check_settings(CacheConfig(disable_prefix_cache=True, **options))
