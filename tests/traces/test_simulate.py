"""The simulation treats every request as the cache does."""

from __future__ import annotations

import numpy as np
import pytest
from benchmarks.agent_trace import agent_trace

from firn.traces.simulate import SimulatedSsd, play, play_all
from firn.traces.trace import Trace, TraceEntry
from tests.traces.played import BLOCK, play_for_real

SMALL = {
    "tools": (30, 60), "sub_tools": (10, 20), "project": (4, 12), "step": 8.0, "reply": 4.0,
    "context": 160, "summary": (8, 20), "turns": 8.0, "task": (4, 12), "short": (4, 12),
}  # fmt: skip


def small_trace(seed: int, n_requests: int = 150) -> Trace:
    """Agents with short contexts: everything that they do, in blocks of a few tokens."""
    return Trace.of(agent_trace(n_requests, seed=seed, block=BLOCK, **SMALL), block=BLOCK)


@pytest.mark.parametrize(("seed", "share"), [(1, 0.02), (2, 0.1), (1, 0.4), (2, 2.0)])
def test_memory_holds_what_the_cache_holds(seed: int, share: float) -> None:
    trace = small_trace(seed)
    n_blocks = int(trace.n_nodes * share)
    expected = play_for_real(trace, memory_blocks=n_blocks)
    assert play_all(trace, [n_blocks])[n_blocks].tolist() == expected


@pytest.mark.parametrize(("seed", "share"), [(1, 0.05), (2, 0.15), (1, 0.4)])
def test_an_ssd_holds_what_the_cache_holds(seed: int, share: float) -> None:
    trace = small_trace(seed, 120)
    n_blocks = int(trace.n_nodes * share)
    expected = play_for_real(trace, memory_blocks=1 << 20, ssd_blocks=n_blocks, keeps_memory=False)
    assert play(SimulatedSsd(trace, n_blocks=n_blocks)).tolist() == expected


@pytest.mark.parametrize(("memory", "ssd"), [(0.03, 0.15), (0.1, 0.15), (0.05, 0.6)])
def test_two_tiers_hold_what_the_better_one_holds(memory: float, ssd: float) -> None:
    """To within 1%: a record that the SSD has lost is written again when it leaves memory."""
    trace = small_trace(2, 140)
    n_memory, n_ssd = int(trace.n_nodes * memory), int(trace.n_nodes * ssd)
    real = play_for_real(trace, memory_blocks=n_memory, ssd_blocks=n_ssd)
    alone = (
        play_all(trace, [n_memory])[n_memory],
        play(SimulatedSsd(trace, n_blocks=n_ssd)),
    )
    assert np.maximum(*alone).sum() == pytest.approx(sum(real), rel=0.01)
    assert sum(real) > alone[0].sum()


def test_without_limits_everything_comes_back() -> None:
    trace = small_trace(3)
    n = trace.n_nodes
    assert play(SimulatedSsd(trace, n_blocks=n)).tolist() == trace.known.tolist()
    assert play_all(trace, [n])[n].tolist() == trace.known.tolist()


def test_least_recently_used_goes_first() -> None:
    chains = [(1,), (2,), (1,), (3,), (1,), (2,)]
    entries = [TraceEntry(float(i), BLOCK + 1, 1, chain) for i, chain in enumerate(chains)]
    found = play_all(Trace.of(entries, block=BLOCK), [2])[2]
    assert found.tolist() == [0, 0, 1, 0, 1, 0]


def test_a_prompt_longer_than_the_tier_keeps_its_beginning() -> None:
    chain = tuple(range(1, 11))
    entries = [TraceEntry(float(i), 10 * BLOCK + 1, 1, chain) for i in range(2)]
    found = play_all(Trace.of(entries, block=BLOCK), [4])[4]
    assert found.tolist() == [0, 4]


def test_prompts_shorter_than_a_block_are_nothing() -> None:
    trace = Trace.of([TraceEntry(0, 3, 1, ()), TraceEntry(1, 3, 1, ())], block=BLOCK)
    assert play(SimulatedSsd(trace, n_blocks=1)).tolist() == [0, 0]
    assert play_all(trace, [1])[1].tolist() == [0, 0]
    assert trace.known.tolist() == [0, 0]


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_one_pass_for_all_sizes_says_the_same(seed: int) -> None:
    trace = small_trace(seed, 120)
    sizes = [1, 7, 40, 41, trace.n_nodes // 3]
    found = play_all(trace, sizes)
    for size in sizes:
        assert found[size].tolist() == play_for_real(trace, memory_blocks=size), size
