"""What a model needs while it is loaded, and what all models together may take.

Until a model has been loaded once, the sizes of its files say. Then its process reports: weights, the
most that live requests have taken, the least for stored prefixes, and what the process itself takes.
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
"""The least for stored prefixes; any beyond that give way to other models."""
LIVE_FLOOR_NBYTES = 64 * MIB
LIVE_SHARE = 0.1
"""What requests may take, as a share of the weights, before anything was measured."""
CONVERSATION_TOKENS = 4096
"""A model should have room for at least one conversation of this length."""
HEADROOM_SHARE = 0.1
"""The share of the machine's memory for everything else on it."""
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
    """By the files of its folder. folder: None: the model is not on this machine yet."""
    weights = 0
    if folder is not None:
        files = filter(
            os.path.isfile, folder.glob("*.safetensors")
        )  # the hub's links may lead nowhere
        weights = sum(path.stat().st_size for path in files)
    return Footprint(weights, live_nbytes=max(LIVE_FLOOR_NBYTES, int(LIVE_SHARE * weights)))


def measured(report: Mapping[str, Any], before: Footprint) -> Footprint:
    """By what its process reports. Live requests may take again what they have taken once."""
    row = report["bytes_per_row"] + CONVERSATION_TOKENS * report["bytes_per_token"]
    peak = max(report["live_peak"], row)
    earlier = before.live_nbytes if before.weights_nbytes == report["weights"] else 0
    return Footprint(report["weights"], live_nbytes=max(peak, earlier))


@dataclass(frozen=True, slots=True)
class Room:
    """For all models. free_nbytes: what the machine has left; infinite: unknown."""

    budget_nbytes: int
    free_nbytes: float


def room(limit_nbytes: int) -> Room:
    """May start a program (macOS, NVIDIA), so not for the asyncio thread. limit_nbytes: set by the user;
    0: by the device's memory."""
    now = gpu_memory() or machine.memory()
    budget = limit_nbytes or int(now.total * usable_share(now.total))
    free = math.inf if now.available is None else float(now.available)
    return Room(budget, free)


def usable_share(total_nbytes: int, *, platform: str = sys.platform) -> float:
    """The share of a machine's memory for models. A Mac's GPU may use less of it; a process reports
    how much."""
    if platform == "darwin":
        return 2 / 3 if total_nbytes <= SMALL_MAC_NBYTES else 3 / 4
    return 1 - HEADROOM_SHARE


def gpu_memory() -> machine.SystemMemory | None:
    """Of the first NVIDIA GPU; None: MLX does not use it, or nvidia-smi does not say."""
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
    """Judged by what is installed: the front must not import MLX."""
    for package in ("mlx-cuda-13", "mlx-cuda-12", "mlx-cuda"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            metadata.distribution(package)
            return True
    return False


def parse_gpus(text: str) -> machine.SystemMemory | None:
    """nvidia-smi's lines "total, free" in MiB; MLX uses the first GPU."""
    total, _, free = text.strip().partition("\n")[0].partition(",")
    if not (total.strip().isdigit() and free.strip().isdigit()):
        return None
    return machine.SystemMemory(int(total) * MIB, int(free) * MIB)
