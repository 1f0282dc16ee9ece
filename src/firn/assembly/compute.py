"""How this machine computes a model: the device, the engine's limits, the BLAS library."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from firn.config import Config, default_cache_dir, kernels_dir
from firn.engine import EngineLimits
from firn.models import cpu, cuda, loader
from firn.models import device as devices
from firn.models.cpu.blas import Blas
from firn.models.cpu.dtype import Choice as CpuDtype
from firn.models.cpu.threads import Threads
from firn.models.decode.kv_growth import ShapeBuckets
from firn.models.model_arguments import IdsOnly, PreparePass, unprepared
from firn.models.mtp import MtpModel
from firn.models.selfcheck import CHUNKS_MATTER
from firn.models.shapes import few_shapes
from firn.models.traced import TracedSteps, traced_steps

T = TypeVar("T")

log = logging.getLogger("firn")


@dataclass(frozen=True, slots=True)
class ComputeSettings:
    device: devices.Device
    limits: EngineLimits
    blas: Blas | None
    cpu_dtype: CpuDtype

    @property
    def exact(self) -> bool:
        """Whether prompts are cut and reused only at the ends of prefill chunks."""
        return self.limits.aligned

    @property
    def largest_chunk(self) -> int:
        usual = self.limits.prefill_chunk
        return usual if self.exact else max(self.limits.largest_chunk, usual)

    @property
    def exact_chunk(self) -> int:
        """Prompts are cut and reused at multiples of this; 0: they are reused to the token."""
        return self.limits.prefill_chunk if self.exact else 0

    @property
    def arithmetic(self) -> str:
        """What the bits of a result depend on other than the model; empty unless reuse is exact."""
        return self.blas.identity if self.blas and self.exact else ""


def compute_settings(config: Config, architecture: str, name: str) -> ComputeSettings:
    device, options = devices.device(), config.engine
    exact = _is_exact(config, architecture, name)
    blas = _tune_cpu(config, exact=exact) if device.kind == "cpu" else None
    if device.kind == "cuda":
        cuda.tune(kernels=not exact, folder=kernels_dir())
    limits = EngineLimits(
        max_rows=options.max_concurrency,
        max_queue=options.max_queue,
        prefill_chunk=options.prefill_chunk or device.prefill_chunk,
        largest_chunk=_largest_chunk(config, device),
        max_step_s=options.max_step_ms / 1000,
        aligned=exact,
    )
    return ComputeSettings(device, limits, blas, _cpu_dtype(config, blas))


def _is_exact(config: Config, architecture: str, name: str) -> bool:
    why = CHUNKS_MATTER.get(architecture)
    if why:
        log.warning("prompts of %s are reused only at the ends of prefill chunks: %s", name, why)
    return config.cache.reuse == "exact" or bool(why)


def _tune_cpu(config: Config, *, exact: bool) -> Blas:
    return cpu.tune(config.engine.blas, exact=exact, memo=default_cache_dir() / "blas.json")


def _largest_chunk(config: Config, device: devices.Device) -> int:
    """0: all chunks have the usual size. On a CPU, timings are too noisy for choosing sizes."""
    options = config.engine
    if device.kind == "cpu" and not options.max_step_ms:
        return 0
    return options.prefill_chunk or device.largest_chunk


def _cpu_dtype(config: Config, blas: Blas | None) -> CpuDtype:
    """Without a fast BLAS, float32 is as slow as other dtypes and twice as large."""
    option = config.engine.cpu_dtype
    if blas is None or (option == "auto" and blas.library is None):
        return "model"
    return option


def preparation_of(loaded: loader.LoadedModel, compute: ComputeSettings) -> PreparePass:
    """Chooses the number of BLAS threads for each pass. Not in exact mode, where the order of sums,
    and so the bits, must not change."""
    library = compute.blas.library if compute.blas and not compute.exact else None
    return Threads(library, loaded.model).prepare if library else unprepared


def buckets_of(loaded: loader.LoadedModel, compute: ComputeSettings) -> ShapeBuckets:
    """How prompts are padded for a device that prefers few shapes. Not in exact mode, and not for
    ranks: they would end up reading different shapes."""
    if compute.device.kind != "cuda" or compute.exact:
        return ShapeBuckets()
    if not isinstance(loaded.arguments, IdsOnly) or isinstance(loaded.model, MtpModel):
        return ShapeBuckets()
    few = _unless_refused(
        partial(few_shapes, loaded.model, loaded.make_layers), "prompts are read without padding"
    )
    return few or ShapeBuckets()


def traced_of(loaded: loader.LoadedModel, buckets: ShapeBuckets) -> TracedSteps | None:
    """How decode steps are traced if prompts are read in few shapes. None: not at all."""
    if not buckets.common_chunk:
        return None
    return _unless_refused(
        partial(traced_steps, loaded.model, loaded.make_layers), "steps are not traced"
    )


def _unless_refused(make: Callable[[], T], otherwise: str) -> T | None:
    """None if the model was tried and is not suitable; logs why, and what happens instead."""
    try:
        return make()
    except ValueError as e:
        log.info("%s: %s", otherwise, e)
        return None
