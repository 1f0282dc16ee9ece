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
from firn.core.errors import TokensNotHeld
from firn.core.ports import LayerCache


class WindowCodec:
    """What codecs of windows have in common: a buffer of a fixed size."""

    part = Part.WINDOW
    buffers = None
    size: str
    """Name of the layer's field that holds its window size in tokens."""

    def reach(self, layer: LayerCache) -> int:
        return int(getattr(layer, self.size))

    def first_held(self, layer: LayerCache, at: At) -> int:
        """The oldest of the row's tokens that the layer still holds; at.n_tokens if none can be
        told apart."""
        raise NotImplementedError

    def cut(self, layer: LayerCache, at: At, start: int, end: int) -> Arrays:
        first = self.first_held(layer, at)
        if start < first:
            raise TokensNotHeld(start, end, first=first, n_tokens=at.n_tokens)
        return self._cut(layer, at, start, end)

    def _cut(self, layer: LayerCache, at: At, start: int, end: int) -> Arrays:
        """Tokens that the layer holds."""
        raise NotImplementedError

    def fixed_nbytes(self, layer: LayerCache) -> int:
        return kv_token_nbytes(layer) * self.reach(layer)

    def token_nbytes(self, layer: LayerCache) -> int:
        return 0


class RotatingKVCodec(WindowCodec):
    single = "mlx_lm.models.cache.RotatingKVCache"
    size = "max_size"

    def describe(self, layer: LayerCache) -> str | None:
        return None if layer.keep else f"window{layer.max_size}"

    def first_held(self, layer: LayerCache, at: At) -> int:
        if _is_ragged(layer):
            return int(layer.first_held(at.index))
        if at.n_unread:  # it does not say how far it was written
            return at.n_tokens
        length = int(layer.keys.shape[2])
        if hasattr(layer, "rotated"):  # a group's, right-justified
            n_columns = min(length if layer.rotated else int(layer._idx), int(layer.max_size))
        else:
            n_columns = length if layer.offset == at.n_tokens else 0
        return at.n_tokens - min(at.n_tokens, n_columns)

    def _cut(self, layer: LayerCache, at: At, start: int, end: int) -> Arrays:
        length = layer.keys.shape[2]
        if _is_ragged(layer):
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

    def first_held(self, layer: LayerCache, at: At) -> int:
        return int(layer.start_position)

    def _cut(self, layer: LayerCache, at: At, start: int, end: int) -> Arrays:
        first, last = start - layer.start_position, end - layer.start_position
        return tuple(a[:, :, first:last] for a in (layer.keys, layer.values))

    def fill(self, layer: LayerCache, pieces: Sequence[Arrays], n_tokens: int) -> None:
        layer.keys, layer.values = concat_tokens(pieces)
        layer.offset = n_tokens
        layer.start_position = n_tokens - layer.keys.shape[2]


def _is_ragged(layer: LayerCache) -> bool:
    """Whether it is a drafting group's ring, which is indexed by position."""
    return hasattr(layer, "column_of")


CODECS = (RotatingKVCodec(), ChunkedKVCodec())
