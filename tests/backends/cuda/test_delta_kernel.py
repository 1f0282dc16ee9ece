"""The source of the delta rule's kernel, run on a CPU: see on_cpu.py."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from firn.backends.cuda.delta import LANES, MAX_CHANNELS, N_THREADS, tile_of
from tests.backends.cuda.delta_on_cpu import Build, DeltaOnCpu
from tests.backends.cuda.on_cpu import bfloat16, float32, has_compiler
from tests.backends.recurrence.reference import Arguments, Shape, in_float64, relative

BUILDS = [
    Build(width, per_channel, is_half)
    for width, per_channel, is_half in (
        (32, False, False),
        (32, True, True),
        (64, True, False),
        (64, False, True),
        (8, True, False),
        (192, False, True),
    )
]
Kernels = dict[Build, DeltaOnCpu]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    if not has_compiler():
        pytest.skip("there is no compiler for C++")
    return DeltaOnCpu.compiled(BUILDS, tmp_path_factory.mktemp("delta"))


def some(build: Build, n_tokens: int, *, n_values: int = 20) -> Arguments:
    shape = Shape(
        n_tokens, n_batch=2, width=build.width, n_values=n_values, per_channel=build.per_channel
    )
    given = Arguments.random(shape, np.random.default_rng(n_tokens + build.width))
    if build.is_half:
        q, k, v = (float32(bfloat16(a)) for a in (given.q, given.k, given.v))
        given = replace(given, q=q, k=k, v=v)
    return given


@pytest.mark.parametrize("build", BUILDS, ids=str)
@pytest.mark.parametrize("n_tokens", [1, 2, 9, 37])
def test_every_build_is_the_rule(build: Build, n_tokens: int, kernels: Kernels) -> None:
    given = some(build, n_tokens)
    y, after = kernels[build](*given.all)
    want_y, want_after = in_float64(given)
    assert relative(after, want_after) < 1e-6
    assert relative(y, want_y) < (2**-8 if build.is_half else 1e-6)


def test_a_state_does_not_depend_on_how_the_prompt_is_cut(kernels: Kernels) -> None:
    build = BUILDS[0]
    given = some(build, 37)
    _, whole = kernels[build](*given.all)
    head = [a[:, :19] for a in given.all[:5]]
    _, state = kernels[build](*head, given.state)
    _, state = kernels[build](*(a[:, 19:] for a in given.all[:5]), state)
    np.testing.assert_array_equal(state, whole)


def test_rows_of_a_head_may_fill_no_block(kernels: Kernels) -> None:
    build = BUILDS[0]
    given = some(build, 3, n_values=5)
    y, after = kernels[build](*given.all)
    want_y, want_after = in_float64(given)
    assert relative(after, want_after) < 1e-6
    assert relative(y, want_y) < 1e-6


def test_a_block_s_shared_memory_fits_every_gpu() -> None:
    width = LANES * MAX_CHANNELS
    for per_channel in (False, True):
        values = (2 + per_channel) * width + N_THREADS // LANES + 2
        assert tile_of(per_channel) * values * 4 <= 48 << 10
