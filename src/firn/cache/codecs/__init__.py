"""Layer codecs: how a live layer cache is cut into records and filled from them again.

An extension folder: a codec is a class in a module here, listed in the module's CODECS. It is found
by the qualified name of the cache class it serves, so mlx-lm's and mlx-vlm's classes of the same name
are told apart and neither package is imported.

Arrays of pages and windows hold tokens on their last axis but one.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import mlx.core as mx

from firn.cache.parts import Part
from firn.core.errors import UnknownCacheLayer

TOKEN_AXIS = -2
Arrays = tuple[mx.array | None, ...]
"""One layer's arrays in one record; a slot that the layer leaves empty stays empty."""


@dataclass(frozen=True, slots=True)
class At:
    """Where a row lives: its place in the (maybe batched) layer, and how many tokens it holds."""

    index: int
    n_tokens: int


class Buffers(Protocol):
    """How a lone row's cache is set aside as it is, and gone on with. Stateless."""

    def is_lone(self, layer: Any) -> bool:
        """Whether this is a lone row's cache, not one of a group."""
        ...

    def take(self, layer: Any) -> Arrays:
        """The layer's own buffers, with whatever room is behind its tokens: no copies."""
        ...

    def give(self, layer: Any, arrays: Arrays, n_tokens: int) -> None:
        """Make an empty lone layer hold the first `n_tokens` tokens of buffers that were taken.

        It will write to them in place: nobody else may refer to them any more.
        """
        ...


class LayerCodec(Protocol):
    """One cache class and its batched form. Stateless."""

    part: Part
    buffers: Buffers | None
    """Of pages that may lie in a row until somebody needs them; None: records are cut at once."""
    single: str
    """Qualified name of the class that a lone row has."""

    def describe(self, layer: Any) -> str | None:
        """The layer's layout, a part of the root key; None if this instance cannot be restored."""
        ...

    def reach(self, layer: Any) -> int:
        """Tokens before the resume point that must be there: 0 for state, all for pages."""
        ...

    def cut(self, layer: Any, at: At, start: int, end: int) -> Arrays:
        """The row's tokens [start, end), or its state at end == at.n_tokens. Lazy; views will do."""
        ...

    def fill(self, layer: Any, pieces: Sequence[Arrays], n_tokens: int) -> None:
        """Make an empty lone layer hold `n_tokens` tokens, of which the pieces are the last ones.

        The layer may write to its arrays in place: it must get handles of its own.
        """
        ...

    def fixed_nbytes(self, layer: Any) -> int:
        """Bytes of a live layer that do not grow with the row, seen on one that holds a token."""
        ...

    def token_nbytes(self, layer: Any) -> int:
        """Bytes of a live layer for each token it holds."""
        ...


ALL_TOKENS = 1 << 62


def leaves(layers: Sequence[Any]) -> list[Any]:
    """Nested lists of caches, flattened in order."""
    flat: list[Any] = []
    for layer in layers:
        if hasattr(layer, "caches"):
            flat += leaves(layer.caches)
        else:
            flat.append(layer)
    return flat


def name_of(layer: Any) -> str:
    cls = type(layer)
    return f"{cls.__module__}.{cls.__qualname__}"


@cache
def registry() -> dict[str, LayerCodec]:
    """Every codec of this folder, by the class it serves."""
    found: dict[str, LayerCodec] = {}
    for module in pkgutil.iter_modules(__path__):
        if not module.name.startswith("_"):
            for codec in importlib.import_module(f"{__name__}.{module.name}").CODECS:
                found[codec.single] = codec
    return found


def codec_for(layer: Any) -> LayerCodec:
    """Raises UnknownCacheLayer when no codec serves this layer."""
    codec = registry().get(name_of(layer))
    if codec is None:
        raise UnknownCacheLayer(f"no codec knows the cache class {name_of(layer)}")
    if codec.describe(layer) is None:
        raise UnknownCacheLayer(f"this {name_of(layer)} cannot be restored")
    return codec


def concat_tokens(pieces: Sequence[Arrays], *, pad: int = 0) -> Arrays:
    """Pieces one after another, with `pad` zero tokens behind, in one copy per array.

    A lone piece is not copied, but comes as a handle of its own: writing to it leaves the record be.
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


def nbytes_of(arrays: Arrays) -> int:
    return sum(a.nbytes for a in arrays if a is not None)
