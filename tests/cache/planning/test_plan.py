"""What is resumed, loaded and computed: the earliest predicted first token."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from firn.cache.planning.estimates import Estimates
from firn.cache.planning.plan import MAX_TARGETS, ResumePlan
from firn.core.values import CacheControl, Namespace, Prompt
from tests.cache.lab import DENSE, LabEngine, records_of, tree
from tests.cache.storage.test_desk import SickWorker
from tests.hash_runner import prompt_of as words
from tests.waiting import wait_until

BLOCK = 8
N_BLOCKS = 4 * MAX_TARGETS
N_SECONDS = BLOCK * N_BLOCKS
CHUNK_S = 64.0
EVERYONE = Namespace("")


class Told(Estimates):
    """Computing a token takes a second; loading takes what the test says."""

    def __init__(self, load_s: Callable[[int], float], engine_s: float = 0.0) -> None:
        super().__init__()
        self._load_s = load_s
        self._engine_s = engine_s

    @property
    def knows_prefill(self) -> bool:
        return True

    def prefill_s(self, start: int, end: int) -> float:
        return float(end - start)

    def chunk_s(self, start: int) -> float:
        return CHUNK_S

    def load_s(self, tier: str, nbytes: int) -> float:
        return self._load_s(nbytes)

    def engine_s(self, nbytes: int) -> float:
        return self._engine_s * nbytes


def planned(
    load_s: Callable[[float], float], *, engine_s: float = 0.0, held: float = 0.0
) -> tuple[ResumePlan, list[int]]:
    """The plan for a long prompt, all of which is below memory, and the blocks it loads, in order.

    load_s: the time to load this share of it. engine_s: the engine's own time for all of it.
    held: the share of it that memory has as well.
    """
    ids = words(1, BLOCK * N_BLOCKS)
    cache = tree(DENSE, block=BLOCK)
    cache.add_tier("ssd", SickWorker(lambda name: None), namespaces=[EVERYONE])
    with LabEngine(DENSE, cache=cache) as lab:
        lab.submit(ids, 1).wait().check()
        total = sum(r.nbytes for r in records_of(cache))

        def shrink() -> bool:
            """Whether memory has any of it left. A busy machine may need several tries."""
            cache.set_room(int(held * total))
            return any(r.arrays is not None for r in records_of(cache))

        wait_until(lambda: lab.between_steps(shrink) == (held > 0))
        prompt = Prompt(np.array([*ids, *words(2, BLOCK)], dtype=np.int64))

        def look() -> tuple[ResumePlan, list[int]]:
            cache.records.estimates = Told(lambda nbytes: load_s(nbytes / total), engine_s / total)
            cursor = cache._cursor(prompt, EVERYONE, CacheControl(write=False))
            plan = cache.loader.plan(cursor)
            cache.records.unlease(cursor.committed.node)
            return plan, [r.node.start // BLOCK for r in plan.loads]

        return lab.between_steps(look)


@pytest.mark.parametrize(
    ("load_s", "share"),
    [
        pytest.param(lambda part: 0.0, 1.0, id="all"),
        pytest.param(lambda part: 0.9 * N_SECONDS * part, 1.0, id="a little faster: all"),
        pytest.param(lambda part: 2.0 * N_SECONDS * part, 1.0, id="half as fast helps still"),
        pytest.param(lambda part: 100.0 * N_SECONDS, 0.0, id="it cannot win: nothing"),
    ],
)
def test_how_much_of_a_long_prompt(load_s: Callable[[float], float], share: float) -> None:
    """It has more resume points than are weighed; those weighed are spread over all of it."""
    plan, _ = planned(load_s)
    assert plan.target.n_tokens / N_SECONDS == pytest.approx(share, abs=2 / MAX_TARGETS)
    assert plan.is_slower == (share == 0.0)


def test_what_a_load_leaves_out_was_slower() -> None:
    plan, _ = planned(lambda part: 0.0 if part < 0.6 else 100.0 * N_SECONDS)
    assert 0.5 < plan.target.n_tokens / N_SECONDS < 0.6
    assert plan.is_slower


def test_blocks_are_loaded_from_the_back() -> None:
    plan, blocks = planned(lambda part: N_SECONDS * part)
    assert blocks == list(range(N_BLOCKS))[::-1]
    assert plan.now.n_tokens == 0


def test_what_memory_has_is_neither_loaded_nor_charged() -> None:
    charged: list[float] = []

    def load_s(part: float) -> float:
        charged.append(part)
        return 0.9 * N_SECONDS * part

    plan, blocks = planned(load_s, held=0.5)
    n_held = plan.now.n_tokens // BLOCK
    assert n_held == pytest.approx(N_BLOCKS / 2, abs=1)
    assert blocks == list(range(n_held, N_BLOCKS))[::-1]
    assert max(charged) == pytest.approx(0.5, abs=0.02)


def test_loading_that_costs_the_engine_what_computing_does_is_left_alone() -> None:
    """As on a GPU, where copying bytes to the device may take longer than computing the tokens."""
    plan, blocks = planned(lambda part: 0.01 * part, engine_s=1.1 * N_SECONDS)
    assert blocks == []
    assert plan.is_slower


def test_computing_waits_for_a_load_that_wins() -> None:
    quick, _ = planned(lambda part: 20.0)
    assert 20.0 < quick.patience_s < 60.0
    assert quick.busy_patience_s == quick.patience_s
    long, _ = planned(lambda part: 200.0)
    assert long.patience_s == CHUNK_S, "by then its pace is known"
    assert long.busy_patience_s > 200.0, "computing meanwhile would slow others down"
    slow, _ = planned(lambda part: 0.6 * N_SECONDS)
    assert slow.patience_s == slow.busy_patience_s == 0.0, "computing meanwhile wins some of it"
