"""Records from the SSD and from stores on an Apple GPU, which uses the host's memory.

MLX copies bytes into a buffer of its own, on the engine thread, while everything waits. But Metal can
adopt memory that begins and ends with a page, and MLX then makes an array of it without a copy. So an
I/O thread moves each tensor to pages of its own. MLX copies where Metal refuses.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from mmap import PAGESIZE, mmap
from typing import Any

import mlx.core as mx
import numpy as np

from firn.cache.arrays.transfers import Transfers

log = logging.getLogger("firn")

MAX_NBYTES = (1 << 31) - PAGESIZE
"""MLX counts the items of an axis in 32 bits."""
TRIED = np.arange(2 * PAGESIZE // 4 - 1, dtype=np.uint32)
"""It ends within a page."""


class AdoptingTransfers(Transfers):
    def __init__(self, mlx: Any = mx) -> None:
        super().__init__()
        self._mlx = mlx

    def stage(self, buffers: Sequence[memoryview]) -> Sequence[memoryview]:
        return [_in_pages(b) if PAGESIZE <= len(b) <= MAX_NBYTES else b for b in buffers]

    def array(
        self, data: np.ndarray[Any, Any], shape: tuple[int, ...], dtype: mx.Dtype
    ) -> mx.array:
        pages = data.base.obj if isinstance(data.base, memoryview) else None
        if not isinstance(pages, Pages):
            return super().array(data, shape, dtype)
        whole: mx.array = self._mlx.asarray(np.frombuffer(pages, np.uint8))
        return whole[: data.nbytes].view(dtype).reshape(shape)


class Pages(mmap):
    """Memory of whole pages that holds one tensor, from its beginning."""


def _in_pages(buffer: memoryview) -> memoryview:
    pages = Pages(-1, -(-len(buffer) // PAGESIZE) * PAGESIZE)
    view = memoryview(pages)[: len(buffer)]
    view[:] = buffer
    return view


def find_transfers(mlx: Any = mx) -> Transfers:
    """Those that adopt memory, unless that fails here."""
    adopting = AdoptingTransfers(mlx)
    try:
        (buffer,) = adopting.stage([memoryview(TRIED.tobytes())])
        data = np.frombuffer(buffer, np.uint32)
        array = adopting.array(data, TRIED.shape, mx.uint32)
        if np.array_equal(np.array(array + 1), TRIED + 1):
            return adopting
        why: object = "the array has other numbers"
    except (AttributeError, RuntimeError, ValueError, TypeError, OSError) as e:
        why = e
    log.warning("records from the SSD are copied once more: %s", why)
    return Transfers()
