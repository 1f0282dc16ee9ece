"""A tier that lies, loses and lags, below the real engine: 10,000 bad loads, no wrong answer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.stories.test_ssd_faults_oracle import (
    MODELS,
    check,
    faulty,
    in_turn,
    n_noticed,
    n_suffered,
    sessions,
    sit,
)

N_FAULTED = {"firn-demo": 8000, "firn-demo-hybrid": 2000}
"""A load takes the hybrid four times as long."""


@pytest.mark.soak
@pytest.mark.parametrize("model", MODELS)
def test_thousands_of_faulted_loads(tmp_path: Path, model: str) -> None:
    """Every second read suffers a fault, and every 40th write."""
    tier = faulty(tmp_path, in_turn(read=2, write=40), delay_s=0.002)
    with sit(model, tier) as oracle:
        exams = sessions(oracle, 24)
        while n_suffered(tier) < N_FAULTED[model]:
            assert oracle.wrong(exams, rounds=6, at_once=4) == []
            check(oracle)
        print(f"{n_suffered(tier)} faulted loads, {n_noticed(oracle)} noticed")
        assert n_noticed(oracle) > 0.9 * n_suffered(tier)
        assert oracle.cache.stats.tokens_by_tier["ssd"] > 0
