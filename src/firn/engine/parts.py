"""What the engine thread is built of, and the limits it keeps. Built by it, at its start."""

from __future__ import annotations

from dataclasses import dataclass

from firn.core.ports import Cursor, LiveRow, PrefixCache, Runner, Scorer
from firn.engine.budget import Budget


@dataclass(frozen=True, slots=True)
class EngineLimits:
    max_rows: int
    max_queue: int
    prefill_chunk: int
    aligned: bool = False
    """Every chunk ends at a multiple of prefill_chunk: exact reuse needs it."""
    largest_chunk: int = 0
    """Chunks grow to this, and shrink, by depth and load; 0: all have prefill_chunk tokens."""
    max_step_s: float = 0.0
    """The longest that a chunk should hold up decoding requests; 0: by what the usual chunk takes."""
    common_chunk: int = 0
    """Longer chunks begin and end at multiples of this, shorter ones are padded by the runner: for a
    device that prefers few shapes. 0: chunks end anywhere."""
    scored_nbytes: int = 128 << 20
    """Logits of a chunk whose logprobs are wanted: with a large vocabulary the chunk is shorter."""


@dataclass(frozen=True, slots=True)
class EngineParts:
    """What the engine thread builds for itself at its start."""

    runner: Runner[LiveRow]
    cache: PrefixCache[Cursor]
    budget: Budget
    limits: EngineLimits
    scorer: Scorer[object] | None = None
    """Says which tokens of a long prompt matter; None: every prompt is read in full."""

    def set_capacity(self, nbytes: int) -> None:
        """What live requests and stored prefixes may take from now on."""
        self.budget.capacity_nbytes = nbytes
        self.cache.set_room(self.budget.free_nbytes())
