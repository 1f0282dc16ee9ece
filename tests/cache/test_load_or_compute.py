"""Where a prompt resumes when loading takes time too: at the earliest predicted first token."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from firn.cache.estimates import Estimates
from firn.cache.restore import MAX_OPTIONS
from firn.core.values import Namespace, Prompt
from tests.cache.lab import DENSE, LabEngine, records_of, tree
from tests.cache.test_store_retries import SickIo
from tests.hash_runner import prompt_of as words

BLOCK = 8
N_BLOCKS = 4 * MAX_OPTIONS
EVERYONE = Namespace("")


class Told(Estimates):
    """Computing a token takes a second; loading takes what the test says."""

    def __init__(self, load_s: Callable[[int], float]) -> None:
        super().__init__()
        self._load_s = load_s

    def prefill_s(self, start: int, end: int) -> float:
        return float(end - start)

    def load_s(self, nbytes: int) -> float:
        return self._load_s(nbytes)


def resumes_at(load_s: Callable[[float], float]) -> float:
    """What share of a long prompt is taken from below memory, if this share takes so many seconds."""
    ids = words(1, BLOCK * N_BLOCKS)
    cache = tree(DENSE, block=BLOCK)
    cache.add_tier("ssd", SickIo(lambda name: None), namespaces=[EVERYONE], wake=lambda: None)
    with LabEngine(DENSE, cache=cache) as lab:
        lab.submit(ids, 1).wait().check()
        lab.between_steps(lambda: cache.set_room(0))
        assert not any(r.arrays is not None for r in records_of(cache))
        total = sum(r.nbytes for r in records_of(cache))
        prompt = Prompt(np.array([*ids, *words(2, BLOCK)], dtype=np.int64))

        def look() -> float:
            cache.records.estimates = Told(lambda nbytes: load_s(nbytes / total))
            return cache.look_up(prompt, EVERYONE).n_tokens / len(ids)

        return lab.between_steps(look)


N_SECONDS = BLOCK * N_BLOCKS


@pytest.mark.parametrize(
    ("load_s", "share"),
    [
        pytest.param(lambda part: 0.0, 1.0, id="all"),
        pytest.param(lambda part: 0.9 * N_SECONDS * part, 1.0, id="a little faster: all"),
        pytest.param(lambda part: 1.1 * N_SECONDS * part, 0.0, id="a little slower: nothing"),
        pytest.param(lambda part: 2.0 * N_SECONDS * part**4, 0.5, id="the first half only"),
    ],
)
def test_a_long_prompt(load_s: Callable[[float], float], share: float) -> None:
    """It has more resume points than are weighed: those that are lie all over it."""
    assert resumes_at(load_s) == pytest.approx(share, abs=2 / MAX_OPTIONS)
