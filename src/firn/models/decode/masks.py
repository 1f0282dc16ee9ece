"""Which tokens each row may pick next. Computed on the host, used on any device as a plain array.

llguidance fills one bit per token. Its own kernels for MLX are Metal only; here the bits are unpacked on
the host, while the model's forward pass runs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property

import numpy as np
import numpy.typing as npt

from firn.models.grammar.compiler import Constraint

Bits = npt.NDArray[np.uint32]
Allowed = npt.NDArray[np.bool_]
BITS = 32
ALL = np.uint32(0xFFFFFFFF)
N_THREADS = min(4, max(1, (os.cpu_count() or 2) // 2))
MANY_ROWS = 8
"""More rows than this are worth threads: a mask takes 5 to 50 us, and so does waking a thread."""


class Masks:
    """Owner: the runner. Its threads, for many rows, touch constraints and bits but no arrays."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size

    def fill(self, constraints: Sequence[Constraint | None]) -> Allowed:
        """(rows, vocabulary), true where a token may be picked; all true for a row without a constraint.

        If a constraint fails, its fault is set and its row's mask means nothing.
        """
        constrained = [(i, c) for i, c in enumerate(constraints) if c is not None]
        bits = self._compute(constrained, len(constraints)).view(np.uint8)
        each = np.unpackbits(bits, axis=1, count=self._vocab_size, bitorder="little")
        return each.view(np.bool_)

    def fill_ahead(self, rows: Sequence[tuple[Constraint | None, Sequence[int]]]) -> Allowed:
        """(positions, vocabulary), for the next token of every row and after each token of its draft.

        A draft must hold nothing that its constraint forbids: see `Constraint.permitted`.
        """
        n_words = max(-(-c.n_tokens // BITS) for c, _ in rows if c is not None)
        n_each = [1 + len(draft) for _, draft in rows]
        bits = np.full((sum(n_each), n_words), ALL, dtype=np.uint32)
        start, stride, first = bits.ctypes.data, bits.strides[0], 0
        for (constraint, draft), n in zip(rows, n_each, strict=True):
            if constraint is not None:
                places = [start + i * stride for i in range(first, first + n)]
                constraint.look_ahead(draft, places, stride)
            first += n
        each = np.unpackbits(bits.view(np.uint8), axis=1, count=self._vocab_size, bitorder="little")
        return each.view(np.bool_)

    def _compute(self, constrained: list[tuple[int, Constraint]], n_rows: int) -> Bits:
        n_words = max(-(-c.n_tokens // BITS) for _, c in constrained)
        bits = np.full((n_rows, n_words), ALL, dtype=np.uint32)
        start, stride = bits.ctypes.data, bits.strides[0]

        def fill(rows: list[tuple[int, Constraint]]) -> None:
            for i, constraint in rows:
                constraint.fill(start + i * stride, stride)

        if len(constrained) > MANY_ROWS and N_THREADS > 1:
            list(self._threads.map(fill, (constrained[i::N_THREADS] for i in range(N_THREADS))))
        else:
            fill(constrained)
        return bits

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(N_THREADS, thread_name_prefix="firn-masks")
