"""A tier that lies, loses and lags, under the real engine: ten thousand bad loads, no wrong answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faulty_tier import READ_FAULTS, WRITE_FAULTS, random_plan
from tests.test_ssd_faults_oracle import (
    MODELS,
    ROOM_NBYTES,
    check,
    faulty,
    n_noticed,
    n_suffered,
    sessions,
    sit,
)

N_FAULTED = 2500
"""For each model and seed."""


@pytest.mark.soak
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("seed", range(2))
def test_thousands_of_faulted_loads(tmp_path: Path, model: str, seed: int) -> None:
    """In a folder that is too small as well: what is not spoilt is evicted from under the readers."""
    plan = random_plan(seed=seed, rate=0.2, faults=(*WRITE_FAULTS, *READ_FAULTS))
    tier = faulty(tmp_path, plan, limit_nbytes=4 * ROOM_NBYTES[model])
    with sit(model, tier) as oracle:
        exams = sessions(oracle, 24)
        while n_suffered(tier) < N_FAULTED:
            assert oracle.wrong(exams, rounds=6, at_once=2) == []
            check(oracle)
        assert n_noticed(oracle) > 0.9 * n_suffered(tier)
        assert tier.usage().counts["evictions"] > 20
        assert oracle.cache.stats.tokens_by_tier["ssd"] > 0
        print(f"{n_suffered(tier)} faulted loads, {n_noticed(oracle)} noticed")
