"""Advised sizes: two tiers reuse what the better of them has, and knees are found."""

from __future__ import annotations

import numpy as np
import pytest

from firn.traces.advise import advise, knee
from firn.traces.simulate import SimulatedSsd, play, play_all
from tests.traces.test_simulate import small_trace


def test_a_table_is_what_its_tiers_do_by_themselves() -> None:
    trace = small_trace(2, 200)
    memory, ssd = (
        [trace.n_nodes // 20, trace.n_nodes // 5],
        [trace.n_nodes // 8, trace.n_nodes // 2],
    )
    found = advise(trace, memory=memory, ssd=ssd, workers=1)
    share = trace.block / trace.n_prompt_tokens
    of_memory = play_all(trace, memory)
    of_ssd = {n: play(SimulatedSsd(trace, n_blocks=n)) for n in ssd}
    for m in memory:
        assert found.alone[m] == pytest.approx(share * of_memory[m].sum())
        for s in ssd:
            both = share * np.maximum(of_memory[m], of_ssd[s]).sum()
            assert found.together[m, s] == pytest.approx(both)
            assert found.alone[m] <= found.together[m, s] <= found.unlimited


@pytest.mark.parametrize(
    ("rates", "size"),
    [
        ({1: 0.1, 2: 0.2, 4: 0.205, 8: 0.3, 16: 0.305}, 8),  # a flat stretch is not the end
        ({1: 0.1, 2: 0.3, 4: 0.301, 8: 0.302}, 2),
        ({1: 0.5, 2: 0.5}, 1),
        ({1: 0.1, 2: 0.2}, 2),
        ({1: 0.1, 16: 0.13}, 1),  # four doublings, none of which is worth it
        ({4: 0.7}, 4),
    ],
)
def test_the_knee_is_where_no_doubling_pays_any_more(rates: dict[int, float], size: int) -> None:
    assert knee(rates) == size
