"""What a model needs while it is loaded, and what there is for all of them together.

Before it was ever loaded, its files tell; then its process does: weights, the most that live
requests have taken, the least that stored prefixes should have, and what a process takes besides.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from firn import machine

MIB, GIB = 1 << 20, 1 << 30
PROCESS_NBYTES = 256 * MIB
"""Python, MLX and their libraries."""
RECORDS_FLOOR_NBYTES = 64 * MIB
"""Of stored prefixes; whatever more there is of them gives way."""
LIVE_FLOOR_NBYTES = 64 * MIB
LIVE_SHARE = 0.1
"""Of the weights: what requests may take, before anything was measured."""
CONVERSATION_TOKENS = 4096
"""What a model should at least have room for."""
HEADROOM_SHARE = 0.1
"""Of the machine's memory, for everything else on it."""


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
    """By the files of its folder; None: it is not on this machine yet, and nothing is known."""
    weights = 0
    if folder is not None:
        weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    return Footprint(weights, live_nbytes=max(LIVE_FLOOR_NBYTES, int(LIVE_SHARE * weights)))


def measured(report: Mapping[str, Any], before: Footprint) -> Footprint:
    """By what its process says of itself. What live requests have taken once, they may take again."""
    row = report["bytes_per_row"] + CONVERSATION_TOKENS * report["bytes_per_token"]
    peak = max(report["live_peak"], row)
    known = before.live_nbytes if before.weights_nbytes == report["weights"] else 0
    return Footprint(report["weights"], live_nbytes=max(peak, known))


@dataclass(frozen=True, slots=True)
class Room:
    """For all models. free_nbytes: what the machine could still give, infinite where it does not say."""

    budget_nbytes: int
    free_nbytes: float


def room(limit_nbytes: int) -> Room:
    """Takes its time on macOS. limit_nbytes: as the user set it; 0: by the machine's memory."""
    now = machine.memory()
    budget = limit_nbytes or int(now.total * (1 - HEADROOM_SHARE))
    free = math.inf if now.available is None else float(now.available)
    return Room(budget, free)
