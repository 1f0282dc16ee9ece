"""How the device's arrays become host bytes, and the other way round.

`Transfers` does it by MLX alone, which is best where the device uses the host's memory: nothing is
copied on the way out, since an array never changes once it is computed, and the bytes keep it alive.
Another device brings its own. There is one for the process, as there is one device (`use`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import mlx.core as mx
import numpy as np


class Lent(Protocol):
    """Arrays that a writer will read. Must be freed on the engine thread, like any array."""

    def fetch(self) -> list[memoryview]:
        """The bytes of each array. Any thread; valid until that thread's next fetch."""
        ...


class Transfers:
    awaits_copies = True
    """Whether the engine waits for the copies of records."""
    max_pieces = 1
    """Pieces of a row that one launch copies."""
    needs_trial = False
    """Whether kernels have to be compiled before records can be copied."""

    def __init__(self, *, fill_nbytes: int = 0) -> None:
        """fill_nbytes: layers that are filled together, in bytes: more memory for a moment, far fewer
        launches. 0: one after another."""
        self.fill_nbytes = fill_nbytes

    def lend(self, arrays: Sequence[mx.array]) -> Lent:
        """Engine thread. The arrays are computed, or dispatched so that `fetch` can wait for them."""
        # NumPy has no bfloat16: its bits travel as integers.
        plain = tuple(a.view(mx.uint16) if a.dtype == mx.bfloat16 else a for a in arrays)
        mx.eval(plain)
        return _InHostMemory(plain)

    def stage(self, buffers: Sequence[memoryview]) -> Sequence[memoryview]:
        """The buffers, moved to where the device reads them fastest if there is room. Any thread."""
        return buffers

    def array(
        self, data: np.ndarray[Any, Any], shape: tuple[int, ...], dtype: mx.Dtype
    ) -> mx.array:
        """An array of these numbers, which must stay alive until it is evaluated. Engine thread."""
        array = mx.array(data.reshape(shape))
        return array.view(dtype) if array.dtype != dtype else array

    @property
    def gathers(self) -> bool:
        """Whether one launch can copy the cells of many layers (`gather`)."""
        return False

    def can_gather(self, arrays: Sequence[mx.array]) -> bool:
        """Whether `gather` can copy cells of these arrays, which are of one shape and type."""
        return False

    def gather(
        self, arrays: Sequence[mx.array], row: int, bounds: Sequence[tuple[int, int]]
    ) -> list[mx.array]:
        """Columns [start, end) of one row of these arrays: one new array for each of at most
        `max_pieces` bounds."""
        raise NotImplementedError

    def stop_gathering(self, why: object) -> None:
        """The kernel fails, or copies other cells."""


class _InHostMemory:
    def __init__(self, arrays: tuple[mx.array, ...]) -> None:
        self._arrays = arrays

    def fetch(self) -> list[memoryview]:
        return [_bytes(array) for array in self._arrays]


def _bytes(array: mx.array) -> memoryview:
    """C-contiguous bytes; a copy only if the array is not contiguous."""
    return np.ascontiguousarray(np.asarray(array)).reshape(-1).view(np.uint8).data


_in_use = [Transfers()]


def transfers() -> Transfers:
    """The process's."""
    return _in_use[0]


def use(new: Transfers) -> Transfers:
    """Before the first record is made. Returns what was used before."""
    before, _in_use[0] = _in_use[0], new
    return before
