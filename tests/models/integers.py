"""A model that computes with small integers, so that every way to compute the same gives the same bits.

It has mlx-lm's own caches, and everything that it caches and says is a hash of all that it sees: of
tokens, their positions and their order. So one wrong cell in a cache is another number in all later
records, and after a few tokens another reply. Sums of integers do not depend on their order, hence not
on chunks, padding or batches; and one byte in each group of a quantised cell makes its scale 1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import (
    ArraysCache,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from firn.core.values import Prompt
from firn.models.model_arguments import CachesAsTheyAre
from firn.sparse.placing import TokenPositions
from tests.models.alone import Built
from tests.zoo import VOCAB_SIZE

PRIME = 251
CELL = 32
"""Values of a cell, which is the smallest group that MLX quantises."""
FIRST_TOKEN = 16
"""Those below are never said, as in the prompts of tests."""


class IntegerModel:
    """layers: makes an empty cache for each layer, all of them different in what they hash."""

    def __init__(
        self,
        layers: Sequence[Callable[[], Any]],
        *,
        heads: Sequence[int] = (0,),
        add: Callable[[mx.array], mx.array] = lambda seen: seen,
    ) -> None:
        """heads: which it computes, of those that a layer has; each has caches of its own. add: the
        sum over those that other ranks compute."""
        self._layers = tuple(layers)
        self._heads = tuple(heads)
        self._add = add

    def make_layers(self) -> list[Any]:
        return [make() for make in self._layers for _ in self._heads]

    def __call__(self, ids: mx.array, cache: Sequence[Any]) -> mx.array:
        """Logits (rows, tokens, vocabulary), the largest of which leads by 1."""
        x = ids.astype(mx.int32)
        caches = iter(cache)
        for i in range(len(self._layers)):
            seen = [_read((x * (head + 1) + head) % PRIME, next(caches)) for head in self._heads]
            x = (5 * x + 3 * self._add(sum(seen[1:], seen[0])) + i + 1) % PRIME
        said = FIRST_TOKEN + (31 * x + 7 * ids.astype(mx.int32)) % (VOCAB_SIZE - FIRST_TOKEN)
        behind = (mx.arange(VOCAB_SIZE) - said[..., None]) % VOCAB_SIZE
        return -behind.astype(mx.float32)


def _read(x: mx.array, layer: Any) -> mx.array:
    return _state(x, layer) if isinstance(layer, ArraysCache) else _attended(x, layer)


def _attended(x: mx.array, layer: Any) -> mx.array:
    """What each token sees: a hash of the cells that its mask shows, in any order of the columns."""
    if isinstance(layer, ChunkedKVCache):
        layer.maybe_trim_front()
    n = x.shape[1]
    at = _positions(layer, n)
    seen = _seen(layer, n, at)
    keys, values = layer.update_and_fetch(
        _cells(x, at % 256, at // 256), _cells((7 * x + 13 * at + x * (at % PRIME)) % PRIME)
    )
    if hasattr(layer, "bits"):
        keys, values = (mx.dequantize(*a, layer.group_size, layer.bits) for a in (keys, values))
    key, value = keys[:, 0, :, 2:5].astype(mx.int32), values[:, 0, :, 2].astype(mx.int32)
    hashed = value * (1 + (3 * key[..., 0] + 5 * key[..., 1] + 11 * key[..., 2]) % 7)
    shown = hashed[:, None] if seen is None else mx.where(seen, hashed[:, None], 0)
    return mx.sum(shown, axis=-1) % PRIME


def _positions(layer: Any, n: int) -> mx.array:
    """(rows, tokens): those that the cache says come next."""
    if isinstance(layer.offset, TokenPositions):
        return layer.offset.array[None]
    return mx.array(layer.offset).reshape(-1, 1) + mx.arange(n)


def _seen(layer: Any, n: int, at: mx.array) -> mx.array | None:
    """(rows, tokens, columns): which columns each token sees; None: all of them."""
    if isinstance(layer, ChunkedKVCache):
        columns = mx.arange(layer.start_position, layer.offset + n)
        in_chunk = columns // layer.chunk_size == at[..., None] // layer.chunk_size
        return in_chunk & (columns <= at[..., None])
    mask = layer.make_mask(n, return_array=True, window_size=None)
    if mask is None:
        return None
    return mask.reshape(-1, *mask.shape[-2:]) if mask.ndim > 1 else mask


def _cells(*columns: mx.array) -> mx.array:
    """(rows, 1, tokens, CELL): 0 and 255, which fix the scale of a quantised cell, and the columns."""
    zeros = mx.broadcast_to(mx.zeros_like(columns[0]), columns[0].shape)
    cell = [zeros, zeros + 255, *(mx.broadcast_to(c, zeros.shape) for c in columns)]
    cell += [zeros] * (CELL - len(cell))
    return mx.stack(cell, axis=-1)[:, None].astype(mx.float32)


def _state(x: mx.array, layer: Any) -> mx.array:
    """A sum over all tokens so far, each times its place: which token, and in which order."""
    mask = layer.make_mask(x.shape[1])
    counted = mx.ones_like(x) if mask is None else mask.astype(mx.int32)
    sums, n_before = (0 if a is None else a.astype(mx.int32) for a in layer.cache)
    place = n_before + mx.cumsum(counted, axis=1)
    sums = (sums + mx.cumsum(counted * x * (1 + place % 17), axis=1)) % PRIME
    layer.cache = [a[:, -1:].astype(mx.float32) for a in (sums, place)]
    return sums


class SeeingModel(CachesAsTheyAre):
    """An integer model that sees pictures, and is given positions. Implements ModelArguments.

    A picture's tokens are its pixels, and take up two positions in all. is_whole: each of them depends
    on all pixels that are read with it, so no pass may cut a picture.
    """

    def __init__(self, model: IntegerModel, *, is_whole: bool) -> None:
        self._model = model
        self._is_whole = is_whole

    def __call__(
        self,
        ids: mx.array,
        cache: Sequence[Any],
        positions: mx.array | None = None,
        pixels: mx.array | None = None,
    ) -> mx.array:
        """Without `positions` the ids are text that follows what the caches hold."""
        if positions is None:
            counting = next(layer for layer in cache if hasattr(layer, "offset"))
            positions = _positions(counting, ids.shape[1])
        x = ids.astype(mx.int32)
        if pixels is not None:
            x = mx.where(pixels > 0, pixels, x)
        return self._model(x + VOCAB_SIZE * positions.astype(mx.int32), cache)

    def chunk(self, prompt: Prompt, start: int, end: int) -> dict[str, Any]:
        positions, pixels = np.arange(len(prompt)), np.zeros(len(prompt), dtype=np.int64)
        for span, picture in zip(prompt.picture_spans, prompt.picture_inputs, strict=True):
            own = slice(max(span.start, start), max(min(span.end, end), start))
            pixels[span.start : span.end] = picture.tensors["pixels"]
            if self._is_whole:
                pixels[own] += pixels[own].sum() % PRIME
            positions[span.start : span.end] = positions[span.start]
            positions[span.end - 1] += 1
            positions[span.end :] += 2 - (span.end - span.start)
        arguments = {"positions": mx.array(positions[start:end])[None]}
        if pixels[start:end].any():
            arguments["pixels"] = mx.array(pixels[start:end].astype(np.int32))[None]
        return arguments

    def step(self, positions: Sequence[int], width: int = 1) -> dict[str, Any]:
        return {"positions": mx.array(list(positions))[:, None] + mx.arange(width)}

    def shift(self, prompt: Prompt) -> int:
        return sum(2 - (span.end - span.start) for span in prompt.picture_spans)


# --- models of these layers --------------------------------------------------------------------


def full() -> KVCache:
    return KVCache()


def quantised() -> QuantizedKVCache:
    return QuantizedKVCache(group_size=CELL, bits=8)


def window(size: int) -> Callable[[], RotatingKVCache]:
    return lambda: RotatingKVCache(max_size=size)


def chunked(size: int) -> Callable[[], ChunkedKVCache]:
    return lambda: ChunkedKVCache(size)


def state() -> ArraysCache:
    return ArraysCache(2)


def seeing(*layers: Callable[[], Any], is_whole: bool = False) -> Callable[[], Built]:
    """For the harness: builds a model of these layers that sees pictures."""

    def build() -> Built:
        model = IntegerModel(layers)
        return SeeingModel(model, is_whole=is_whole), model.make_layers

    return build


def integers(*layers: Callable[[], Any], **options: Any) -> Callable[[], Built]:
    """For the harness: builds a model of these layers."""

    def build() -> Built:
        model = IntegerModel(layers, **options)
        return model, model.make_layers

    return build
