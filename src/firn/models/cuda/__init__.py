"""MLX's CUDA backend, tuned: the one place where firn replaces parts of it, for the whole process.

    products    of a few tokens: a kernel of its own instead of cuBLAS, which takes more host time
    attention   of a few tokens: a kernel that accepts masks, instead of many operations or cuDNN
    kernels     MLX's own: where they are kept, and which are compiled ahead

`tune` installs them. It also switches off a check of MLX that is meant for scripts: see CHECK.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from firn.models.cuda import attention, products
from firn.models.cuda import kernels as mlx_kernels

log = logging.getLogger("firn.models")

CHECK = "MLX_ENABLE_CACHE_THRASHING_CHECK"
"""MLX caches 400 CUDA graphs. Once it has made twice as many, which takes a server minutes, this
check takes that for a mistake in a script, and every new graph fails."""


def tune(*, kernels: bool = True, folder: Path | None = None) -> None:
    """Call it once per process, before anything is computed. kernels: replace some of MLX's; a
    kernel that is wrong on this device is not used. Without them results are MLX's own, bit for
    bit. folder: where compiled kernels are kept; None: where MLX keeps them."""
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
