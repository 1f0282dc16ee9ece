"""The engine's limits, as the server sets them."""

from __future__ import annotations

from dataclasses import dataclass

from firn.core.units import MIB


@dataclass(frozen=True, slots=True)
class EngineLimits:
    max_rows: int
    max_queue: int
    prefill_chunk: int
    aligned: bool = False
    """Every chunk ends at a multiple of prefill_chunk: exact reuse needs it."""
    largest_chunk: int = 0
    """Chunks vary with depth and load, up to this size; 0: all have prefill_chunk tokens."""
    max_step_s: float = 0.0
    """How long a chunk may hold up decoding requests; 0: little longer than a usual chunk takes."""
    common_chunk: int = 0
    """Longer chunks begin and end at multiples of this, and the runner pads shorter ones, for a device
    that prefers few shapes. 0: chunks end anywhere."""
    dispatch_waits: bool = False
    """Dispatching a chunk takes most of the time that the chunk takes."""
    logprobs_chunk_nbytes: int = 128 * MIB
    """Limit for the logits of a chunk whose logprobs are wanted: a large vocabulary shortens it."""
