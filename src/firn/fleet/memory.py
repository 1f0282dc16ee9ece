"""What a model needs while it is loaded, and what all models together may use.

Until a model has been loaded once, its need is estimated from the sizes of its files. Then its
process reports the weights and the most that live requests have used. Stored prefixes and the
process itself count with fixed amounts.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from firn import backends
from firn.core.units import GIB, MIB
from firn.host import machine

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
    now = backends.memory_without_mlx() or machine.memory()
    budget = limit_nbytes or int(now.total * usable_share(now.total))
    free = math.inf if now.available is None else float(now.available)
    return Room(budget, free)


def usable_share(total_nbytes: int, *, platform: str = sys.platform) -> float:
    """The share of a machine's memory for models. A Mac's GPU may be allowed less; a process
    reports how much."""
    if platform == "darwin":
        return 2 / 3 if total_nbytes <= SMALL_MAC_NBYTES else 3 / 4
    return 1 - HEADROOM_SHARE
