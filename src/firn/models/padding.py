"""A lone row's attention cache, for one step of several tokens that is to have a shape seen before.

    # [0, offset) the row's tokens   [offset, offset + width) the step's   [.., columns) masked

The cache below is mlx-lm's own and is written as ever; only what attention sees of it is wider.
Owner: the engine thread, for the length of one forward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from firn.models.ragged import padded, seen_width
from firn.models.rewind import kind


def in_blocks(layers: Sequence[Any], block: int) -> list[Any]:
    """The caches for a step of several tokens: what they show is a multiple of `block` columns."""
    if block == 1:
        return list(layers)
    return [Padded(c, block) if kind(c) == "KVCache" and c.offset else c for c in layers]


class Padded:
    def __init__(self, layer: Any, block: int) -> None:
        self._layer = layer
        self._block = block

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array:
        offset = int(self._layer.offset)
        columns = mx.arange(seen_width(offset + N, block=self._block))[None]
        newest = mx.arange(offset, offset + N)[:, None]
        mask = columns <= newest
        if window_size is not None:
            mask = mask & (columns > newest - window_size)
        return mask

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        layer = self._layer
        width = seen_width(int(layer.offset) + keys.shape[2], block=self._block)
        room = seen_width(max(width, layer.keys.shape[2]), block=self._block)
        layer.keys, layer.values = padded(layer.keys, room), padded(layer.values, room)
        layer.update_and_fetch(keys, values)
        return layer.keys[..., :width, :], layer.values[..., :width, :]
