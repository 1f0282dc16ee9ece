"""Facts about a device."""

from __future__ import annotations

from dataclasses import dataclass, field

from firn.models.decode.step_profile import StepProfile


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """What the rest of firn knows of a device: numbers to plan by, never a question of kind."""

    name: str
    """In logs, reservations and reports."""
    label: str
    """For people."""
    prefill_chunk: int
    """Prompt tokens read between two decode steps. The answer's bits depend on it in exact mode."""
    largest_chunk: int
    """Prompt tokens read at once while no row decodes and the context is short."""
    varies_chunks: bool = True
    """Whether timings are good enough to choose sizes by."""
    dispatch_waits: bool = False
    """Dispatching a chunk takes most of the time that the chunk takes."""
    memory_name: str = "memory of the device"
    has_own_memory: bool = False
    """Its memory is not the machine's: other processes of a machine may have other devices."""
    fused_head_dims: frozenset[int] = frozenset()
    """Sizes of attention heads whose scores are never in memory as a whole."""
    soon_nbytes: int = 0
    """A restored past of up to this size takes less time than a decode step."""
    weighs_hits: bool = False
    """Restoring a short prefix may take longer than computing it."""
    widened_share: float = 0.0
    """Weights in 16 bits or quantised are widened to float32 if they then take at most this share of the
    available memory."""
    steps: StepProfile = field(default_factory=StepProfile)


PLAIN_DEVICE = DeviceProfile("device", "Device", prefill_chunk=512, largest_chunk=2048)
"""A device about which nothing is known."""
