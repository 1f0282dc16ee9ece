"""The devices that models are computed on: one backend each, behind one contract (`contract`).

    metal   an Apple GPU; special in its memory only, and warmed up
    cpu     a Linux CPU: BLAS, softmax, rotary positions, float32 weights
    cuda    an NVIDIA GPU: few shapes, traced steps, kernels, copies over the bus

CPU and CUDA share `recurrence`: recurrent layers, for which mlx-lm has kernels on Metal only.

`find` is the only place that asks which device this machine has. Nothing outside this folder does: it
asks the backend for facts (`profile`) or for work. Assembly, the command line and the front may import
this package; what they hand on (`Execution`, `Transfers`) belongs to the packages that use it.

Nothing is imported until a backend is asked for: the front has no MLX.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from firn.backends.contract import ComputeBackend
    from firn.host.machine import SystemMemory

KINDS = ("cpu", "metal", "cuda")


def find() -> ComputeBackend:
    """The backend of the device that MLX uses in this process."""
    import mlx.core as mx

    if mx.default_device() == mx.Device(mx.cpu):
        return named("cpu")
    return named("metal" if mx.metal.is_available() else "cuda")


def named(kind: str) -> ComputeBackend:
    """A backend of one of KINDS, whatever this machine has."""
    backend: ComputeBackend = import_module(f"{__name__}.{kind}").backend()
    return backend


def memory_without_mlx() -> SystemMemory | None:
    """Memory of the device that a process with MLX would use, if that is not the machine's own; None: it
    is, or it cannot be told. May start a program."""
    memory: SystemMemory | None = import_module(f"{__name__}.cuda.smi").gpu_memory()
    return memory
