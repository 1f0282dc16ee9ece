"""How many threads OpenBLAS takes for a product, where it multiplies for MLX's CPU backend.

A thread of OpenBLAS that has done its part waits for the next product without sleeping. A decode step of
a small model is a hundred tiny products with pauses between them: there a second thread saves nothing,
and takes a core from Python, from MLX and from the clients.
"""

from __future__ import annotations

import ctypes
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

WORTHWHILE = 1 << 18
"""Multiplications in a product that are worth more than one thread."""


class Threads:
    """One thread where products are small, all where they are not. Owner: the engine thread."""

    def __init__(self, library: Any, *, weights_a_product: int) -> None:
        """library: OpenBLAS's functions; with one thread of its own there is nothing to choose."""
        self._library = library
        self._n_all = self._now = int(library.openblas_get_num_threads())
        self._weights = weights_a_product

    def prepare(self, n_tokens: int) -> None:
        """The products that come are of so many tokens at once."""
        n = self._n_all if self._weights * n_tokens >= WORTHWHILE else 1
        if n != self._now:
            self._library.openblas_set_num_threads(n)
            self._now = n


def threads_for(model: Any) -> Threads | None:
    """None: it is not OpenBLAS that multiplies in this process."""
    library = ctypes.CDLL(None)
    if not hasattr(library, "openblas_set_num_threads"):
        return None
    return Threads(library, weights_a_product=_weights_a_product(model))


def _weights_a_product(model: Any) -> int:
    arrays = [w for _, w in tree_flatten(model.parameters()) if isinstance(w, mx.array)]
    sizes = [w.size for w in arrays if w.ndim >= 2]
    return sum(sizes) // max(len(sizes), 1)
