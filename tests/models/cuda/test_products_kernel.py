"""The text of the products kernel, run on a CPU: see on_cpu.py."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from firn.models.cuda.products import MAX_TOKENS, NARROW, WIDE, Build
from tests.models.cuda.on_cpu import KernelOnCpu, bfloat16, float32, has_compiler

BUILDS = {(most, build) for builds in (NARROW, WIDE) for most, build in builds.items()}


@pytest.mark.parametrize(("most", "build"), sorted(BUILDS, key=str))
def test_every_build_multiplies(most: int, build: Build, tmp_path: Path) -> None:
    if not has_compiler():
        pytest.skip("there is no compiler for C++20")
    kernel = KernelOnCpu(tmp_path, build.template, shared_nbytes=build.shared_nbytes)
    rng = np.random.default_rng(most)
    # More chunks than are copied ahead, with as many tokens as fit; fewer of both.
    for n_chunks, n_tokens in ((build.n_stages + 2, most), (1, most // 2 + 1)):
        n_inner, n_out = 64 * n_chunks, 2 * build.n_columns
        x = bfloat16(rng.standard_normal((n_tokens, n_inner), dtype=np.float32))
        weight = bfloat16(rng.standard_normal((n_out, n_inner), dtype=np.float32))
        want = float32(x) @ float32(weight).T
        for late in (False, True):
            got = kernel.product(x, weight, late=late)
            assert np.abs(got - want).max() < 2**-8 * np.abs(want).max(), (n_chunks, late)


def test_blocks_fit_the_shared_memory_of_smaller_gpus() -> None:
    assert max(build.shared_nbytes for _, build in BUILDS) <= 99 << 10
    assert max(NARROW) == max(WIDE) == MAX_TOKENS
