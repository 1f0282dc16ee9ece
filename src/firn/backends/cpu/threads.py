"""How many threads OpenBLAS uses for a product.

A second thread has to be woken up and waited for. A decode step of a small model is a hundred tiny
products with pauses between them: there a second thread saves nothing, and takes a core from
Python, MLX and the clients.
"""

from __future__ import annotations

from typing import Any, Protocol

import mlx.core as mx
from mlx.utils import tree_flatten

WORTHWHILE = 1 << 18
"""From this many multiplications on, a product is worth more than one thread."""


class HasThreads(Protocol):
    n_threads: int

    def set_threads(self, n: int) -> None: ...


class Threads:
    """One thread for small products, all for larger ones. Owner: the engine thread."""

    def __init__(self, library: HasThreads, model: Any) -> None:
        self._library = library
        self._now = library.n_threads
        self._weights = weights_a_product(model)

    def prepare(self, n_tokens: int) -> None:
        """Call it before computing products of `n_tokens` tokens each."""
        n = self._library.n_threads if self._weights * n_tokens >= WORTHWHILE else 1
        if n != self._now:
            self._library.set_threads(n)
            self._now = n


def weights_a_product(model: Any) -> int:
    """The mean size of the model's matrices."""
    arrays = [w for _, w in tree_flatten(model.parameters()) if isinstance(w, mx.array)]
    sizes = [w.size for w in arrays if w.ndim >= 2]
    return sum(sizes) // max(len(sizes), 1)
