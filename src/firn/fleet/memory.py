"""What a model needs while it is loaded, and what all models together may use.

Until a model has been loaded once, its need is estimated from the sizes of its files. Then its
process reports the weights and the most that live requests have used. Stored prefixes and the
process itself count with fixed amounts.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from firn.host import machine

MIB, GIB = 1 << 20, 1 << 30
PROCESS_NBYTES = 256 * MIB
"""Python, MLX and their libraries."""
RECORDS_FLOOR_NBYTES = 64 * MIB
"""The least for stored prefixes; what exceeds it gives way to other models."""
LIVE_FLOOR_NBYTES = 64 * MIB
LIVE_SHARE = 0.1
"""Estimate of what requests use, as a share of the weights, before anything was measured."""
CONVERSATION_TOKENS = 4096
"""A model should have room for at least one conversation of this length."""
HEADROOM_SHARE = 0.1
"""The share of the machine's memory that is left to everything else."""
SMALL_MAC_NBYTES = 36 * GIB


@dataclass(frozen=True, slots=True)
class Footprint:
    weights_nbytes: int
    live_nbytes: int = LIVE_FLOOR_NBYTES
    records_nbytes: int = RECORDS_FLOOR_NBYTES
    process_nbytes: int = PROCESS_NBYTES

    @property
    def nbytes(self) -> int:
        return self.weights_nbytes + self.live_nbytes + self.records_nbytes + self.process_nbytes


def estimate(folder: Path | None) -> Footprint:
    """From the files in its folder. folder None: the model is not on this machine yet."""
    weights = 0
    if folder is not None:
        files = filter(
            os.path.isfile, folder.glob("*.safetensors")
        )  # the hub's links may be dangling
        weights = sum(path.stat().st_size for path in files)
    return Footprint(weights, live_nbytes=max(LIVE_FLOOR_NBYTES, int(LIVE_SHARE * weights)))


def measured(report: Mapping[str, Any], before: Footprint) -> Footprint:
    """From its process's report. Live requests may use again what they have used once."""
    row = report["bytes_per_row"] + CONVERSATION_TOKENS * report["bytes_per_token"]
    peak = max(report["live_peak"], row)
    earlier = before.live_nbytes if before.weights_nbytes == report["weights"] else 0
    return Footprint(report["weights"], live_nbytes=max(peak, earlier))


@dataclass(frozen=True, slots=True)
class Room:
    """Memory for all models. free_nbytes: what the machine has left; infinite: unknown."""

    budget_nbytes: int
    free_nbytes: float


def room(limit_nbytes: int) -> Room:
    """May start a program (macOS, NVIDIA), so not for the asyncio thread.

    limit_nbytes: set by the user; 0: derived from the device's memory.
    """
    now = gpu_memory() or machine.memory()
    budget = limit_nbytes or int(now.total * usable_share(now.total))
    free = math.inf if now.available is None else float(now.available)
    return Room(budget, free)


def usable_share(total_nbytes: int, *, platform: str = sys.platform) -> float:
    """The share of a machine's memory for models. A Mac's GPU may be allowed less; a process
    reports how much."""
    if platform == "darwin":
        return 2 / 3 if total_nbytes <= SMALL_MAC_NBYTES else 3 / 4
    return 1 - HEADROOM_SHARE


def gpu_memory() -> machine.SystemMemory | None:
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


def parse_gpus(text: str) -> machine.SystemMemory | None:
    """Parses nvidia-smi's lines "total, free" in MiB; MLX uses the first GPU."""
    total, _, free = text.strip().partition("\n")[0].partition(",")
    if not (total.strip().isdigit() and free.strip().isdigit()):
        return None
    return machine.SystemMemory(int(total) * MIB, int(free) * MIB)
