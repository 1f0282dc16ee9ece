"""What exact reuse must know about how recurrences are computed."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest

from firn.backends.contract import BackendOptions
from firn.backends.cpu import DELTA, CpuBackend
from firn.backends.cuda import recurrence
from firn.backends.cuda.device import CHUNKED_DELTA, CudaBackend
from firn.backends.cuda.recurrence import KernelBuild, KernelBuilds, KernelDelta, Rule
from tests.backends.recurrence.reference import Arguments, Shape
from tests.cache.tiny import tiny


@pytest.mark.parametrize("exact", [True, False])
def test_a_root_says_how_the_delta_rule_is_computed(exact: bool, tmp_path: Path) -> None:
    backend = CpuBackend()
    backend.install(BackendOptions(exact=exact, blas="none", cache_folder=tmp_path))
    try:
        backend.weights.widen(tiny("llama")()[0])
        assert DELTA.identity not in backend.arithmetic
        backend.weights.widen(tiny("qwen3_next")()[0])
        assert (DELTA.identity in backend.arithmetic) is exact
    finally:
        backend.uninstall()


def test_another_form_has_another_identity() -> None:
    kernel = KernelDelta(KernelBuilds(), CHUNKED_DELTA)
    assert len({DELTA.identity, CHUNKED_DELTA.identity, kernel.identity}) == 3


def test_what_was_stored_before_is_found_where_nothing_changed() -> None:
    assert DELTA.identity == "delta-32-16-32768-262144"
    assert KernelDelta(_builds(fault=None), CHUNKED_DELTA).identity == (
        "delta-kernel-8 delta-64-16-0-9223372036854775807"
    )


def test_a_machine_whose_kernel_fails_has_another_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bits differ, and a shared store holds both machines' records."""
    build = KernelBuild(Rule.DELTA, 16, 24, False)
    monkeypatch.setattr(recurrence, "delta_by_kernel", lambda *_: pytest.fail("it does not work"))
    backend = CudaBackend()
    backend.recurrences.is_exact = True
    backend.weights.widen(tiny("qwen3_next")()[0])
    works = backend.arithmetic
    rule = backend.recurrences.rule
    assert isinstance(rule, KernelDelta)
    rule.builds.assume(build, "the driver is too old")
    given = Arguments.random(Shape(5), np.random.default_rng(0)).on_device
    mx.eval(rule(*given))
    assert backend.arithmetic.startswith(works)
    assert CHUNKED_DELTA.identity in backend.arithmetic.removeprefix(works)


def test_other_rules_without_a_kernel_change_no_root_of_this_one() -> None:
    builds = _builds(fault=None)
    builds.assume(KernelBuild(Rule.WKV, 16, 16, True), "the driver is too old")
    assert KernelDelta(builds, CHUNKED_DELTA).identity == recurrence.DELTA_IDENTITY


def _builds(*, fault: str | None) -> KernelBuilds:
    builds = KernelBuilds()
    builds.assume(KernelBuild(Rule.DELTA, 16, 24, False), fault)
    return builds


def test_an_nvidia_gpu_s_root_says_nothing_unless_it_must() -> None:
    backend = CudaBackend()
    backend.weights.widen(tiny("qwen3_next")()[0])
    assert backend.arithmetic == "", "not exact"
