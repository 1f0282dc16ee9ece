"""Drafted tokens across restarts: records stored while drafting are right, and are found again.

Slow: real servers that are restarted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from firn.cache.tiers import TierOptions
from firn.cache.tiers.ssd import SsdTier
from firn.config import CacheConfig
from firn.models.speculation.drafters.lookup import Lookup
from tests.api.real import Real, serving
from tests.cache.pending import settle
from tests.models.speculation.drafting import AnyWidth
from tests.oracle import Oracle
from tests.stories.test_speculation_server import ask, config
from tests.zoo import ZOO, build, folder, write_folder

MIB = 1 << 20


@pytest.mark.parametrize("model", ["firn-demo", "firn-demo-hybrid"])
def test_the_built_in_models_answer_right_after_a_restart(model: str, tmp_path: Path) -> None:
    """They draft whatever the lookup finds, right or wrong, before and after the restart."""

    def sit() -> Oracle:
        tier = SsdTier(TierOptions(str(tmp_path), 64 * MIB))
        return Oracle(model, block=16, tier=tier, speculation=lambda: AnyWidth(Lookup()))

    with sit() as oracle:
        exams = [oracle.exam(seed, n_facts=6) for seed in range(4)]
        assert oracle.wrong(exams, rounds=2, at_once=3) == []
        settle(oracle)
    with sit() as oracle:
        assert oracle.wrong(exams, rounds=3, first=1, at_once=3) == []
        assert oracle.cache.stats.tokens_by_tier["ssd"] > 0
        totals = oracle.runner.speculator.totals  # type: ignore[union-attr]
        assert 0 < totals.n_accepted < totals.n_drafted
        assert not oracle.cache.stats.faults


def test_a_draft_models_prefixes_survive_a_restart(tmp_path: Path) -> None:
    large, small = tmp_path / "large", tmp_path / "small"
    for path in (large, small):
        path.mkdir()
        write_folder("llama", path)
    folder.write(build("llama", seed=5), ZOO["llama"].config, small)
    cache = CacheConfig(ssd_cache_dir=tmp_path / "ssd", cache_memory_mb=64, cache_block_tokens=32)
    options = config(large, cache=cache, speculation="model", draft_model=str(small))
    prompt = "\n".join(f"line {i}: {i * i}" for i in range(60))
    with serving(large, config=options) as real:
        first = ask(real, prompt=prompt)
        assert n_cached(real) == 0
    with serving(large, config=options) as real:
        again = ask(real, prompt=prompt)
        assert again.choices[0].text == first.choices[0].text
        assert n_cached(real) > 200


def n_cached(real: Real) -> int:
    """Prompt tokens that the draft model found in its own prefix cache."""

    def look(parts: Any) -> int:
        drafter = parts.runner.speculator.drafters[-1]
        return int(drafter._cache.stats.n_tokens_cached)

    return int(real.server.engine.call(look).result(10))
