"""The sources of the kernels for recurrences, run on a CPU: see on_cpu.py."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from firn.backends.cuda import scans
from firn.backends.cuda.recurrence import LANES, MAX_CHANNELS, N_THREADS, Rule, tile_of
from tests.backends.cuda.on_cpu import bfloat16, float32, has_compiler
from tests.backends.cuda.recurrence_on_cpu import Build, KernelOnCpu, SelectiveBuild, SumBuild
from tests.backends.recurrence.reference import (
    Arguments,
    Shape,
    WkvArguments,
    in_float64,
    linear_in_float64,
    relative,
    wkv_in_float64,
)

DELTAS = [
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
LINEARS = [
    Build(width, False, is_half, Rule.LINEAR, has_beta)
    for width, is_half, has_beta in ((32, False, False), (64, True, True), (16, False, True))
]
WKVS = [
    Build(width, True, is_half, Rule.WKV, False) for width, is_half in ((64, False), (32, True))
]
SELECTIVES = [SelectiveBuild(16, False), SelectiveBuild(8, True)]
SUMS = [SumBuild(False), SumBuild(True)]
Kernels = dict[Any, KernelOnCpu]
LENGTHS = [1, 2, 9, 37]


def close(build: Any) -> float:
    """How near y is to float64."""
    return 2**-8 if build.is_half else 1e-6


def exact(build: Any, *arrays: Any) -> list[Any]:
    """Rounded to the build's type of values."""
    return [float32(bfloat16(a)) if build.is_half else a for a in arrays]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    if not has_compiler():
        pytest.skip("there is no compiler for C++")
    builds = [*DELTAS, *LINEARS, *WKVS, *SELECTIVES, *SUMS]
    return KernelOnCpu.compiled(builds, tmp_path_factory.mktemp("recurrences"))


def some(build: Build, n_tokens: int, *, n_values: int = 20) -> Arguments:
    shape = Shape(
        n_tokens, n_batch=2, width=build.width, n_values=n_values, per_channel=build.per_channel
    )
    given = Arguments.random(shape, np.random.default_rng(n_tokens + build.width))
    q, k, v = exact(build, given.q, given.k, given.v)
    return replace(given, q=q, k=k, v=v)


@pytest.mark.parametrize("build", DELTAS, ids=str)
@pytest.mark.parametrize("n_tokens", LENGTHS)
def test_every_build_is_the_rule(build: Build, n_tokens: int, kernels: Kernels) -> None:
    given = some(build, n_tokens)
    y, after = kernels[build].delta(*given.all)
    want_y, want_after = in_float64(given)
    assert relative(after, want_after) < 1e-6
    assert relative(y, want_y) < close(build)


def test_a_state_does_not_depend_on_how_the_prompt_is_cut(kernels: Kernels) -> None:
    build = DELTAS[0]
    given = some(build, 37)
    _, whole = kernels[build].delta(*given.all)
    head = [a[:, :19] for a in given.all[:5]]
    _, state = kernels[build].delta(*head, given.state)
    _, state = kernels[build].delta(*(a[:, 19:] for a in given.all[:5]), state)
    np.testing.assert_array_equal(state, whole)


def test_rows_of_a_head_may_fill_no_block(kernels: Kernels) -> None:
    build = DELTAS[0]
    given = some(build, 3, n_values=5)
    y, after = kernels[build].delta(*given.all)
    want_y, want_after = in_float64(given)
    assert relative(after, want_after) < 1e-6
    assert relative(y, want_y) < 1e-6


@pytest.mark.parametrize("build", LINEARS, ids=str)
@pytest.mark.parametrize("n_tokens", LENGTHS)
def test_linear_attention(build: Build, n_tokens: int, kernels: Kernels) -> None:
    given = some(build, n_tokens)
    y, after = kernels[build].delta(*given.all)
    beta = given.beta if build.has_beta else np.ones_like(given.beta)
    want_y, want_after = linear_in_float64(*given.all[:4], given.state, beta)
    assert relative(after, want_after) < 1e-6
    assert relative(y, want_y) < close(build)


@pytest.mark.parametrize("build", WKVS, ids=str)
@pytest.mark.parametrize("n_tokens", LENGTHS)
def test_rwkv_7(build: Build, n_tokens: int, kernels: Kernels) -> None:
    shape = Shape(n_tokens, n_batch=2, n_heads=3, width=build.width, n_values=20)
    given = WkvArguments.random(shape, np.random.default_rng(n_tokens))
    r, k, v, a, b = exact(build, given.r, given.k, given.v, given.a, given.b)
    given = replace(given, r=r, k=k, v=v, a=a, b=b)
    y, after = kernels[build].wkv(*given.all)
    want_y, want_after = wkv_in_float64(given)
    assert relative(after, want_after) < 1e-6
    assert relative(y, want_y) < close(build)


@pytest.mark.parametrize("build", SELECTIVES, ids=str)
@pytest.mark.parametrize("n_tokens", LENGTHS)
def test_selective_scans(build: SelectiveBuild, n_tokens: int, kernels: Kernels) -> None:
    """With channels that fill no block."""
    rng, n_channels = np.random.default_rng(n_tokens), scans.N_CHANNELS + 3
    x = rng.standard_normal((2, n_tokens, n_channels)).astype(np.float32)
    delta = rng.exponential(1.0, x.shape).astype(np.float32)
    b, c = rng.standard_normal((2, 2, n_tokens, build.n_states)).astype(np.float32)
    x, delta, b, c = exact(build, x, delta, b, c)
    rate = -rng.exponential(1.0, (n_channels, build.n_states)).astype(np.float32)
    state = rng.standard_normal((2, n_channels, build.n_states)).astype(np.float32)
    y, after = kernels[build].selective(x, delta, b, c, rate, state)
    h, want = state.astype(np.float64), []
    for t in range(n_tokens):
        d, now = delta[:, t].astype(np.float64), x[:, t].astype(np.float64)
        h = np.exp(d[..., None] * rate) * h + (d * now)[..., None] * b[:, t][:, None]
        want.append((h * c[:, t][:, None]).sum(axis=-1))
    assert relative(after, h) < 1e-6
    assert relative(y, np.stack(want, axis=1)) < close(build)


@pytest.mark.parametrize("build", SUMS, ids=str)
@pytest.mark.parametrize("n_tokens", LENGTHS)
def test_gated_sums(build: SumBuild, n_tokens: int, kernels: Kernels) -> None:
    rng, n_channels = np.random.default_rng(n_tokens), scans.N_THREADS + 3
    x = rng.standard_normal((2, n_tokens, n_channels)).astype(np.float32)
    a, state = rng.random(x.shape).astype(np.float32), x[:, 0] + 1
    x, a = exact(build, x, a)
    y, after = kernels[build].gated_sum(x, a, state)
    h, want = state.astype(np.float64), []
    for t in range(n_tokens):
        h = a[:, t].astype(np.float64) * h + x[:, t]
        want.append(h)
    assert relative(after, h) < 1e-6
    assert relative(y, np.stack(want, axis=1)) < close(build)


def test_a_block_s_shared_memory_fits_every_gpu() -> None:
    width = LANES * MAX_CHANNELS
    for per_channel, n_widths in ((False, 2), (True, 5)):
        values = n_widths * width + N_THREADS // LANES + 2
        assert tile_of(per_channel=per_channel) * values * 4 <= 48 << 10
    of_scan = 2 * scans.TILE * (scans.N_CHANNELS + scans.MAX_STATES)
    assert of_scan * 4 <= 48 << 10
