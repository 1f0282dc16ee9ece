"""Room for a whole prompt in a row's caches, before its first chunk.

mlx-lm's caches grow by 256 tokens, and each time copy everything they hold: nearly once per chunk,
into a buffer of a size that MLX's buffer cache never has. A prompt's length is known, so it becomes
the caches' step for one allocation; then their usual step is restored. Large caches that already
hold tokens grow here, one after the other: a chunk is dispatched as a whole, and would hold all of
them twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from firn.models.layers import leaves
from firn.models.shapes import growth, rounded

MORE_SHARE, MAX_MORE_TOKENS = 8, 1024
"""Room after a prompt: 1 / MORE_SHARE of its length, up to a maximum. Growing copies everything,
and most turns add little."""
LATER_NBYTES = 8 << 20
"""Layers of up to this size are copied with the next pass: waiting for each would take longer."""
GROWING = (KVCache, QuantizedKVCache)
"""Exactly these classes: others use their step for windows and rings."""


def give_room(layers: Sequence[Any], n_tokens: int, *, few_shapes: bool = False) -> None:
    """Make these caches next grow to `n_tokens`, and some more for the reply and the next turn.

    few_shapes: to one of the few buffer sizes that this device uses, with room for padding."""
    for layer in _growing(layers):
        step = type(layer).step
        wanted = n_tokens + max(step, min(n_tokens // MORE_SHARE, MAX_MORE_TOKENS))
        if few_shapes:
            wanted = rounded(n_tokens + step)
        needed = n_tokens + (step if few_shapes else 0)
        missing = wanted - layer.offset if _n_room(layer) < needed else 0
        room = missing if few_shapes and missing else max(-(-missing // step), 1) * step
        if missing and layer.offset:
            _grow(layer, room)
            if layer.nbytes > LATER_NBYTES:
                mx.eval(layer.state)  # the old buffers are free before the next layer's are made
        else:
            layer.step = room


def _grow(layer: Any, room: int) -> None:
    """Make buffers with room for `room` more tokens. They are computed with the next pass."""

    def grown(a: mx.array) -> mx.array:
        more = mx.zeros((*a.shape[:-2], room, a.shape[-1]), dtype=a.dtype)
        return mx.concatenate([a[..., : layer.offset, :], more], axis=-2)

    if isinstance(layer, QuantizedKVCache):
        layer.keys, layer.values = (
            tuple(map(grown, parts)) for parts in (layer.keys, layer.values)
        )
    else:
        layer.keys, layer.values = grown(layer.keys), grown(layer.values)


def end_room(layers: Sequence[Any], *, few_shapes: bool = False) -> None:
    """The prompt is read: from now on the caches grow by small steps."""
    for layer in _growing(layers):
        layer.step = growth(_n_room(layer)) if few_shapes else type(layer).step


def _growing(layers: Sequence[Any]) -> list[Any]:
    return [layer for layer in leaves(layers) if type(layer) in GROWING]


def _n_room(layer: Any) -> int:
    if layer.keys is None:
        return 0
    keys = layer.keys[0] if isinstance(layer, QuantizedKVCache) else layer.keys
    return int(keys.shape[-2])
