"""The device that this machine computes on, its memory, and MLX's own limits on that memory."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from firn.core.memory_plan import DeviceKind, MachineMemory, MemoryPlan
from firn.host.machine import memory
from firn.models.cuda import pool

CHUNKS: dict[DeviceKind, int] = {"cpu": 256, "metal": 512, "cuda": 2048}
"""Prompt tokens read between two decode steps. The answer's bits depend on it in exact mode."""
LARGEST_CHUNKS: dict[DeviceKind, int] = {"cpu": 256, "metal": 2048, "cuda": 8192}
"""The same while no row decodes and the context is short."""


@dataclass(frozen=True, slots=True)
class Device:
    kind: DeviceKind
    memory_nbytes: int
    """Memory that models and caches may use."""

    @property
    def prefill_chunk(self) -> int:
        return CHUNKS[self.kind]

    @property
    def largest_chunk(self) -> int:
        return LARGEST_CHUNKS[self.kind]


def device() -> Device:
    """The default device."""
    if mx.default_device() == mx.Device(mx.cpu):
        return Device("cpu", memory().total)
    info = mx.device_info()
    if mx.metal.is_available():
        return Device("metal", int(info["max_recommended_working_set_size"]))
    for key in ("memory_size", "total_memory", "free_memory"):
        if key in info:
            return Device("cuda", int(info[key]))
    return Device("cuda", int(mx.get_memory_limit()))


def machine_memory(device: Device) -> MachineMemory:
    """The machine's memory now, for a plan. What MLX holds in this process counts as available."""
    now = memory()
    available = now.available
    if device.kind == "cuda":
        free = mx.device_info().get("free_memory")
        available = None if free is None else int(free) + pool.unused_nbytes()
    if available is not None:
        available += used_nbytes()
    return MachineMemory(device.kind, device.memory_nbytes, now.total, available)


def set_limits(kind: DeviceKind, plan: MemoryPlan) -> None:
    """Hold MLX to the plan. Call this once, after the weights are loaded."""
    mx.clear_cache()
    limit_buffer_cache(plan)
    if kind == "metal":
        mx.set_memory_limit(plan.limit_nbytes)
        if plan.wired_nbytes:
            mx.set_wired_limit(plan.wired_nbytes)
    mx.reset_peak_memory()  # the peak while loading says nothing about prefill


def limit_buffer_cache(plan: MemoryPlan) -> None:
    """Limit MLX's buffer cache. From any thread."""
    mx.set_cache_limit(plan.buffer_cache_nbytes)


def active_nbytes() -> int:
    """Bytes of all arrays right now. From any thread."""
    return int(mx.get_active_memory())


def used_nbytes() -> int:
    """Bytes that MLX holds in this process, including buffers kept for reuse. From any thread."""
    return int(mx.get_active_memory() + mx.get_cache_memory())


def free_unused() -> None:
    """Release the memory that MLX and the driver keep for reuse. From any thread."""
    mx.clear_cache()
    pool.trim()


def allocated_nbytes() -> dict[str, int]:
    """Bytes of MLX's allocator: in use, and freed but kept for reuse. From any thread."""
    return {"active": active_nbytes(), "cached": mx.get_cache_memory()}
