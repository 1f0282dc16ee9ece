"""An Apple GPU: MLX as it is, within limits on its memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import mlx.core as mx

from firn.backends.apple import AppleKernels
from firn.backends.apple_transfers import find_transfers
from firn.backends.contract import BackendOptions, ComputeBackend
from firn.backends.memory import DeviceMemory
from firn.backends.profile import DeviceProfile
from firn.backends.warm_up import warm_up, warm_up_speculator
from firn.cache.arrays.transfers import Transfers
from firn.core.memory_plan import MemoryPlan
from firn.host import mac
from firn.models.decode.runner import Runner
from firn.models.decode.step_profile import StepProfile
from firn.models.decode.steps import Speculator


class MetalMemory(DeviceMemory):
    """Models may use what the driver recommends for one process.

    MLX's own limit on memory stays what MLX chooses, one and a half times that. Above it MLX waits for
    the device after every command buffer, in a busy loop, and a plan's limit moves below what is in use
    as soon as another program grows.
    """

    def __init__(
        self,
        profile: DeviceProfile,
        mlx: Any,
        *,
        is_short: Callable[[], bool] = mac.is_short_of_memory,
    ) -> None:
        """mlx: has MLX's calls that only Metal knows."""
        super().__init__(profile)
        self._mlx = mlx
        self._is_short_of_memory = is_short

    @property
    def total_nbytes(self) -> int:
        return int(self._mlx.device_info()["max_recommended_working_set_size"])

    def _is_short(self) -> bool:
        return self._is_short_of_memory()

    def limit(self, plan: MemoryPlan) -> None:
        super().limit(plan)
        if plan.wired_nbytes:
            self._mlx.set_wired_limit(plan.wired_nbytes)


FUSED_HEAD_DIMS = frozenset({64, 72, 80, 96, 128})
"""MLX has kernels for 192 and 256, too, but uses them on an M5 only, and for chunks of 1024 tokens."""


class MetalBackend(ComputeBackend):
    profile = DeviceProfile(
        name="metal",
        label="Metal",
        prefill_chunk=512,
        largest_chunk=2048,
        dispatch_waits=True,  # MLX lets only a few command buffers wait
        memory_name="Metal's working set",
        fused_head_dims=FUSED_HEAD_DIMS,
        steps=StepProfile(slope=0.15),
    )

    def __init__(self, mlx: Any = mx) -> None:
        """mlx: has MLX's calls that only Metal knows."""
        super().__init__()
        self._mlx = mlx
        self._is_exact = False
        self.memory = MetalMemory(self.profile, mlx)

    def install(self, options: BackendOptions) -> None:
        self._is_exact = options.exact

    @property
    def arithmetic(self) -> str:
        return self._kernels.identity() if self._is_exact else ""

    @cached_property
    def transfers(self) -> Transfers:
        return find_transfers(self._mlx)

    def warm_up(
        self, model: Any, make_runner: Callable[[Speculator], Runner], speculator: Speculator
    ) -> None:
        warm_up(make_runner(warm_up_speculator(model, speculator)))

    @property
    def _kernels(self) -> AppleKernels:
        return AppleKernels.here(self._mlx.device_info())

    def describe(self, cache_folder: Path) -> Iterator[tuple[str, str, bool]]:
        yield from self._kernels.findings()


def backend() -> MetalBackend:
    return MetalBackend()
