"""MLX's CPU backend, tuned: the one place where firn replaces parts of MLX, for a whole process.

    blas      what multiplies: OpenBLAS in the place of MLX's reference BLAS (openblas, trial, imports,
              gemv), and how many threads it takes (threads)
    softmax   attention and sigmoid, of powers
    rope      rotary positions of a decode step, made once
    dtype     weights of 16 bits and quantised ones in float32

`tune` is the switch. With exact reuse only the BLAS is replaced: what is measured anew at each start
may come out differently, and bits with it.
"""

from __future__ import annotations

import logging
from pathlib import Path

from firn.models.cpu import rope, softmax
from firn.models.cpu.blas import Blas, Choice, attach

log = logging.getLogger("firn.models")


def tune(choice: Choice, *, exact: bool, memo: Path) -> Blas:
    """For this process, before a model is loaded: MLX compiles its functions as it finds them."""
    blas = attach(choice, memo=memo)
    log.info("matrix products: %s", blas.text)
    if not exact:
        softmax.install_if_faster()
        rope.install()
    return blas
