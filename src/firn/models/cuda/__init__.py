"""MLX's CUDA backend, tuned: the one place where firn replaces parts of it, for the whole process.

    products    of a few tokens: a kernel of firn's instead of cuBLAS, whose calls take the host longer
    attention   of a few tokens: a kernel that takes masks, instead of many operations or cuDNN's plans

`tune` is the switch.
"""

from __future__ import annotations

import logging

from firn.models.cuda import attention, products

log = logging.getLogger("firn.models")


def tune() -> None:
    """Call it once in a process, before a model is loaded. A kernel that is wrong on this device is
    not used."""
    attention.install()
    fault = products.fault()
    if fault is None:
        products.install()
    else:
        log.warning("products of a few tokens are left to MLX: %s", fault)
