"""MLX's CUDA backend, tuned: what firn replaces there, for a whole process.

    products   of a few tokens: a kernel in the place of cuBLAS, whose calls such a step waits for

`tune` is the switch.
"""

from __future__ import annotations

import logging

from firn.models.cuda import products

log = logging.getLogger("firn.models")


def tune() -> None:
    """For this process, before a model is loaded. MLX stays as it is where the kernel is wrong."""
    fault = products.fault()
    if fault is None:
        products.install()
    else:
        log.warning("products of a few tokens are left to MLX: %s", fault)
