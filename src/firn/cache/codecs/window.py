"""Sliding-window and chunked attention: only the last tokens matter.

A record holds the window layer's tokens of its block in temporal order, whatever their order in the live
ring buffer. If nothing is kept from the front of the sequence, token t of a row of n tokens lies at
(write position - (n - t)) modulo the buffer's length: in a buffer that still grows, in one that a
prefill chunk has just extended, and in a ring that has wrapped, batched or not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from firn.cache.codecs import Arrays, At, concat_tokens
from firn.cache.parts import Part


class RotatingKVCodec:
    part = Part.WINDOW
    buffers = None
    single = "mlx_lm.models.cache.RotatingKVCache"

    def describe(self, layer: Any) -> str | None:
        return None if layer.keep else f"window{layer.max_size}"

    def reach(self, layer: Any) -> int:
        return int(layer.max_size)

    def cut(self, layer: Any, at: At, start: int, end: int) -> Arrays:
        length = layer.keys.shape[2]
        if type(layer).__name__ == "RaggedRing":  # of a group that drafts: by position
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

    def fill(self, layer: Any, pieces: Sequence[Arrays], n_tokens: int) -> None:
        layer.keys, layer.values = concat_tokens(pieces)
        layer.offset = n_tokens
        layer._idx = layer.keys.shape[2]

    def fixed_nbytes(self, layer: Any) -> int:
        return _token_nbytes(layer) * int(layer.max_size)

    def token_nbytes(self, layer: Any) -> int:
        return 0


class ChunkedKVCodec:
    """Attention within fixed chunks: like a window, with an explicit first position."""

    part = Part.WINDOW
    buffers = None
    single = "mlx_lm.models.cache.ChunkedKVCache"

    def describe(self, layer: Any) -> str | None:
        return f"chunk{layer.chunk_size}"

    def reach(self, layer: Any) -> int:
        return int(layer.chunk_size)

    def cut(self, layer: Any, at: At, start: int, end: int) -> Arrays:
        first, last = start - layer.start_position, end - layer.start_position
        return tuple(a[:, :, first:last] for a in (layer.keys, layer.values))

    def fill(self, layer: Any, pieces: Sequence[Arrays], n_tokens: int) -> None:
        layer.keys, layer.values = concat_tokens(pieces)
        layer.offset = n_tokens
        layer.start_position = n_tokens - layer.keys.shape[2]

    def fixed_nbytes(self, layer: Any) -> int:
        return _token_nbytes(layer) * int(layer.chunk_size)

    def token_nbytes(self, layer: Any) -> int:
        return 0


def _token_nbytes(layer: Any) -> int:
    if layer.keys is None:
        return 0
    return int((layer.keys.nbytes + layer.values.nbytes) // layer.keys.shape[2])


CODECS = (RotatingKVCodec(), ChunkedKVCodec())
