"""MLX's CPU backend, tuned for Linux.

    blas      matrix products by OpenBLAS instead of MLX's reference BLAS (openblas, trial, imports,
              stubs), and how many threads it uses (threads)
    softmax   attention and sigmoid, computed by powers of two
    rope      rotary positions of a decode step, computed once for all layers
    dtype     16-bit and quantised weights widened to float32

Recurrent layers are computed as in `backends.recurrence`. With exact reuse only the BLAS and the gated
delta rule are replaced, which are then part of the root. The others round differently from MLX's own,
and whether softmax is replaced depends on a measurement at each start.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx

from firn.backends.contract import BackendOptions, ComputeBackend, Weights
from firn.backends.cpu import dtype, rope, softmax
from firn.backends.cpu.blas import Blas, attach
from firn.backends.cpu.threads import Threads
from firn.backends.profile import DeviceProfile
from firn.backends.recurrence import convolution, families, replacements, scans, ssm
from firn.backends.recurrence.forms import Chunked, ChunkedDelta, ChunkedLinear, ChunkedWkv
from firn.backends.recurrence.replaced import Recurrences
from firn.models.load.loader import LoadedModel
from firn.models.model_arguments import PreparePass, unprepared
from firn.models.patches import Patches

log = logging.getLogger("firn.models")

MEMO = "blas.json"
"""In the cache folder: which libraries were tried, and how fast they are."""
DELTA = ChunkedDelta(Chunked(32, min_work=1 << 15, max_product=1 << 18), channel_chunk=16)
LINEAR = ChunkedLinear(Chunked(64, min_tokens=4, max_product=1 << 18))
WKV = ChunkedWkv(Chunked(8, min_tokens=8, max_product=1 << 18))
"""OpenBLAS computes larger products with several threads, which wait for each other for each of many
thousands: on a busy machine that takes longer than token after token."""

SSM_STEP = 64
"""Exponentials are slow here: of 32 to 64 tokens they take about as long as the products."""
OTHER_FORMS = (
    *families.lightning(LINEAR, families.LING),
    *families.rwkv7(WKV),
    *scans.selective_scans(scans.selective),
    *ssm.shortened(SSM_STEP),
)


class CpuWeights(Weights):
    """In float32, if there is memory for it."""

    def __init__(self, recurrences: Recurrences) -> None:
        self._recurrences = recurrences

    def widen(self, model: Any) -> bool:
        self._recurrences.loaded(model)
        return dtype.apply(model, self.dtype)

    def rescue(self, model: Any) -> bool:
        """MLX lacks 16-bit forms of some operations here, one of which mixtures of experts need."""
        model.set_dtype(mx.float32)
        log.warning("MLX's CPU backend cannot run this model in 16 bits; it is tried in float32")
        return True

    def widen_as(self, part: Any, *, like: Any) -> None:
        dtype.widen_as(part, self.dtype, like=like)


class CpuBackend(ComputeBackend):
    profile = DeviceProfile(
        name="cpu",
        label="CPU",
        prefill_chunk=256,
        largest_chunk=256,
        varies_chunks=False,
        widened_share=dtype.SHARE,
    )

    def __init__(self) -> None:
        super().__init__()
        self.recurrences = Recurrences(self.patches, DELTA, self._replace_other_forms)
        self.weights = CpuWeights(self.recurrences)
        self.blas = Blas("MLX's own BLAS")

    def install(self, options: BackendOptions) -> None:
        self.blas = self._attach(options, self.patches)
        slow = self.blas.library is None
        log.log(logging.INFO if slow else logging.DEBUG, "matrix products: %s", self.blas.text)
        self.recurrences.install(exact=options.exact)
        if not options.exact:
            softmax.install_if_faster(self.patches)
            rope.install(self.patches)
        # Without a fast BLAS, float32 is as slow as other dtypes and twice as large.
        is_useless = options.weights_dtype == "auto" and self.blas.library is None
        self.weights.dtype = "model" if is_useless else options.weights_dtype

    def _attach(self, options: BackendOptions, patches: Patches) -> Blas:
        assert options.cache_folder is not None
        return attach(options.blas, memo=options.cache_folder / MEMO, patches=patches)

    def _replace_other_forms(self) -> None:
        convolution.install(self.patches)
        replacements.install(self.patches, OTHER_FORMS)

    @property
    def arithmetic(self) -> str:
        if not self.recurrences.is_exact:
            return ""
        return f"{self.blas.identity} {self.recurrences.identity}".strip()

    def preparation(self, loaded: LoadedModel) -> PreparePass:
        library = self.blas.library
        return unprepared if library is None else Threads(library, loaded.model).prepare

    def describe(self, cache_folder: Path) -> Iterator[tuple[str, str, bool]]:
        blas = attach("auto", memo=cache_folder / MEMO, patches=self.patches, again=True)
        yield "BLAS", blas.text, blas.library is None and sys.platform == "linux"


def backend() -> CpuBackend:
    return CpuBackend()
