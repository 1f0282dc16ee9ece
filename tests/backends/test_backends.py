"""The contract of a backend, and what surrounds it."""

from __future__ import annotations

import math

import mlx.core as mx
import pytest

from firn import backends
from firn.backends.contract import ComputeBackend
from firn.backends.memory import limit_buffer_cache
from firn.backends.report import report_of
from firn.core.memory_plan import MemoryOptions, MemoryPlan, ModelMemory, plan_memory
from tests.backends.fakes import FakeMetal


def plan_of(backend: ComputeBackend, *, wired_nbytes: int = 0) -> MemoryPlan:
    options = MemoryOptions(chunk=256, wired_nbytes=wired_nbytes)
    return plan_memory(backend.memory.now(), ModelMemory(1 << 20, 1 << 10, 0), options)


def test_the_device_here_has_memory() -> None:
    here = backends.find()
    assert here.profile.name in backends.KINDS
    assert here.memory.total_nbytes > 1 << 28
    now = here.memory.now()
    assert now.available_nbytes is None or 0 < now.available_nbytes <= now.physical_nbytes * 2
    report = report_of(here)
    assert report.profile is here.profile
    assert report.name


@pytest.mark.parametrize("kind", backends.KINDS)
def test_a_profile_says_which_device_it_is_of(kind: str) -> None:
    profile = backends.named(kind).profile
    assert profile.name == kind
    assert 0 < profile.prefill_chunk <= profile.largest_chunk
    assert profile.steps.widths[0] == 1


def test_mlx_is_held_to_the_plan() -> None:
    here = backends.find()
    plan = plan_of(here)
    here.memory.limit(plan)
    before = mx.set_cache_limit(plan.buffer_cache_nbytes)
    assert before == plan.buffer_cache_nbytes
    limit_buffer_cache(plan)


@pytest.mark.parametrize("wired_nbytes", [0, 1 << 19])
def test_metal_wires_what_is_asked_for(wired_nbytes: int) -> None:
    metal = FakeMetal()
    metal.memory.limit(plan_of(metal, wired_nbytes=wired_nbytes))
    assert metal.recorded.limits == ([("wired", wired_nbytes)] if wired_nbytes else [])


def test_metal_keeps_mlx_s_own_limit_on_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Above it MLX waits for the device after every command buffer, for as long as the process runs."""

    def refuse(nbytes: int) -> int:
        raise AssertionError(f"MLX is limited to {nbytes} bytes")

    metal = FakeMetal()
    monkeypatch.setattr(metal.recorded, "set_memory_limit", refuse, raising=False)
    monkeypatch.setattr(mx, "set_memory_limit", refuse)
    plan = plan_of(metal, wired_nbytes=1 << 19)
    metal.memory.limit(plan)
    limit_buffer_cache(plan)
    assert [kind for kind, _ in metal.recorded.limits] == ["wired"]


def test_padding_shapes_no_layer_that_cannot_take_it_back() -> None:
    from mlx_lm.models.cache import ArraysCache, KVCache

    cuda = backends.named("cuda")
    base = ComputeBackend.step_profile
    assert base(cuda, None, lambda: [KVCache()]).shapes == cuda.profile.steps.shapes
    assert base(cuda, None, lambda: [ArraysCache(2)]).shapes == ()
    assert math.isclose(cuda.profile.steps.slope, 0.008)
