"""Several rows' prompts read in one pass.

mlx-lm's batched cache holds the rows' pasts side by side, right-justified; their new tokens follow from
one column on, shorter ones padded behind. So each row's tokens lie in one piece, and its own caches
become views of that: nothing is moved.

    row 0   . . p p p | n n n n n        row 0 holds columns [2, 10)
    row 1   p p p p p | n n . . .        row 1 holds columns [0, 7)

Owner: the engine thread, through the runner.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache

from firn.models.batch import Row


def can_read_together(layers: Sequence[Any]) -> bool:
    """Plain attention alone: a padded token changes a recurrent state, and takes a place in a window."""
    return bool(layers) and all(type(layer) is KVCache for layer in layers)


class Together:
    """One pass: `feed` is run through the model with `layers`, then each row takes its own."""

    def __init__(self, rows: Sequence[Row], tokens: Sequence[np.ndarray[Any, Any]]) -> None:
        """tokens: what each row is to consume."""
        self._rows = rows
        self._n_new = [len(t) for t in tokens]
        self._n_past = max(row.n_tokens for row in rows)
        self.width = max(self._n_new)
        ids = np.zeros((len(rows), self.width), dtype=np.int32)
        for i, new in enumerate(tokens):
            ids[i, : len(new)] = new
        self.feed = mx.array(ids)
        each = zip(*(row.layers for row in rows), strict=True)
        self.layers = [KVCache.merge(list(layers)) for layers in each]

    def share_out(self) -> None:
        for i, (row, n_new) in enumerate(zip(self._rows, self._n_new, strict=True)):
            start, end = self._n_past - row.n_tokens, self._n_past + n_new
            for lone, batch in zip(row.layers, self.layers, strict=True):
                lone.keys = batch.keys[i : i + 1, :, start:end]
                lone.values = batch.values[i : i + 1, :, start:end]
                lone.offset = end - start
            row.n_tokens += n_new
