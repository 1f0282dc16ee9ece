"""Plain attention: keys and values that grow by one entry per token, quantised or not.

mlx-lm treats MLA and other latent caches as plain attention, with a latent in place of the keys,
and so does this module.
"""

from __future__ import annotations

from collections.abc import Sequence

import mlx.core as mx

from firn.cache.codecs import ALL_TOKENS, Arrays, At, Buffers, concat_tokens, kv_token_nbytes
from firn.cache.parts import Part
from firn.core.errors import TokensNotHeld
from firn.core.ports import LayerCache

STEP = 256
"""mlx-lm grows its buffers by this many tokens; a restored buffer has room for at least as many."""


class KVBuffers:
    def is_lone(self, layer: LayerCache) -> bool:
        return type(layer).__name__ == "KVCache"

    def take(self, layer: LayerCache) -> Arrays:
        return layer.keys, layer.values

    def first_column(self, layer: LayerCache, at: At) -> int:
        return _first_column(layer, at)

    def give(self, layer: LayerCache, arrays: Arrays, n_tokens: int) -> None:
        layer.keys, layer.values = arrays
        layer.offset = n_tokens


class QuantizedKVBuffers:
    def is_lone(self, layer: LayerCache) -> bool:
        return type(layer).__name__ == "QuantizedKVCache"

    def take(self, layer: LayerCache) -> Arrays:
        return (*layer.keys, *layer.values)

    def first_column(self, layer: LayerCache, at: At) -> int:
        return _first_column(layer, at)

    def give(self, layer: LayerCache, arrays: Arrays, n_tokens: int) -> None:
        layer.keys, layer.values = arrays[:3], arrays[3:]
        layer.offset = n_tokens


class PagesCodec:
    """What codecs of pages have in common."""

    part = Part.PAGES

    def reach(self, layer: LayerCache) -> int:
        return ALL_TOKENS

    def fixed_nbytes(self, layer: LayerCache) -> int:
        return 0


class KVCodec(PagesCodec):
    buffers: Buffers | None = KVBuffers()
    single = "mlx_lm.models.cache.KVCache"

    def describe(self, layer: LayerCache) -> str | None:
        return "kv"

    def cut(self, layer: LayerCache, at: At, start: int, end: int) -> Arrays:
        first = _first_column(layer, at)
        row = slice(at.index, at.index + 1)
        return tuple(a[row, :, first + start : first + end] for a in (layer.keys, layer.values))

    def fill(self, layer: LayerCache, pieces: Sequence[Arrays], n_tokens: int) -> None:
        layer.keys, layer.values = concat_tokens(pieces, pad=_room(n_tokens))
        layer.offset = n_tokens

    def token_nbytes(self, layer: LayerCache) -> int:
        return kv_token_nbytes(layer)


class ConcatenateKVCodec(KVCodec):
    single = "mlx_lm.models.cache.ConcatenateKVCache"
    buffers = None

    def fill(self, layer: LayerCache, pieces: Sequence[Arrays], n_tokens: int) -> None:
        layer.keys, layer.values = concat_tokens(pieces)
        layer.offset = n_tokens


class QuantizedKVCodec(PagesCodec):
    """(packed, scales, biases) of the keys, then of the values: stored as they are."""

    buffers: Buffers | None = QuantizedKVBuffers()
    single = "mlx_lm.models.cache.QuantizedKVCache"

    def describe(self, layer: LayerCache) -> str | None:
        return f"qkv{layer.bits}x{layer.group_size}"

    def cut(self, layer: LayerCache, at: At, start: int, end: int) -> Arrays:
        first = _first_column(layer, at)
        both = (*layer.keys, *layer.values)
        return tuple(a[:, :, first + start : first + end] for a in both)

    def fill(self, layer: LayerCache, pieces: Sequence[Arrays], n_tokens: int) -> None:
        joined = concat_tokens(pieces, pad=_room(n_tokens))
        layer.keys, layer.values = joined[:3], joined[3:]
        layer.offset = n_tokens

    def token_nbytes(self, layer: LayerCache) -> int:
        if layer.keys is None:
            return 0
        total = sum(a.nbytes for a in (*layer.keys, *layer.values))
        return int(total // layer.keys[0].shape[2])


class QuantizingKVCodec(KVCodec):
    """Plain attention whose records are kept quantised: smaller, and no longer exact."""

    buffers = None

    def __init__(self, bits: int, group_size: int) -> None:
        self.bits = bits
        self.group_size = group_size

    def describe(self, layer: LayerCache) -> str | None:
        return f"kv~{self.bits}x{self.group_size}"

    def cut(self, layer: LayerCache, at: At, start: int, end: int) -> Arrays:
        out: list[mx.array] = []
        for a in _present(super().cut(layer, at, start, end)):
            out += mx.quantize(a, group_size=self.group_size, bits=self.bits)
        return tuple(out)

    def fill(self, layer: LayerCache, pieces: Sequence[Arrays], n_tokens: int) -> None:
        joined = _present(concat_tokens(pieces, pad=_room(n_tokens)))
        layer.keys, layer.values = (
            mx.dequantize(w, scales, biases, self.group_size, self.bits)
            for w, scales, biases in (joined[:3], joined[3:])
        )
        layer.offset = n_tokens


def quantising(layer: LayerCache, *, bits: int, group_size: int) -> KVCodec:
    """The codec that quantises this layer's records; the exact one if no group size fits its heads."""
    if layer.keys is None:
        return QuantizingKVCodec(bits, group_size)
    widths = (layer.keys.shape[-1], layer.values.shape[-1])
    for size in (group_size, 64, 32):
        if size <= group_size and all(w and w % size == 0 for w in widths):
            return QuantizingKVCodec(bits, size)
    return KVCodec()


def _present(arrays: Arrays) -> list[mx.array]:
    return [a for a in arrays if a is not None]


def _first_column(layer: LayerCache, at: At) -> int:
    """Where the row's tokens begin: in a group's right-justified buffer after its padding, else at 0.

    Raises TokensNotHeld if the layer has fewer tokens than the row: then it is not the row's.
    """
    write_at = getattr(layer, "_idx", None)
    if write_at is not None:
        first, n_held = int(write_at) - at.n_tokens, int(write_at)
    else:
        lengths = getattr(layer, "lengths", None)  # of a drafting group
        first, n_held = 0, int(layer.offset if lengths is None else lengths[at.index])
    if n_held < at.n_tokens:
        raise TokensNotHeld(0, at.n_tokens, first=0, n_tokens=n_held)
    return first


def _room(n_tokens: int) -> int:
    """Room after the restored tokens; without it the next token would copy the whole buffer."""
    return -n_tokens % STEP + STEP


CODECS = (KVCodec(), ConcatenateKVCodec(), QuantizedKVCodec())
