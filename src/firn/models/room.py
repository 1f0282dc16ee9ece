"""Room for a whole prompt in a row's caches, before its first chunk.

mlx-lm's caches grow by 256 tokens, and each time copy everything they hold: nearly once a chunk, into
a buffer of a size that MLX's own buffer cache cannot have. A prompt's length is known, so its caches are
given that as their step, for one allocation; then the usual one again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from mlx_lm.models.cache import CacheList, KVCache, QuantizedKVCache

MORE_SHARE, MAX_MORE_TOKENS = 8, 1024
"""Room behind a prompt, in parts of it: growing copies all there is, and most turns add little."""
GROWING = (KVCache, QuantizedKVCache)
"""Exactly these: other classes use their step for windows and rings."""


def give_room(layers: Iterable[Any], n_tokens: int) -> None:
    """The next growth of these caches is to `n_tokens`, and more for the reply and the next turn."""
    for layer in _growing(layers):
        step = type(layer).step
        wanted = n_tokens + max(step, min(n_tokens // MORE_SHARE, MAX_MORE_TOKENS))
        missing = wanted - layer.offset if _n_room(layer) < n_tokens else 0
        layer.step = max(-(-missing // step), 1) * step


def end_room(layers: Iterable[Any]) -> None:
    """The prompt is read: from now on they grow little by little."""
    for layer in _growing(layers):
        layer.step = type(layer).step


def _growing(layers: Iterable[Any]) -> Iterator[Any]:
    for layer in layers:
        if isinstance(layer, CacheList):
            yield from _growing(layer.caches)
        elif type(layer) in GROWING:
            yield layer


def _n_room(layer: Any) -> int:
    if layer.keys is None:
        return 0
    keys = layer.keys[0] if isinstance(layer, QuantizedKVCache) else layer.keys
    return int(keys.shape[-2])
