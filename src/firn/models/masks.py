"""Which tokens each row may pick next: bits on the host, then plain array operations on any device.

llguidance fills one bit a token. Its own kernels for MLX are Metal only, so the bits are spread with
operations that every backend has.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cached_property

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from llguidance import LLExecutor

from firn.models.grammar import Constraint

Bits = npt.NDArray[np.uint32]
BITS = 32
ALL = np.uint32(0xFFFFFFFF)
MAX_THREADS = 4
MANY_ROWS = 8
"""From here on threads are worth waking: a mask takes 5 to 50 us, and so does a thread's awakening."""


class Masks:
    """Owner: the runner, on the engine thread. The threads it keeps touch bits, never arrays of mlx."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def allowed(self, constraints: Sequence[Constraint | None]) -> mx.array:
        """(rows, vocabulary), true where a token may be picked; all of a row without a constraint.

        A constraint that fails gets its fault set; its row's mask then means nothing.
        """
        found = [(i, c) for i, c in enumerate(constraints) if c is not None]
        bits = self._fill(found, len(constraints))
        for _, constraint in found:
            constraint.check()
        return self._spread(bits)

    def _fill(self, found: list[tuple[int, Constraint]], n_rows: int) -> Bits:
        n_words = max(-(-c.n_tokens // BITS) for _, c in found)
        bits = np.full((n_rows, n_words), ALL, dtype=np.uint32)
        start, stride = bits.ctypes.data, bits.strides[0]
        if len(found) > MANY_ROWS:
            matchers = [(c.matcher, i) for i, c in found]
            self._threads.unsafe_compute_mask_ptr(matchers, start, stride, n_rows)
        else:
            for i, constraint in found:
                constraint.matcher.unsafe_compute_mask_ptr(start + i * stride, stride)
        return bits

    def _spread(self, bits: Bits) -> mx.array:
        each = mx.array(bits[:, :, None]) & self._each_bit
        return each.reshape(bits.shape[0], -1)[:, : self._vocab_size].astype(mx.bool_)

    @cached_property
    def _threads(self) -> LLExecutor:
        return LLExecutor(min(MAX_THREADS, max(1, (os.cpu_count() or 2) // 2)))

    @cached_property
    def _each_bit(self) -> mx.array:
        return mx.array(np.uint32(1) << np.arange(BITS, dtype=np.uint32))
