"""The source of the products kernel, run on a CPU: see on_cpu.py."""

from __future__ import annotations

import numpy as np
import pytest

from firn.backends.cuda.products import ALONE, N_COLUMNS, SHARED, Build
from tests.backends.cuda.on_cpu import Bits, KernelOnCpu, bfloat16, float32, has_compiler

BUILDS = [*ALONE, *SHARED]
Kernels = dict[Build, KernelOnCpu]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    if not has_compiler():
        pytest.skip("there is no compiler for C++")
    made = KernelOnCpu.compiled(BUILDS, tmp_path_factory.mktemp("kernels"))
    return dict(zip(BUILDS, made, strict=True))


def some(rng: np.random.Generator, *shape: int) -> Bits:
    return bfloat16(rng.standard_normal(shape, dtype=np.float32))


@pytest.mark.parametrize("build", BUILDS, ids=str)
def test_every_build_multiplies(build: Build, kernels: Kernels) -> None:
    kernel, rng = kernels[build], np.random.default_rng(build.n_tokens)
    # More chunks than are copied ahead, the last one partial, for two blocks of tokens; less of
    # both, for two blocks of columns. Copies are made early and late.
    for n_inner, n_tokens, n_blocks, late in (
        (build.chunk * (build.n_stages + 1) + 8, build.n_tokens + 3, 1, True),
        (build.chunk * (build.n_stages + 1) + 8, build.n_tokens // 2, 1, False),
        (build.chunk - 8, build.n_tokens // 2 + 1, 2, True),
    ):
        x, weight = some(rng, n_tokens, n_inner), some(rng, n_blocks * N_COLUMNS, n_inner)
        want = float32(x) @ float32(weight).T
        got = kernel.product(x, weight, late=late)
        assert np.abs(got - want).max() < 2**-8 * np.abs(want).max(), (n_inner, late)


@pytest.mark.parametrize("builds", [ALONE, SHARED], ids=["alone", "shared"])
def test_a_token_s_result_does_not_depend_on_the_others(
    builds: tuple[Build, ...], kernels: Kernels
) -> None:
    """The order of a sum shows in its last bits, and in all of them where large values cancel out."""
    rng = np.random.default_rng(1)
    large, small = some(rng, 50, 500), some(rng, 50, 24)
    x = np.concatenate([large, large ^ 0x8000, small], axis=1)  # flips the sign
    half = some(rng, N_COLUMNS, 500)
    weight = np.concatenate([half, half, some(rng, N_COLUMNS, 24) - (8 << 7)], axis=1)  # / 2 ** 8
    results = []
    for build in builds:
        results.append(kernels[build].product(x[: build.n_tokens], weight, late=False)[:9])
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])


def test_blocks_fit_the_shared_memory_of_smaller_gpus() -> None:
    assert max(build.shared_nbytes for build in (*ALONE, *SHARED)) <= 99 << 10
