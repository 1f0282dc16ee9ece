"""A lone row's attention cache during a step of several tokens, padded so that shapes repeat.

    # [0, offset) the row's tokens   [offset, offset + width) the step's   [.., columns) masked

The cache underneath is mlx-lm's own and is written as usual; attention only sees more columns of it.
Owner: the engine thread, for the length of one forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from firn.models.decode.ragged import ALL_COLUMNS, Columns, padded
from firn.models.layers import kind


def in_blocks(layers: Sequence[Any], columns: Columns) -> list[Any]:
    """The caches as a step of several tokens sees them."""
    if columns == ALL_COLUMNS:
        return list(layers)
    return [WidenedCache(c, columns) if kind(c) == "KVCache" and c.offset else c for c in layers]


class WidenedCache:
    def __init__(self, layer: Any, columns: Columns) -> None:
        self._layer = layer
        self._columns = columns

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array:
        offset = int(self._layer.offset)
        columns = mx.arange(self._columns.width(offset + N))[None]
        newest = mx.arange(offset, offset + N)[:, None]
        mask = columns <= newest
        if window_size is not None:
            mask = mask & (columns > newest - window_size)
        return self._columns.mask(mask, self._layer.keys.dtype)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        layer = self._layer
        width = self._columns.width(int(layer.offset) + keys.shape[2])
        room = self._columns.width(max(width, layer.keys.shape[2]))
        layer.keys, layer.values = padded(layer.keys, room), padded(layer.values, room)
        layer.update_and_fetch(keys, values)
        return layer.keys[..., :width, :], layer.values[..., :width, :]
