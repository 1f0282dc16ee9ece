"""The BLAS that tests multiply with, alike in all of their processes: where bits count, it is one."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from firn.models import cpu
from firn.models import device as devices
from firn.models.cpu.blas import Blas


def attach() -> Blas:
    if devices.device().kind != "cpu":
        return Blas("a GPU's own")
    memo = Path(tempfile.gettempdir()) / f"firn-tests-{os.getuid()}" / "blas.json"
    blas = cpu.attach("auto", memo=memo)
    if blas.library and "PYTEST_XDIST_WORKER" in os.environ:
        blas.library.set_threads(1)  # the other cores have workers of their own
    return blas
