"""MLX's CPU backend, tuned: the one place where firn replaces parts of it, for the whole process.

    blas      matrix products by OpenBLAS instead of MLX's reference BLAS (openblas, trial, imports,
              stubs), and how many threads it uses (threads)
    softmax   attention and sigmoid, computed by powers of two
    rope      rotary positions of a decode step, computed once for all layers
    dtype     16-bit and quantised weights widened to float32

`tune` installs the first three; the loader applies `dtype` to each model, according to
`--cpu-dtype`. With exact reuse only the BLAS is replaced, which is then part of the root. The
others round differently from MLX's own, and whether softmax is replaced depends on a measurement at
each start.
"""

from __future__ import annotations

import logging
from pathlib import Path

from firn.models.cpu import rope, softmax
from firn.models.cpu.blas import Blas, Choice, attach

log = logging.getLogger("firn.models")


def tune(choice: Choice, *, exact: bool, memo: Path) -> Blas:
    """Call it once per process, before loading a model: MLX keeps the functions it has compiled."""
    blas = attach(choice, memo=memo)
    slow = blas.library is None
    log.log(logging.INFO if slow else logging.DEBUG, "matrix products: %s", blas.text)
    if not exact:
        softmax.install_if_faster()
        rope.install()
    return blas
