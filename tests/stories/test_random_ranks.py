"""Random use of a model that two processes compute together, over loopback.

Slow: each test starts two processes that take part in every step.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks import processes
from tests.stories.rank import KINDS

N_ASKED = 30
WAIT_S = 600.0
"""A bound, not an expectation: the machine may be busy."""


def use_together(name: str, seed: int, n_asked: int, folder: Path) -> None:
    """Both ranks have compared all that they hold when they end with 0."""
    ranks = processes.launch(
        "-m", "tests.stories.rank", name, str(seed), str(n_asked), folder=folder
    )
    try:
        codes = [process.wait(WAIT_S) for process in ranks.processes]
    finally:
        processes.end(ranks)
    assert codes == [0, 0], "\n".join(ranks.log(rank)[-3000:] for rank in range(len(codes)))


@pytest.mark.parametrize("name", ["window", "hybrid", "dense, short of memory"])
def test_random_use_of_ranks(name: str, tmp_path: Path) -> None:
    use_together(name, 1, N_ASKED, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("name", KINDS)
def test_random_use_of_ranks_for_minutes(name: str, tmp_path: Path) -> None:
    for seed in range(100, 104):
        use_together(name, seed, 4 * N_ASKED, tmp_path / str(seed))
