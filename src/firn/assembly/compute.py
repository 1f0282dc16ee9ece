"""How this machine computes a model: its backend, and the engine's limits."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from firn import backends
from firn.backends.contract import BackendOptions, ComputeBackend
from firn.backends.profile import DeviceProfile
from firn.cache.arrays.transfers import use
from firn.config import Config, default_cache_dir, kernels_dir
from firn.engine import EngineLimits
from firn.models.load.selfcheck import CHUNKS_MATTER

log = logging.getLogger("firn")


@dataclass(frozen=True, slots=True)
class ComputeSettings:
    backend: ComputeBackend
    limits: EngineLimits

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


def compute_settings(config: Config, architecture: str, name: str) -> ComputeSettings:
    """Finds the machine's backend and installs it. Raises SetupError."""
    options, backend = config.engine, backends.find()
    exact = _is_exact(config, architecture, name)
    backend.install(
        BackendOptions(
            exact=exact,
            blas=options.blas,
            weights_dtype=options.cpu_dtype,
            cache_folder=default_cache_dir(),
            kernels_folder=kernels_dir(),
        )
    )
    use(backend.transfers)
    profile = backend.profile
    limits = EngineLimits(
        max_rows=options.max_concurrency,
        max_queue=options.max_queue,
        prefill_chunk=options.prefill_chunk or profile.prefill_chunk,
        largest_chunk=_largest_chunk(config, profile),
        max_step_s=options.max_step_ms / 1000,
        aligned=exact,
        dispatch_waits=profile.dispatch_waits,
    )
    return ComputeSettings(backend, limits)


def _is_exact(config: Config, architecture: str, name: str) -> bool:
    why = CHUNKS_MATTER.get(architecture)
    if why:
        log.warning("prompts of %s are reused only at the ends of prefill chunks: %s", name, why)
    return config.cache.reuse == "exact" or bool(why)


def _largest_chunk(config: Config, profile: DeviceProfile) -> int:
    """0: all chunks have the usual size."""
    options = config.engine
    if not profile.varies_chunks and not options.max_step_ms:
        return 0
    return options.prefill_chunk or profile.largest_chunk
