"""What firn asks of a device. The default does nothing special.

    install, uninstall     once per process, before a model is loaded: settings and patches of MLX
    preparation            what to do before each pass of a model
    buckets                which shapes its passes have
    trace                  steps whose graph need not be built
    step_profile           what its steps of several tokens cost
    warm_up                use a runner before the first request does
    describe               for people

    profile, weights, memory, transfers, patches      what it knows, and who widens weights, holds MLX
                                                      to a plan, and copies records out and in

A backend is made by its module's `backend()` and belongs to the process, like MLX's default device.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from firn.backends.memory import DeviceMemory
from firn.backends.profile import PLAIN_DEVICE
from firn.cache.arrays.transfers import Transfers
from firn.config import BlasChoice, WeightsDtype
from firn.models.decode.execution import Execution
from firn.models.decode.kv_growth import ShapeBuckets
from firn.models.decode.ragged import ALL_COLUMNS
from firn.models.decode.raggedcheck import blocks_fault
from firn.models.decode.rewind import is_rewindable
from firn.models.decode.runner import Runner
from firn.models.decode.step_profile import StepProfile
from firn.models.decode.step_trace import NoStepTrace, StepTrace
from firn.models.decode.steps import Speculator
from firn.models.layers import MakeLayers
from firn.models.load.loader import LoadedModel
from firn.models.load.weight_form import AsStored
from firn.models.model_arguments import PreparePass, unprepared
from firn.models.patches import Patches

log = logging.getLogger("firn")


@dataclass(frozen=True, slots=True)
class BackendOptions:
    """exact: cached output must be bitwise the uncached output, by MLX's own kernels where it has any.
    cache_folder, kernels_folder: where it may keep what it has found out, and compiled."""

    exact: bool = False
    blas: BlasChoice = "auto"
    weights_dtype: WeightsDtype = "auto"
    cache_folder: Path | None = None
    kernels_folder: Path | None = None


class Weights(AsStored):
    """How the device computes weights: as they are stored."""

    dtype: WeightsDtype = "model"
    """Changed for ranks, which must agree."""

    def widen_as(self, part: Any, *, like: Any) -> None:
        """Widen a part that is loaded later, if the model itself was widened."""


class ComputeBackend:
    """Owner: the process that loads a model."""

    profile = PLAIN_DEVICE

    def __init__(self) -> None:
        self.patches = Patches()
        self.weights = Weights()
        self.memory = DeviceMemory(self.profile)

    @property
    def arithmetic(self) -> str:
        """What the bits of a result depend on in exact mode, besides the model and the libraries."""
        return ""

    @property
    def transfers(self) -> Transfers:
        return Transfers()

    def install(self, options: BackendOptions) -> None:
        """Raises SetupError if an option cannot be honoured."""

    def uninstall(self) -> None:
        """Give MLX its own functions back."""
        self.patches.undo()

    def preparation(self, loaded: LoadedModel) -> PreparePass:
        """What to do before each pass. Not used in exact mode, where the order of sums must not
        change."""
        return unprepared

    def buckets(self, loaded: LoadedModel) -> ShapeBuckets:
        """How prompts are padded. Not used in exact mode."""
        return ShapeBuckets()

    def trace(self, loaded: LoadedModel, buckets: ShapeBuckets) -> StepTrace:
        """Steps that need not be built. Not used in exact mode."""
        return NoStepTrace()

    def step_profile(self, model: Any, make_layers: MakeLayers) -> StepProfile:
        """Tries the model once if necessary."""
        steps = self.profile.steps
        if steps.columns != ALL_COLUMNS:
            fault = blocks_fault(model, make_layers, steps.columns)
            if fault is not None:
                log.info("steps of several tokens have more shapes: %s", fault)
                steps = replace(steps, columns=ALL_COLUMNS)
        # Padding a step would change layers that cannot be rewound.
        return steps if is_rewindable(make_layers()) else replace(steps, shapes=())

    def warm_up(
        self, model: Any, make_runner: Callable[[Speculator], Runner], speculator: Speculator
    ) -> None:
        """Called before the first request. speculator: the server's own."""

    def describe(self, cache_folder: Path) -> Iterator[tuple[str, str, bool]]:
        """Topic, text, and whether it is a reason to do something. Measured anew."""
        yield from ()


def execution_of(
    backend: ComputeBackend, loaded: LoadedModel, *, exact: bool, is_shared: bool
) -> Execution:
    """What a runner of this model asks of the device. is_shared: several ranks compute the model, and
    must all read and group rows alike."""
    free_unused, patches = backend.memory.free_unused, backend.patches
    if exact:
        soon_nbytes = 0 if is_shared else backend.profile.soon_nbytes
        return Execution(soon_nbytes=soon_nbytes, free_unused=free_unused, patches=patches)
    prepare = backend.preparation(loaded)
    if is_shared:
        return Execution(prepare=prepare, free_unused=free_unused, patches=patches)
    buckets = backend.buckets(loaded)
    trace = backend.trace(loaded, buckets)
    return Execution(buckets, trace, prepare, backend.profile.soon_nbytes, free_unused, patches)
