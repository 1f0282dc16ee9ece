"""Sliding-window and chunked attention: only the last tokens matter.

A record holds the window layer's tokens of its block in temporal order, whatever their order in the
live ring buffer. If nothing is kept from the front of the sequence, token t of a row of n tokens is
at (write position - (n - t)) modulo the buffer's length: in a buffer that is still growing, in one
that a prefill chunk has just extended, and in a ring that has wrapped, batched or not.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from firn.cache.codecs import Arrays, At, concat_tokens, kv_token_nbytes
from firn.cache.parts import Part
from firn.core.ports import LayerCache


class WindowCodec:
    """What codecs of windows have in common: a buffer of a fixed size."""

    part = Part.WINDOW
    buffers = None
    size: str
    """Name of the layer's field that holds its window size in tokens."""

    def reach(self, layer: LayerCache) -> int:
        return int(getattr(layer, self.size))

    def fixed_nbytes(self, layer: LayerCache) -> int:
        return kv_token_nbytes(layer) * self.reach(layer)

    def token_nbytes(self, layer: LayerCache) -> int:
        return 0


class RotatingKVCodec(WindowCodec):
    single = "mlx_lm.models.cache.RotatingKVCache"
    size = "max_size"

    def describe(self, layer: LayerCache) -> str | None:
        return None if layer.keep else f"window{layer.max_size}"

    def cut(self, layer: LayerCache, at: At, start: int, end: int) -> Arrays:
        length = layer.keys.shape[2]
        if type(layer).__name__ == "RaggedRing":  # a drafting group's: indexed by position
            first = layer.column_of(start)
        else:
            first = (layer._idx - (at.n_tokens - start)) % length
        n = end - start
        row = slice(at.index, at.index + 1)

        def temporal(a: mx.array) -> mx.array:
            if first + n <= length:
                return a[row, :, first : first + n]
            wrapped = first + n - length
            return mx.concatenate([a[row, :, first:], a[row, :, :wrapped]], axis=2)

        return temporal(layer.keys), temporal(layer.values)

    def fill(self, layer: LayerCache, pieces: Sequence[Arrays], n_tokens: int) -> None:
        layer.keys, layer.values = concat_tokens(pieces)
        layer.offset = n_tokens
        layer._idx = layer.keys.shape[2]


class ChunkedKVCodec(WindowCodec):
    """Attention within fixed chunks: like a window, with an explicit first position."""

    single = "mlx_lm.models.cache.ChunkedKVCache"
    size = "chunk_size"

    def describe(self, layer: LayerCache) -> str | None:
        return f"chunk{layer.chunk_size}"

    def cut(self, layer: LayerCache, at: At, start: int, end: int) -> Arrays:
        first, last = start - layer.start_position, end - layer.start_position
        return tuple(a[:, :, first:last] for a in (layer.keys, layer.values))

    def fill(self, layer: LayerCache, pieces: Sequence[Arrays], n_tokens: int) -> None:
        layer.keys, layer.values = concat_tokens(pieces)
        layer.offset = n_tokens
        layer.start_position = n_tokens - layer.keys.shape[2]


CODECS = (RotatingKVCodec(), ChunkedKVCodec())
