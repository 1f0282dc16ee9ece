"""Backends that stand in for devices that a test machine does not have."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import mlx.core as mx

from firn import backends
from firn.backends.contract import BackendOptions, ComputeBackend
from firn.backends.cuda.device import CudaBackend
from firn.backends.memory import DeviceMemory
from firn.backends.metal import MetalBackend
from firn.cache.arrays.transfers import Transfers
from firn.core.memory_plan import MachineMemory
from firn.host.machine import memory

if TYPE_CHECKING:
    import pytest


class RecordedMlx:
    """MLX's calls that only Metal knows, with this machine's memory."""

    def __init__(self) -> None:
        self.limits: list[tuple[str, int]] = []

    def device_info(self) -> dict[str, Any]:
        return {"max_recommended_working_set_size": memory().total * 3 // 4}

    def asarray(self, data: Any) -> mx.array:
        return mx.asarray(data)

    def set_wired_limit(self, nbytes: int) -> int:
        self.limits.append(("wired", nbytes))
        return 0


class FakeMetal(MetalBackend):
    """Every branch of an Apple GPU, computed by the machine's processor."""

    def __init__(self) -> None:
        self.recorded = RecordedMlx()
        super().__init__(self.recorded)


class FakeCudaMemory(DeviceMemory):
    @property
    def total_nbytes(self) -> int:
        return 1 << 34

    def _available_nbytes(self) -> int | None:
        return None


class FakeCuda(CudaBackend):
    """An NVIDIA GPU without its kernels and its driver."""

    def __init__(self) -> None:
        super().__init__()
        self.memory = FakeCudaMemory(self.profile)

    @property
    def transfers(self) -> Transfers:  # type: ignore[override]
        return Transfers()

    def install(self, options: BackendOptions) -> None:
        pass


FAKES: dict[str, type[ComputeBackend]] = {"metal": FakeMetal, "cuda": FakeCuda}


def pretend(kind: str, monkeypatch: pytest.MonkeyPatch) -> ComputeBackend:
    """From now on, this machine's device is of this kind."""
    made = FAKES[kind]() if kind in FAKES else backends.named(kind)
    monkeypatch.setattr(backends, "find", lambda: made)
    return made


def with_memory(
    backend: ComputeBackend, now: MachineMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend.memory, "now", lambda: now)


def is_on_cuda() -> bool:
    return mx.default_device() != mx.Device(mx.cpu) and not mx.metal.is_available()


def is_on_a_virtual_gpu() -> bool:
    """As on hosted Macs: it runs Metal's kernels, but not to a real GPU's bits."""
    return "Paravirtual" in str(mx.device_info().get("device_name", ""))
