"""The memory of an NVIDIA GPU, for a process that must not import MLX: by nvidia-smi."""

from __future__ import annotations

import contextlib
import functools
import subprocess
from importlib import metadata

from firn.core.units import MIB
from firn.host.machine import SystemMemory


def gpu_memory() -> SystemMemory | None:
    """Memory of the first NVIDIA GPU; None: MLX does not use it, or nvidia-smi failed."""
    if not _mlx_uses_cuda():
        return None
    command = [
        "nvidia-smi",
        "--query-gpu=memory.total,memory.free",
        "--format=csv,noheader,nounits",
    ]
    try:
        run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return None
    return parse_gpus(run.stdout)


@functools.cache
def _mlx_uses_cuda() -> bool:
    """Whether MLX runs on CUDA, judged by the installed packages: the front must not import MLX."""
    for package in ("mlx-cuda-13", "mlx-cuda-12", "mlx-cuda"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            metadata.distribution(package)
            return True
    return False


def parse_gpus(text: str) -> SystemMemory | None:
    """Parses nvidia-smi's lines "total, free" in MiB; MLX uses the first GPU."""
    total, _, free = text.strip().partition("\n")[0].partition(",")
    if not (total.strip().isdigit() and free.strip().isdigit()):
        return None
    return SystemMemory(int(total) * MIB, int(free) * MIB)
