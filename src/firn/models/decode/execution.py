"""How a device computes one model: what a runner asks of it. The defaults do nothing special."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import mlx.core as mx

from firn.models.decode.kv_growth import ShapeBuckets
from firn.models.decode.step_trace import NoStepTrace, StepTrace
from firn.models.model_arguments import PreparePass, unprepared
from firn.models.patches import Patches


@dataclass(frozen=True, slots=True)
class Execution:
    """buckets: how passes and buffers are sized. trace: steps that need not be built. prepare: called
    before each pass, with its number of tokens. soon_nbytes: a restored past of up to this size is
    computed with the first chunk: waiting for it would include the step in flight. free_unused:
    releases the memory that is kept for reuse. patches: where a pass that replaces a function of MLX
    records it."""

    buckets: ShapeBuckets = field(default_factory=ShapeBuckets)
    trace: StepTrace = field(default_factory=NoStepTrace)
    prepare: PreparePass = unprepared
    soon_nbytes: int = 0
    free_unused: Callable[[], None] = mx.clear_cache
    patches: Patches = field(default_factory=Patches)


PLAIN_EXECUTION = Execution()
"""Of a device about which nothing is known."""
