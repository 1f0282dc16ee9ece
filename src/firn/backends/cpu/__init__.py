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
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx

from firn.backends.contract import (
    BackendOptions,
    ComputeBackend,
    DeviceProfile,
    DeviceReport,
)
from firn.backends.cpu import dtype, rope, softmax
from firn.backends.cpu.blas import Blas, attach
from firn.backends.cpu.threads import Threads
from firn.backends.patches import Patches
from firn.backends.recurrence import convolution, replaced, scans, ssm
from firn.backends.recurrence.replaced import ChunkedDelta
from firn.models.loader import LoadedModel
from firn.models.model_arguments import PreparePass, unprepared

log = logging.getLogger("firn.models")

MEMO = "blas.json"
"""In the cache folder: which libraries were tried, and how fast they are."""
DELTA = ChunkedDelta(chunk=32, channel_chunk=16, min_work=1 << 15, max_product=1 << 18)
"""OpenBLAS computes larger products with several threads, which wait for each other for each of many
thousands: on a busy machine that takes longer than token after token."""

SSM_STEP = 64
"""Exponentials are slow here: of 32 to 64 tokens they take about as long as the products."""


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
        self.blas = Blas("MLX's own BLAS")
        self._is_exact = self._is_installed = self._computes_delta = False

    def install(self, options: BackendOptions) -> None:
        self.blas = self._attach(options, self.patches)
        slow = self.blas.library is None
        log.log(logging.INFO if slow else logging.DEBUG, "matrix products: %s", self.blas.text)
        self._is_exact, self._is_installed = options.exact, True
        self._replace_recurrences()
        if not options.exact:
            softmax.install_if_faster(self.patches)
            rope.install(self.patches)
            convolution.install(self.patches)
        # Without a fast BLAS, float32 is as slow as other dtypes and twice as large.
        is_useless = options.weights_dtype == "auto" and self.blas.library is None
        self.weights_dtype = "model" if is_useless else options.weights_dtype

    def _attach(self, options: BackendOptions, patches: Patches) -> Blas:
        assert options.cache_folder is not None
        return attach(options.blas, memo=options.cache_folder / MEMO, patches=patches)

    @property
    def arithmetic(self) -> str:
        if not self._is_exact:
            return ""
        return f"{self.blas.identity} {DELTA.identity if self._computes_delta else ''}".strip()

    def widen(self, model: Any) -> bool:
        if self._is_installed:
            self._replace_recurrences()
        self._computes_delta |= replaced.is_used_by(model)
        return dtype.apply(model, self.weights_dtype)

    def _replace_recurrences(self) -> None:
        """Again for each model: a library's modules are imported with the first that needs them."""
        replaced.replace(self.patches, DELTA)
        if not self._is_exact:
            ssm.shorten(self.patches, step=SSM_STEP)
            scans.replace(self.patches)

    def rescue(self, model: Any) -> bool:
        """MLX lacks 16-bit forms of some operations here, one of which mixtures of experts need."""
        model.set_dtype(mx.float32)
        log.warning("MLX's CPU backend cannot run this model in 16 bits; it is tried in float32")
        return True

    def widen_as(self, part: Any, *, like: Any) -> None:
        dtype.widen_as(part, self.weights_dtype, like=like)

    def preparation(self, loaded: LoadedModel) -> PreparePass:
        library = self.blas.library
        return unprepared if library is None else Threads(library, loaded.model).prepare

    def report(self) -> DeviceReport:
        return replace(super().report(), memory_nbytes=None)

    def describe(self, cache_folder: Path) -> Iterator[tuple[str, str, bool]]:
        blas = attach("auto", memo=cache_folder / MEMO, patches=self.patches, again=True)
        yield "BLAS", blas.text, blas.library is None and sys.platform == "linux"


def backend() -> CpuBackend:
    return CpuBackend()
