"""Room for a whole prompt in a row's caches, before its first chunk.

mlx-lm's caches grow by 256 tokens, and each time copy everything they hold: nearly once per chunk,
into a buffer of a size that MLX's buffer cache never has. A prompt's length is known, so it becomes
the caches' step for one allocation; then their usual step is restored. Large caches that already
hold tokens grow here, one after the other: a chunk is dispatched as a whole, and would hold all of
them twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import KVCache, QuantizedKVCache

from firn.core.values import TokenArray
from firn.models.layers import leaves

MORE_SHARE, MAX_MORE_TOKENS = 8, 1024
"""Room after a prompt: 1 / MORE_SHARE of its length, up to a maximum. Growing copies everything,
and most turns add little."""
LATER_NBYTES = 8 << 20
"""Layers of up to this size are copied with the next pass: waiting for each would take longer."""
GROWING = (KVCache, QuantizedKVCache)
"""Exactly these classes: others use their step for windows and rings."""


class ShapeBuckets:
    """How buffers grow, and passes are padded: here, by what each prompt needs. A device that prefers
    few shapes has another one."""

    common_chunk = 0
    """Chunks of this length at its multiples have a common shape; 0: no chunks have."""

    def end(self, start: int, end: int) -> int:
        """Where to end the chunk [start, end) for a common shape; the rest is another chunk."""
        return end

    def grow(self, layers: Sequence[Any], n_tokens: int) -> None:
        """Make these caches next grow to `n_tokens`, and some more for the reply and the next turn."""
        for layer in _growing(layers):
            room = self._missing(n_tokens, _n_room(layer), layer.offset, type(layer).step)
            if room and layer.offset:
                _grow(layer, room)
                if layer.nbytes > LATER_NBYTES:
                    mx.eval(
                        layer.state
                    )  # the old buffers are free before the next layer's are made
            else:
                layer.step = room or type(layer).step

    def end_growth(self, layers: Sequence[Any]) -> None:
        """The prompt is read: from now on the caches grow by small steps."""
        for layer in _growing(layers):
            layer.step = self._step(_n_room(layer), type(layer).step)

    def fit(self, layers: Sequence[Any], n_new: int) -> PaddedPass | None:
        """How to read a row's next tokens; None: without padding. Its caches must have room."""
        return None

    def width(self, n_new: int) -> int:
        """The width of a pass over several prompts, the longest of which has this many new tokens."""
        return n_new

    def _missing(self, n_tokens: int, n_room: int, offset: int, step: int) -> int:
        """By how many tokens a buffer must grow now; 0: it has room."""
        if n_room >= n_tokens:
            return 0
        wanted = n_tokens + max(step, min(n_tokens // MORE_SHARE, MAX_MORE_TOKENS))
        return max(-(-(wanted - offset) // step), 1) * step

    def _step(self, n_room: int, step: int) -> int:
        """By how many tokens a full buffer of this size grows while a reply is generated."""
        return step


@dataclass(frozen=True, slots=True)
class PaddedPass:
    """width: tokens that the model is given. layers: a row's caches as the model sees them."""

    width: int
    layers: list[Any]

    def pad(self, ids: TokenArray) -> TokenArray:
        return np.pad(ids, (0, self.width - len(ids)))


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


def _growing(layers: Sequence[Any]) -> list[Any]:
    return [layer for layer in leaves(layers) if type(layer) in GROWING]


def _n_room(layer: Any) -> int:
    if layer.keys is None:
        return 0
    keys = layer.keys[0] if isinstance(layer, QuantizedKVCache) else layer.keys
    return int(keys.shape[-2])
