"""The backend of an NVIDIA GPU."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

import mlx.core as mx

from firn.backends.contract import BackendOptions, ComputeBackend, Weights
from firn.backends.cuda import attention, kernels, pool, products, scans
from firn.backends.cuda.bias import gains_by_bias
from firn.backends.cuda.bus import find_transfers
from firn.backends.cuda.recurrence import KernelBuilds, KernelDelta, KernelLinear, KernelWkv
from firn.backends.cuda.shapes import find_buckets
from firn.backends.cuda.traced import traced_steps
from firn.backends.memory import DeviceMemory
from firn.backends.profile import DeviceProfile
from firn.backends.recurrence import families, replacements, ssm
from firn.backends.recurrence.forms import Chunked, ChunkedDelta, ChunkedLinear, ChunkedWkv
from firn.backends.recurrence.replaced import Recurrences
from firn.backends.recurrence.replacements import Replacement
from firn.backends.recurrence.scans import selective_scans
from firn.backends.warm_up import warm_up, warm_up_speculator
from firn.cache.arrays.transfers import Transfers
from firn.models.decode.kv_growth import ShapeBuckets
from firn.models.decode.ragged import ALL_COLUMNS, Columns
from firn.models.decode.runner import Runner
from firn.models.decode.step_profile import StepProfile
from firn.models.decode.step_trace import NoStepTrace, StepTrace
from firn.models.decode.steps import Speculator
from firn.models.layers import MakeLayers
from firn.models.load.loader import LoadedModel
from firn.models.model_arguments import IdsOnly
from firn.models.speculation.mtp import MtpModel

log = logging.getLogger("firn.models")

CHECK = "MLX_ENABLE_CACHE_THRASHING_CHECK"
"""MLX caches 400 CUDA graphs. Once it has made twice as many, which takes a server minutes, this
check takes that for a mistake in a script, and every new graph fails."""
STEPS = StepProfile(
    slope=0.008,
    flat=0.1,
    widths=(1, 4, 8, 16, 32),
    shapes=(4, 8, 16, 32),
    columns=Columns(block=512),
    layers_per_dispatch=6,
)
"""A step takes about as long as its kernel launches, however many tokens it has; but attention of
several tokens is planned anew for each shape, which takes longer than many steps. So steps have few
widths, and see whole blocks of columns, the last ones masked."""

CHUNKS, SHORT_CHUNKS = Chunked(64, has_tf32=True), Chunked(16, has_tf32=True)
"""Where a kernel does not fit. They take fewer launches than token after token even for two."""
CHUNKED_DELTA = ChunkedDelta(CHUNKS, channel_chunk=16)


def _other_forms(builds: KernelBuilds) -> list[Replacement]:
    linear = KernelLinear(builds, ChunkedLinear(CHUNKS))
    return [
        *families.lightning(linear, families.LING + families.LING_HYBRID),
        *ssm.as_linear_attention(linear),
        *families.rwkv7(KernelWkv(builds, ChunkedWkv(SHORT_CHUNKS))),
        *families.recurrent_gemma(scans.gated_sum),
        *selective_scans(scans.selective),
    ]


T = TypeVar("T")


class CudaMemory(DeviceMemory):
    """The device's own. What the driver keeps of freed memory counts as available."""

    @property
    def total_nbytes(self) -> int:
        info = mx.device_info()
        sizes = (info.get(key) for key in ("memory_size", "total_memory", "free_memory"))
        return int(next((n for n in sizes if n is not None), mx.get_memory_limit()))

    def free_unused(self) -> None:
        super().free_unused()
        pool.trim()

    def _available_nbytes(self) -> int | None:
        free = mx.device_info().get("free_memory")
        return None if free is None else int(free) + pool.unused_nbytes()


class CudaWeights(Weights):
    def __init__(self, recurrences: Recurrences) -> None:
        self._recurrences = recurrences

    def widen(self, model: Any) -> bool:
        self._recurrences.loaded(model)
        return False


class CudaBackend(ComputeBackend):
    profile = DeviceProfile(
        name="cuda",
        label="CUDA",
        prefill_chunk=2048,
        largest_chunk=8192,
        has_own_memory=True,
        fused_head_dims=frozenset({64, 80, 96, 128}),
        soon_nbytes=64 << 20,
        weighs_hits=True,
        steps=STEPS,
    )

    def __init__(self) -> None:
        super().__init__()
        self.memory = CudaMemory(self.profile)
        self._kernels_folder: Path | None = None
        builds = KernelBuilds()
        others = _other_forms(builds)
        self.recurrences = Recurrences(
            self.patches,
            KernelDelta(builds, CHUNKED_DELTA),
            partial(replacements.install, self.patches, others),
        )
        self.weights = CudaWeights(self.recurrences)

    def install(self, options: BackendOptions) -> None:
        os.environ.setdefault(CHECK, "0")
        self._kernels_folder = options.kernels_folder
        if options.kernels_folder is not None:
            kernels.keep(options.kernels_folder)
        self.recurrences.install(exact=options.exact)
        if options.exact:
            return
        attention.install(self.patches)
        fault = products.fault()
        if fault is None:
            products.install(self.patches)
        else:
            log.warning("products of a few tokens are left to MLX: %s", fault)

    @property
    def arithmetic(self) -> str:
        return self.recurrences.identity if self.recurrences.is_exact else ""

    def buckets(self, loaded: LoadedModel) -> ShapeBuckets:
        if not isinstance(loaded.arguments, IdsOnly) or isinstance(loaded.model, MtpModel):
            return ShapeBuckets()
        return _unless_refused(
            partial(find_buckets, loaded.model, loaded.make_layers),
            "prompts are read without padding",
            ShapeBuckets(),
        )

    def trace(self, loaded: LoadedModel, buckets: ShapeBuckets) -> StepTrace:
        plain: StepTrace = NoStepTrace()
        if not buckets.common_chunk:
            return plain
        make = partial(traced_steps, loaded.model, loaded.make_layers)
        return _unless_refused(make, "steps are not traced", plain)

    def step_profile(self, model: Any, make_layers: MakeLayers) -> StepProfile:
        steps = super().step_profile(model, make_layers)
        if steps.columns == ALL_COLUMNS or not gains_by_bias(model, make_layers):
            return steps
        return replace(steps, columns=replace(steps.columns, has_bias=True))

    def warm_up(
        self, model: Any, make_runner: Callable[[Speculator], Runner], speculator: Speculator
    ) -> None:
        """MLX compiles a kernel when it is first used, which takes seconds while all requests wait."""
        runner = make_runner(warm_up_speculator(model, speculator))
        warm_up(runner)
        if self._kernels_folder is not None:
            kernels.note(self._kernels_folder)

    @cached_property
    def transfers(self) -> Transfers:
        return find_transfers()


def _unless_refused(make: Callable[[], T], otherwise: str, default: T) -> T:
    """The default if the model was tried and is not suitable; logs why, and what happens instead."""
    try:
        return make()
    except ValueError as e:
        log.info("%s: %s", otherwise, e)
        return default
