"""The contract of a backend, and what surrounds it."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import pytest

from firn import backends
from firn.backends.contract import ComputeBackend, limit_buffer_cache
from firn.backends.patches import Patches
from firn.core.memory_plan import MemoryOptions, MemoryPlan, ModelMemory, plan_memory
from tests.backends.fakes import FakeMetal


def plan_of(backend: ComputeBackend, *, wired_nbytes: int = 0) -> MemoryPlan:
    options = MemoryOptions(chunk=256, wired_nbytes=wired_nbytes)
    return plan_memory(backend.memory(), ModelMemory(1 << 20, 1 << 10, 0), options)


def test_the_device_here_has_memory() -> None:
    here = backends.find()
    assert here.profile.name in backends.KINDS
    assert here.memory_nbytes > 1 << 28
    now = here.memory()
    assert now.available_nbytes is None or 0 < now.available_nbytes <= now.physical_nbytes * 2
    report = here.report()
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
    here.limit(plan)
    before = mx.set_cache_limit(plan.buffer_cache_nbytes)
    assert before == plan.buffer_cache_nbytes
    limit_buffer_cache(plan)


@pytest.mark.parametrize("wired_nbytes", [0, 1 << 19])
def test_metal_is_held_to_limits_of_its_own(wired_nbytes: int) -> None:
    metal = FakeMetal()
    plan = plan_of(metal, wired_nbytes=wired_nbytes)
    metal.limit(plan)
    wired = [("wired", wired_nbytes)] if wired_nbytes else []
    assert metal.recorded.limits == [("memory", plan.limit_nbytes), *wired]


class Owner:
    @staticmethod
    def one() -> int:
        return 1


def test_patches_are_listed_and_taken_out_in_reverse() -> None:
    patches, undone = Patches(), []
    plain: Any = Owner.one
    patches.replace(Owner, "one", lambda: 2)
    patches.replace(Owner, "one", lambda: 3)
    patches.add("a table", lambda: undone.append(Owner.one()))
    assert patches.names == ["Owner.one", "Owner.one", "a table"]
    assert Owner.one() == 3
    patches.undo()
    assert Owner.one is plain
    assert (undone, patches.names) == ([3], [])


@pytest.mark.skipif(mx.default_device() != mx.Device(mx.cpu), reason="there is a GPU here")
def test_what_a_cpu_replaces_can_be_taken_out(tmp_path: Any) -> None:
    """In a process of its own: the tests of this one share a BLAS."""
    import subprocess
    import sys

    code = f"""if True:
        from pathlib import Path
        import mlx.core as mx
        from firn import backends
        from firn.backends.contract import BackendOptions
        from firn.backends.cpu import softmax
        from firn.backends.cpu.imports import MLX, find_slots
        ours = softmax.attention
        softmax._seconds = lambda function: 1.0 if function is ours else 2.0
        def product():
            a = mx.random.normal((64, 64), key=mx.random.key(0))
            return (a @ a).tolist()
        def state():
            slots = find_slots(MLX, ("cblas_sgemm", "powf"))
            functions = mx.fast.rope, mx.fast.scaled_dot_product_attention, mx.sigmoid
            return functions, [slot.get() for slot in slots.values()]
        mx.eval(mx.ones(1) ** 2)
        product()
        before = state()
        backend = backends.named("cpu")
        backend.install(BackendOptions(cache_folder=Path({str(tmp_path)!r})))
        product()
        assert state()[0] != before[0]
        print(*backend.patches.names, sep="\\n")
        backend.uninstall()
        assert state() == before, (state(), before)
    """
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "mlx.core.fast.rope" in done.stdout.split()


def test_padding_shapes_no_layer_that_cannot_take_it_back() -> None:
    from mlx_lm.models.cache import ArraysCache, KVCache

    cuda = backends.named("cuda")
    base = ComputeBackend.step_profile
    assert base(cuda, None, lambda: [KVCache()]).shapes == cuda.profile.steps.shapes
    assert base(cuda, None, lambda: [ArraysCache(2)]).shapes == ()
    assert math.isclose(cuda.profile.steps.slope, 0.008)
