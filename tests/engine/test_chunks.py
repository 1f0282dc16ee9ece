"""Sizes of prefill chunks, by depth, load and measured times."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from firn.core.memory_plan import MIN_CHUNK
from firn.core.prefill_speed import PrefillSpeed
from firn.engine.chunks import ChunkSizes
from tests.hash_engine import HashEngine
from tests.hash_runner import prompt_of

SIZES = (64, 128, 256, 512, 1024, 2048, 4096, 8192)


def taught(*, base_s: float, per_depth_s: float = 0.0, **options: float) -> ChunkSizes:
    """Sizes after chunks that took `base_s` per token, and more after a longer context."""
    sizes = ChunkSizes(512, PrefillSpeed(), largest=int(options.pop("largest", 2048)), **options)
    for start in (0, 512, 4096, 16_384, 65_536) * 3:
        mid = start + 256
        sizes._speed.observe(start, start + 512, 512 * (base_s + per_depth_s * mid))
    return sizes


def test_before_any_measurement_chunks_have_the_usual_size() -> None:
    assert ChunkSizes(512, PrefillSpeed(), largest=2048).choose(0, alone=True) == 512


def test_fixed_chunks_stay_fixed() -> None:
    sizes = ChunkSizes(512, PrefillSpeed())
    sizes._speed.observe(0, 512, 100.0)
    assert sizes.choose(100_000, alone=False) == 512


def test_a_lone_prompt_gets_large_chunks_and_others_get_the_usual() -> None:
    fast = taught(base_s=1e-4)
    assert fast.choose(0, alone=True) == 2048
    assert fast.choose(0, alone=False) == 512
    slow = taught(base_s=4e-3)
    assert slow.choose(0, alone=True) == 512, "never below the usual behind a short context"


def test_chunks_shrink_with_depth() -> None:
    deep = taught(base_s=2e-4, per_depth_s=1e-8)
    alone = [deep.choose(depth, alone=True) for depth in (0, 20_000, 100_000, 400_000)]
    together = [deep.choose(depth, alone=False) for depth in (0, 20_000, 100_000, 400_000)]
    assert alone == sorted(alone, reverse=True)
    assert together == sorted(together, reverse=True)
    assert alone[0] == 2048 > alone[-1]
    assert together[0] == 512 > together[-1] == MIN_CHUNK


@pytest.mark.parametrize("max_step_s", [0.02, 0.05, 0.2, 3.0])
@pytest.mark.parametrize("depth", [0, 8000, 64_000])
def test_the_users_limit_bounds_a_chunk_while_others_wait(max_step_s: float, depth: int) -> None:
    sizes = taught(base_s=1e-4, per_depth_s=2e-9, max_step_s=max_step_s, largest=8192)
    chunk = sizes.choose(depth, alone=False)
    took = chunk * (1e-4 + 2e-9 * (depth + chunk / 2))
    assert took <= 1.02 * max_step_s or chunk == MIN_CHUNK
    assert chunk in SIZES


@given(
    st.lists(st.tuples(st.integers(0, 200_000), st.integers(1, 4096), st.floats(1e-6, 100.0))),
    st.integers(0, 1_000_000),
    st.booleans(),
)
def test_whatever_was_measured_a_chunk_has_one_of_the_sizes(
    seen: list[tuple[int, int, float]], depth: int, alone: bool
) -> None:
    sizes = ChunkSizes(512, PrefillSpeed(), largest=2048)
    for start, n_tokens, seconds in seen:
        sizes._speed.observe(start, start + n_tokens, seconds)
    assert sizes.choose(depth, alone=alone) in SIZES


def test_a_machine_that_gets_slower_is_noticed() -> None:
    sizes = taught(base_s=1e-4)
    for _ in range(60):
        sizes._speed.observe(0, 2048, 2048 * 5e-3)
    assert sizes.choose(0, alone=True) <= 512


def test_after_a_device_fault_chunks_are_half_as_large() -> None:
    sizes = taught(base_s=1e-5)
    before = sizes.choose(0, alone=True)
    sizes.shrink()
    assert sizes.choose(0, alone=True) == before // 2
    for _ in range(9):
        sizes.shrink()
    assert sizes.choose(0, alone=True) == MIN_CHUNK
    small = ChunkSizes(8, PrefillSpeed())
    small.shrink()
    assert small.choose(0, alone=True) == 8


def test_the_engine_gives_a_lone_prompt_large_chunks_and_several_small_ones() -> None:
    with HashEngine(chunk=64, largest_chunk=512) as lab:
        lab.submit(prompt_of(1, 2000), 2).wait().check()
        sizes = [end - start for start, end in lab.runner.prefills]
        assert sizes[0] == 64
        assert max(sizes) >= 512
        lab.runner.prefills.clear()
        gate = lab.hold()
        both = [lab.submit(prompt_of(i, 2000), 2) for i in (2, 3)]
        gate.set()
        for outcome in both:
            outcome.wait().check()
        first = lab.runner.prefills[: len(lab.runner.prefills) // 3]
        assert max(end - start for start, end in first) <= 64, "two prompts take turns"


def test_chunks_of_exact_mode_never_change() -> None:
    with HashEngine(chunk=8, largest_chunk=64, aligned=True) as lab:
        lab.submit(prompt_of(1, 400), 2).wait().check()
        assert {end - start for start, end in lab.runner.prefills} <= {8, 7}
