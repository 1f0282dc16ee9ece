"""What exact reuse must know about how recurrences are computed."""

from __future__ import annotations

from pathlib import Path

import pytest

from firn.backends.contract import BackendOptions
from firn.backends.cpu import DELTA, CpuBackend
from firn.backends.cuda.delta import KernelDelta
from firn.backends.cuda.device import CHUNKED_DELTA, CudaBackend
from tests.cache.tiny import tiny


@pytest.mark.parametrize("exact", [True, False])
def test_a_root_says_how_the_delta_rule_is_computed(exact: bool, tmp_path: Path) -> None:
    backend = CpuBackend()
    backend.install(BackendOptions(exact=exact, blas="none", cache_folder=tmp_path))
    try:
        backend.widen(tiny("llama")()[0])
        assert DELTA.identity not in backend.arithmetic
        backend.widen(tiny("qwen3_next")()[0])
        assert (DELTA.identity in backend.arithmetic) is exact
    finally:
        backend.uninstall()


def test_another_form_has_another_identity() -> None:
    identities = {DELTA.identity, CHUNKED_DELTA.identity, KernelDelta(CHUNKED_DELTA).identity}
    assert len(identities) == 3


def test_an_nvidia_gpu_s_root_says_nothing_unless_it_must() -> None:
    backend = CudaBackend()
    backend.widen(tiny("qwen3_next")()[0])
    assert backend.arithmetic == "", "not exact"
