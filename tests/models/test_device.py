"""What this machine computes on."""

from __future__ import annotations

import mlx.core as mx
import pytest

from firn.core.memory_plan import DeviceKind, MemoryOptions, ModelMemory, plan_memory
from firn.models.device import CHUNKS, Device, device, machine_memory, set_limits


def test_the_device_has_a_kind_and_memory() -> None:
    here = device()
    assert here.kind in CHUNKS
    assert here.memory_nbytes > 1 << 28
    now = machine_memory(here)
    assert now.available_nbytes is None or 0 < now.available_nbytes <= now.physical_nbytes * 2


@pytest.mark.parametrize(("kind", "chunk"), [("cpu", 256), ("metal", 512), ("cuda", 2048)])
def test_the_prefill_chunk_is_the_devices(kind: DeviceKind, chunk: int) -> None:
    assert Device(kind, 1 << 30).prefill_chunk == chunk


def test_mlx_is_held_to_the_plan() -> None:
    plan = plan_memory(
        machine_memory(device()), ModelMemory(1 << 20, 1 << 10, 0), MemoryOptions(chunk=256)
    )
    set_limits("cpu", plan)
    before = mx.set_cache_limit(plan.buffer_cache_nbytes)
    assert before == plan.buffer_cache_nbytes
