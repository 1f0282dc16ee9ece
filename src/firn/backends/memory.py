"""The memory of a device: what there is, and how MLX is held to a plan."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx

from firn.backends.profile import DeviceProfile
from firn.core.memory_plan import MachineMemory, MemoryPlan
from firn.host.machine import memory


class DeviceMemory:
    """The machine's own memory. Thread-safe, except for `limit`."""

    def __init__(self, profile: DeviceProfile) -> None:
        self._profile = profile

    @property
    def total_nbytes(self) -> int:
        """What models and caches may use."""
        return memory().total

    def now(self) -> MachineMemory:
        """For a plan. What MLX holds in this process counts as available."""
        available = self._available_nbytes()
        return MachineMemory(
            self._profile.name,
            self.total_nbytes,
            memory().total,
            None if available is None else available + used_nbytes(),
            has_own_memory=self._profile.has_own_memory,
        )

    def while_serving(self) -> MachineMemory:
        """Like `now`, for a server that can shrink. Where the system asks for memory back, what MLX
        keeps for reuse is released, and nothing is available but what it has in use: the cache shrinks
        with each look until that is over."""
        now = self.now()
        if not self._is_short():
            return now
        self.free_unused()
        return replace(now, available_nbytes=active_nbytes())

    def limit(self, plan: MemoryPlan) -> None:
        """Hold MLX to the plan. Call this once, after the weights are loaded."""
        mx.clear_cache()
        limit_buffer_cache(plan)
        mx.reset_peak_memory()  # the peak while loading says nothing about prefill

    def free_unused(self) -> None:
        """Release the memory that MLX and the driver keep for reuse."""
        mx.clear_cache()

    def _is_short(self) -> bool:
        return False

    def _available_nbytes(self) -> int | None:
        return memory().available


def limit_buffer_cache(plan: MemoryPlan) -> None:
    """Limit MLX's buffer cache. From any thread."""
    mx.set_cache_limit(plan.buffer_cache_nbytes)


def active_nbytes() -> int:
    """Bytes of all arrays right now. From any thread."""
    return int(mx.get_active_memory())


def used_nbytes() -> int:
    """Bytes that MLX holds in this process, including buffers kept for reuse. From any thread."""
    return int(mx.get_active_memory() + mx.get_cache_memory())


def allocated_nbytes() -> dict[str, int]:
    """Bytes of MLX's allocator: in use, and freed but kept for reuse. From any thread."""
    return {"active": active_nbytes(), "cached": mx.get_cache_memory()}
