"""mlx-vlm's cache classes: mlx-lm's names and fields, in another module and with another `state`.

Records are cut from the fields, never from `state`, so the codecs are the same; only a class that keeps
more than its namesake needs its own code.
"""

from __future__ import annotations

from collections.abc import Sequence

from firn.cache.codecs import Arrays
from firn.cache.codecs.pages import ConcatenateKVCodec, KVCodec, QuantizedKVCodec
from firn.cache.codecs.state import ArraysCodec
from firn.cache.codecs.window import ChunkedKVCodec, RotatingKVCodec
from firn.core.ports import LayerCache

HOME = "mlx_vlm.models.cache"


class VlmKVCodec(KVCodec):
    single = f"{HOME}.KVCache"


class VlmConcatenateKVCodec(ConcatenateKVCodec):
    single = f"{HOME}.ConcatenateKVCache"


class VlmQuantizedKVCodec(QuantizedKVCodec):
    single = f"{HOME}.QuantizedKVCache"


class VlmRotatingKVCodec(RotatingKVCodec):
    single = f"{HOME}.RotatingKVCache"


class VlmChunkedKVCodec(ChunkedKVCodec):
    single = f"{HOME}.ChunkedKVCache"


class VlmArraysCodec(ArraysCodec):
    """The cache can also hold a speculative block, which is not part of the state."""

    single = f"{HOME}.ArraysCache"

    def fill(self, layer: LayerCache, pieces: Sequence[Arrays], n_tokens: int) -> None:
        super().fill(layer, pieces, n_tokens)
        layer.left_padding = layer.lengths = None


CODECS = (
    VlmKVCodec(),
    VlmConcatenateKVCodec(),
    VlmQuantizedKVCodec(),
    VlmRotatingKVCodec(),
    VlmChunkedKVCodec(),
    VlmArraysCodec(),
)
