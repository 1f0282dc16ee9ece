"""What this machine computes on, and how much memory that has."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx
from mlx_lm.utils import maybe_set_recommended_wired_limit

from firn.machine import memory

CHUNKS = {"cpu": 256, "metal": 512, "cuda": 2048}
ALLOCATOR_SHARE = 0.05
"""MLX keeps freed buffers for reuse; this much of the memory is enough for that."""


@dataclass(frozen=True, slots=True)
class Device:
    kind: str
    """cpu, metal or cuda."""
    memory_nbytes: int
    """What models and caches may fill."""

    @property
    def prefill_chunk(self) -> int:
        return CHUNKS[self.kind]


def device() -> Device:
    """The default device, with MLX set up for a server on it."""
    found = describe()
    mx.set_cache_limit(int(found.memory_nbytes * ALLOCATOR_SHARE))
    if found.kind == "metal":
        maybe_set_recommended_wired_limit()
    return found


def active_nbytes() -> int:
    """What arrays take right now. From any thread."""
    return int(mx.get_active_memory())


def describe() -> Device:
    if mx.default_device() == mx.Device(mx.cpu):
        return Device("cpu", memory().total)
    info = mx.device_info()
    if mx.metal.is_available():
        return Device("metal", int(info["max_recommended_working_set_size"]))
    for key in ("memory_size", "total_memory", "free_memory"):
        if key in info:
            return Device("cuda", int(info[key]))
    return Device("cuda", int(mx.get_memory_limit()))


def free_nbytes(found: Device) -> int:
    """What is left right now, for a default cache size."""
    if found.kind == "cpu":
        return memory().available or found.memory_nbytes // 2
    return max(found.memory_nbytes - mx.get_active_memory(), 0)


def allocated_nbytes() -> dict[str, int]:
    """What MLX's allocator holds: in use, and freed but kept for reuse. From any thread."""
    return {"active": active_nbytes(), "cached": mx.get_cache_memory()}
