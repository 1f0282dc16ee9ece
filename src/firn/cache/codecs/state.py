"""Recurrent state: all of it at one position, whatever the model keeps in it.

Convolution and SSM states, gated-delta matrices, token shifts, n-gram contexts; and caches that
only one model has, neither pages nor a window, which can be restored from their fields.
"""

from __future__ import annotations

from collections.abc import Sequence

from firn.cache.codecs import Arrays, At
from firn.cache.parts import Part
from firn.core.ports import LayerCache


class StateCodec:
    """What codecs of states have in common."""

    part = Part.STATE
    buffers = None

    def reach(self, layer: LayerCache) -> int:
        return 0

    def fixed_nbytes(self, layer: LayerCache) -> int:
        return int(layer.nbytes)

    def token_nbytes(self, layer: LayerCache) -> int:
        return 0


class ArraysCodec(StateCodec):
    single = "mlx_lm.models.cache.ArraysCache"

    def describe(self, layer: LayerCache) -> str | None:
        return f"arrays{len(layer.cache)}"

    def cut(self, layer: LayerCache, at: At, start: int, end: int) -> Arrays:
        row = slice(at.index, at.index + 1)
        return tuple(None if a is None else a[row] for a in layer.cache)

    def fill(self, layer: LayerCache, pieces: Sequence[Arrays], n_tokens: int) -> None:
        (arrays,) = pieces
        layer.cache = [None if a is None else a[...] for a in arrays]


class DeepseekV41Codec(StateCodec):
    """One layer's window, compressed groups and open group: too entangled to be cut by token."""

    single = "mlx_lm.models.deepseek_v41.LayerCache"
    FIELDS = ("window", "compress_kv", "index_k", "pending_kv", "pending_gate")

    def describe(self, layer: LayerCache) -> str | None:
        return f"dsv41w{layer.window_size}"

    def cut(self, layer: LayerCache, at: At, start: int, end: int) -> Arrays:
        return tuple(getattr(layer, field) for field in self.FIELDS)

    def fill(self, layer: LayerCache, pieces: Sequence[Arrays], n_tokens: int) -> None:
        (arrays,) = pieces
        for field, array in zip(self.FIELDS, arrays, strict=True):
            setattr(layer, field, None if array is None else array[...])
        layer.offset = n_tokens


CODECS = (ArraysCodec(), DeepseekV41Codec())
