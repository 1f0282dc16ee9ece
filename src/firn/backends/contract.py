"""What firn asks of a device. The default does nothing special.

    profile            facts: chunk sizes, what steps of several tokens cost, whose memory it uses
    install            once per process, before a model is loaded: settings and patches of MLX
    widen, rescue      weights as the device computes them (a models.weight_form.WeightForm)
    preparation, buckets, trace    how a model's passes are prepared, shaped and traced
    step_profile       what steps of several tokens cost with this model
    warm_up            use a runner before the first request does
    transfers          how records are copied out and in
    memory, limit      what the device has, and how MLX is held to a plan
    free_unused        give back what is kept for reuse
    report, describe   for people

A backend is made by its module's `backend()` and belongs to the process, like MLX's default device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from firn.backends.patches import Patches
from firn.cache.arrays.transfers import Transfers
from firn.config import BlasChoice, WeightsDtype
from firn.core.memory_plan import MachineMemory, MemoryPlan
from firn.host.machine import memory
from firn.models.decode.execution import Execution
from firn.models.decode.kv_growth import ShapeBuckets
from firn.models.decode.rewind import is_rewindable
from firn.models.decode.runner import Runner
from firn.models.decode.step_profile import StepProfile
from firn.models.decode.step_trace import NoStepTrace, StepTrace
from firn.models.decode.steps import Speculator
from firn.models.layers import MakeLayers
from firn.models.loader import LoadedModel
from firn.models.model_arguments import PreparePass, unprepared


@dataclass(frozen=True, slots=True)
class DeviceProfile:
    """Facts about a device."""

    name: str
    """In logs, reservations and reports."""
    label: str
    """For people."""
    prefill_chunk: int
    """Prompt tokens read between two decode steps. The answer's bits depend on it in exact mode."""
    largest_chunk: int
    """The same while no row decodes and the context is short."""
    varies_chunks: bool = True
    """Whether timings are good enough to choose sizes by."""
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


@dataclass(frozen=True, slots=True)
class DeviceReport:
    """For people. name: as the driver says it. memory_nbytes: None if the device uses the machine's.
    working_set_nbytes: what the driver recommends for one process; None if it does not say."""

    profile: DeviceProfile
    name: str
    memory_nbytes: int | None
    working_set_nbytes: int | None


@dataclass(frozen=True, slots=True)
class BackendOptions:
    """exact: cached output must be bitwise the uncached output, by MLX's own kernels where it has any.
    cache_folder, kernels_folder: where it may keep what it has found out, and compiled."""

    exact: bool = False
    blas: BlasChoice = "auto"
    weights_dtype: WeightsDtype = "auto"
    cache_folder: Path | None = None
    kernels_folder: Path | None = None


class ComputeBackend:
    """Owner: the process that loads a model. `memory` and `free_unused` are thread-safe."""

    profile: DeviceProfile

    def __init__(self) -> None:
        self.patches = Patches()
        self.weights_dtype: WeightsDtype = "model"
        """How weights are widened; changed for ranks, which must agree."""

    # --- once per process ------------------------------------------------------------------

    def install(self, options: BackendOptions) -> None:
        """Raises SetupError if an option cannot be honoured."""

    def uninstall(self) -> None:
        """Give MLX its own functions back."""
        self.patches.undo()

    @property
    def arithmetic(self) -> str:
        """What the bits of a result depend on, besides the model and the libraries."""
        return ""

    # --- a model ---------------------------------------------------------------------------

    def widen(self, model: Any) -> bool:
        """Widen the weights of a model that was just loaded; returns whether that was done."""
        return False

    def rescue(self, model: Any) -> bool:
        """The model fails on this device: change its weights so that it may run. False: no way."""
        return False

    def widen_as(self, part: Any, *, like: Any) -> None:
        """Widen a part that is loaded later, if the model itself was widened."""

    def execution(self, loaded: LoadedModel, *, exact: bool, is_shared: bool) -> Execution:
        """is_shared: several ranks compute the model, and must all read and group rows alike."""
        prepare = unprepared if exact else self.preparation(loaded)
        if is_shared:
            return Execution(prepare=prepare, free_unused=self.free_unused)
        buckets = ShapeBuckets() if exact else self.buckets(loaded)
        trace = NoStepTrace() if exact else self.trace(loaded, buckets)
        soon_nbytes = self.profile.soon_nbytes
        return Execution(buckets, trace, prepare, soon_nbytes, self.free_unused)

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
        # Padding a step would change layers that cannot be rewound.
        return steps if is_rewindable(make_layers()) else replace(steps, shapes=())

    def warm_up(
        self, model: Any, make_runner: Callable[[Speculator], Runner], speculator: Speculator
    ) -> None:
        """Called before the first request. speculator: the server's own."""

    @property
    def transfers(self) -> Transfers:
        return Transfers()

    # --- memory ----------------------------------------------------------------------------

    @property
    def memory_nbytes(self) -> int:
        """Memory that models and caches may use."""
        return memory().total

    def memory(self) -> MachineMemory:
        """The machine's memory now, for a plan. What MLX holds in this process counts as available."""
        now = memory()
        available = self._available_nbytes()
        return MachineMemory(
            self.profile.name,
            self.memory_nbytes,
            now.total,
            None if available is None else available + used_nbytes(),
            has_own_memory=self.profile.has_own_memory,
        )

    def _available_nbytes(self) -> int | None:
        return memory().available

    def limit(self, plan: MemoryPlan) -> None:
        """Hold MLX to the plan. Call this once, after the weights are loaded."""
        mx.clear_cache()
        limit_buffer_cache(plan)
        mx.reset_peak_memory()  # the peak while loading says nothing about prefill

    def free_unused(self) -> None:
        """Release the memory that MLX and the driver keep for reuse."""
        mx.clear_cache()

    # --- for people ------------------------------------------------------------------------

    def report(self) -> DeviceReport:
        info: Mapping[str, Any] = mx.device_info()
        return DeviceReport(
            self.profile,
            str(info.get("device_name", "unknown")),
            info.get("memory_size") or info.get("total_memory"),
            info.get("max_recommended_working_set_size"),
        )

    def describe(self, cache_folder: Path) -> Iterator[tuple[str, str, bool]]:
        """Topic, text, and whether it is a reason to do something. Measured anew."""
        yield from ()


def limit_buffer_cache(plan: MemoryPlan) -> None:
    """Limit MLX's buffer cache. From any thread."""
    mx.set_cache_limit(plan.buffer_cache_nbytes)


def active_nbytes() -> int:
    """Bytes of all arrays right now. From any thread."""
    return int(mx.get_active_memory())


def used_nbytes() -> int:
    """Bytes that MLX holds in this process, including buffers kept for reuse. From any thread."""
    return int(mx.get_active_memory() + mx.get_cache_memory())


def allocated_nbytes() -> dict[str, int]:
    """Bytes of MLX's allocator: in use, and freed but kept for reuse. From any thread."""
    return {"active": active_nbytes(), "cached": mx.get_cache_memory()}
