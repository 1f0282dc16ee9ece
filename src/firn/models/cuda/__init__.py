"""MLX's CUDA backend, tuned: the one place where firn replaces parts of it, for the whole process.

    products    of a few tokens: a kernel of firn's instead of cuBLAS, whose calls take the host longer
    attention   of a few tokens: a kernel that takes masks, instead of many operations or cuDNN's plans
    kernels     MLX's own: where they are kept, and which are compiled ahead

And a check of MLX's that is meant for scripts is switched off: see CHECK.

`tune` is the switch.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from firn.models.cuda import attention, products
from firn.models.cuda import kernels as mlx_kernels

log = logging.getLogger("firn.models")

CHECK = "MLX_ENABLE_CACHE_THRASHING_CHECK"
"""MLX keeps 400 of the driver's graphs. Once it has made twice as many, which takes a server minutes, it
sees a script's mistake in that, and every new graph fails."""


def tune(*, kernels: bool = True, folder: Path | None = None) -> None:
    """Call it once in a process, before anything is computed. kernels: replace those of MLX; one that is
    wrong on this device is not used. Without them results are MLX's own, bit for bit. folder: where
    compiled kernels are kept; None: where MLX keeps them."""
    os.environ.setdefault(CHECK, "0")
    if folder is not None:
        mlx_kernels.keep(folder)
    if not kernels:
        return
    attention.install()
    fault = products.fault()
    if fault is None:
        products.install()
    else:
        log.warning("products of a few tokens are left to MLX: %s", fault)
