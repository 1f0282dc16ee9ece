"""Layer codecs: how a live layer cache is cut into records, and filled from them again.

    pages.py   plain attention, quantised or not
    window.py  sliding-window and chunked attention
    state.py   recurrent state, and whatever can only be kept as a whole
    vlm.py     mlx-vlm's classes of the same names

An extension folder: a codec is a class in a module here, listed in the module's CODECS. It is found by
the qualified name of the cache class that it serves, so mlx-lm's and mlx-vlm's classes of the same name
are distinct, and neither package is imported. `Layout` picks one for each layer of the model.

Arrays of pages and windows have their tokens on the second-to-last axis.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence
from functools import cache
from typing import Protocol

import mlx.core as mx

from firn.cache.parts import Part
from firn.core.errors import UnknownCacheLayer
from firn.core.ports import At as At
from firn.core.ports import LayerCache

TOKEN_AXIS = -2
Arrays = tuple[mx.array | None, ...]
"""One layer's arrays in one record; None for a slot that the layer leaves empty."""


class Buffers(Protocol):
    """The arrays that hold pages: (rows, heads, columns, width). Takes those of a lone row without
    a copy, and gives them to another row. Stateless."""

    def is_lone(self, layer: LayerCache) -> bool:
        """Whether this is a lone row's cache, not a group's."""
        ...

    def take(self, layer: LayerCache) -> Arrays:
        """The layer's own buffers, with whatever room they have after its tokens."""
        ...

    def first_column(self, layer: LayerCache, at: At) -> int:
        """The column of a row's first token, in a lone layer or in a group's."""
        ...

    def give(self, layer: LayerCache, arrays: Arrays, n_tokens: int) -> None:
        """Make an empty lone layer hold the first `n_tokens` tokens of buffers that were taken.

        It will write to them in place: nothing else may hold a reference to them.
        """
        ...


class LayerCodec(Protocol):
    """Serves one cache class and its batched form. Stateless."""

    part: Part
    buffers: Buffers | None
    """For pages that may stay in a row; None: they are cut out immediately."""
    single: str
    """Qualified name of the cache class of a lone row."""

    def describe(self, layer: LayerCache) -> str | None:
        """The layer's kind and shape, a part of the root key; None if it cannot be restored."""
        ...

    def reach(self, layer: LayerCache) -> int:
        """How many tokens before a resume point are needed: all for pages, 0 for a state."""
        ...

    def cut(self, layer: LayerCache, at: At, start: int, end: int) -> Arrays:
        """The row's tokens [start, end), or its state at end == at.n_tokens. Lazy; may be views.

        Raises TokensNotHeld where the layer has overwritten some of them.
        """
        ...

    def fill(self, layer: LayerCache, pieces: Sequence[Arrays], n_tokens: int) -> None:
        """Make an empty lone layer hold `n_tokens` tokens; the pieces are the last of them.

        The layer may write to its arrays in place: it must not share handles with a record.
        """
        ...

    def fixed_nbytes(self, layer: LayerCache) -> int:
        """Bytes of a live layer that do not grow with the row. The layer must hold a token."""
        ...

    def token_nbytes(self, layer: LayerCache) -> int:
        """Bytes of a live layer for each token it holds."""
        ...


ALL_TOKENS = 1 << 62
"""The reach of pages."""


def leaves(layers: Sequence[LayerCache]) -> list[LayerCache]:
    """Nested lists of caches, flattened in order."""
    flat: list[LayerCache] = []
    for layer in layers:
        if hasattr(layer, "caches"):
            flat += leaves(layer.caches)
        else:
            flat.append(layer)
    return flat


def class_name(layer: LayerCache) -> str:
    cls = type(layer)
    return f"{cls.__module__}.{cls.__qualname__}"


@cache
def registry() -> dict[str, LayerCodec]:
    """Every codec of this folder, by the class it serves."""
    codecs: dict[str, LayerCodec] = {}
    for module in pkgutil.iter_modules(__path__):
        if not module.name.startswith("_"):
            for codec in importlib.import_module(f"{__name__}.{module.name}").CODECS:
                codecs[codec.single] = codec
    return codecs


def codec_for(layer: LayerCache) -> LayerCodec:
    """Raises UnknownCacheLayer when no codec serves this layer."""
    codec = registry().get(class_name(layer))
    if codec is None:
        raise UnknownCacheLayer(f"no codec supports the cache class {class_name(layer)}")
    if codec.describe(layer) is None:
        raise UnknownCacheLayer(f"this {class_name(layer)} cannot be restored")
    return codec


def concat_tokens(pieces: Sequence[Arrays], *, pad: int = 0) -> Arrays:
    """The pieces one after another, then `pad` zero tokens, with one copy per array.

    A single piece is not copied, but gets its own handle: writing to it does not change the record.
    """
    out: list[mx.array | None] = []
    for slot in zip(*pieces, strict=True):
        present = [a for a in slot if a is not None]
        if not present:
            out.append(None)
            continue
        if pad:
            shape = (*present[0].shape[:TOKEN_AXIS], pad, present[0].shape[-1])
            present.append(mx.zeros(shape, dtype=present[0].dtype))
        joined = present[0][...] if len(present) == 1 else mx.concatenate(present, TOKEN_AXIS)
        out.append(joined)
    return tuple(out)


def kv_token_nbytes(layer: LayerCache) -> int:
    """Bytes per token of a layer that has `keys` and `values`; 0 while it is empty."""
    if layer.keys is None:
        return 0
    return int((layer.keys.nbytes + layer.values.nbytes) // layer.keys.shape[TOKEN_AXIS])


def nbytes_of(arrays: Arrays) -> int:
    return sum(a.nbytes for a in arrays if a is not None)
