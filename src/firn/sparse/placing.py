"""True positions for a prompt that skips some of its tokens.

A layer's cache holds what was read, cell after cell, and knows nothing of gaps; groups, records and
rewinding work as usual. The model sees the caches through `PositionedCache`, whose offset is the next
token's position instead of the number of cells:

    cells       0 1 2 3 | 4 5 6 | 7 8          contiguous: every earlier one is seen
    positions   0 1 2 3 | 64 65 66 | 128 129   what the rotary embedding rotates by

A chunk without a gap has one offset. A chunk with gaps has `TokenPositions`. Rotary embeddings
take one offset per row of a batch, so while such a chunk is read `mx.fast.rope` is replaced, and rotates
its tokens as if each were a row: a token's rotation does not depend on its neighbours.

Owner: the engine thread, through the runner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
import numpy as np

from firn.core.values import Prompt, TokenArray
from firn.models.layers import MakeLayers, kind, leaves
from firn.models.model_arguments import IdsOnly
from firn.models.patches import Patches
from firn.sparse.thinned import Thinned

PLAIN = frozenset({"KVCache", "QuantizedKVCache"})
STATES = frozenset({"ArraysCache", "MambaCache"})
WINDOWS = frozenset({"RotatingKVCache", "ChunkedKVCache"})
TOLERANCE = 0.05
"""Share of the logits' range by which two ways to read the same tokens may differ in 16 bits."""


class TokenPositions:
    """One position for each token of a chunk. Deliberately not a number: a model that uses an offset for
    anything but rotary embeddings fails when it is tried at load."""

    def __init__(self, positions: TokenArray) -> None:
        self.array = mx.array(positions.astype(np.int32))


Offset = int | mx.array | TokenPositions


class PositionedCache:
    """A layer's cache as the model sees it: the cache itself with another offset."""

    def __init__(self, layer: Any, offset_of: Callable[[Any], Offset]) -> None:
        self._layer = layer
        self._offset_of = offset_of

    @property
    def offset(self) -> Offset:
        return self._offset_of(self._layer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._layer, name)

    def __getitem__(self, index: int) -> Any:
        return PositionedCache(self._layer[index], self._offset_of)


def shifted(layers: list[Any], gaps: Sequence[int]) -> list[Any]:
    """The caches as seen by rows whose next positions are `gaps` ahead of their cells."""
    if not any(gaps):
        return layers
    shifts = mx.array(list(gaps))

    def offset_of(layer: Any) -> Offset:
        # A batched cache has an array of offsets, one per row; a single row's has a number.
        offset: int | mx.array = layer.offset
        return offset + (gaps[0] if isinstance(offset, int) else shifts)

    return [PositionedCache(layer, offset_of) for layer in layers]


class ArgumentsByPosition(IdsOnly):
    """A text model's, whose prompts may have gaps. patches: the device's."""

    def __init__(self, patches: Patches) -> None:
        self._patches = patches

    def shift(self, prompt: Prompt) -> int:
        return prompt.positions.end(len(prompt)) - len(prompt)

    def seen(self, layers: list[Any], shifts: Sequence[int]) -> list[Any]:
        return shifted(layers, shifts)

    @contextmanager
    def reading(
        self, layers: list[Any], prompt: Prompt, start: int, end: int, *, n_padding: int = 0
    ) -> Iterator[list[Any]]:
        if prompt.positions.end(end) == end:
            yield layers
            return
        positions = prompt.positions.at(start, end)
        if n_padding:
            positions = np.append(positions, positions[-1] + 1 + np.arange(n_padding))
        if positions[-1] - positions[0] == len(positions) - 1:
            yield shifted(layers, [int(positions[0]) - start])
            return
        placed = TokenPositions(positions)
        with self._patches.during(mx.fast, "rope", _rope_by_position(mx.fast.rope)):
            yield [PositionedCache(layer, lambda _: placed) for layer in layers]


def _rope_by_position(plain: Callable[..., mx.array]) -> Callable[..., mx.array]:
    def rope(x: mx.array, *args: Any, offset: Any = 0, **more: Any) -> mx.array:
        if not isinstance(offset, TokenPositions):
            return plain(x, *args, offset=offset, **more)
        # (1, heads, tokens, width) to (tokens, heads, 1, width), which costs no copy, and back.
        rotated = plain(x.transpose(2, 1, 0, 3), *args, offset=offset.array, **more)
        return rotated.transpose(2, 1, 0, 3)

    return rope


# --- which models --------------------------------------------------------------------------


def why_not_sparse(model: Any, make_layers: MakeLayers, patches: Patches) -> str | None:
    """Why prompts of this model cannot be thinned; None if they can. Runs it on a few tokens."""
    kinds = {kind(layer) or type(layer).__name__ for layer in leaves(make_layers())}
    if kinds & STATES:
        return "its recurrent layers carry every token forward and have no positions to skip"
    if kinds & WINDOWS:
        return "its sliding-window layers count tokens, so skipping some changes what they cover"
    if not kinds <= PLAIN:
        return f"its layers ({', '.join(sorted(kinds - PLAIN))}) are not known to have positions"
    try:
        return (
            None
            if _agree(model, make_layers, patches)
            else "its positions are not those of its caches"
        )
    except (TypeError, ValueError, AttributeError, IndexError) as e:
        return f"it does not accept positions: {e}"


def _agree(model: Any, make_layers: MakeLayers, patches: Patches) -> bool:
    """Whether tokens on both sides of a gap give the same logits in one pass as in two, and
    different ones from tokens without a gap."""
    ids = np.arange(1, 13, dtype=np.int64)
    positions = np.concatenate([np.arange(6), np.arange(1000, 1006)]).astype(np.int64)
    thin = Prompt(ids, positions=Thinned(positions, Prompt(ids), ""))
    arguments = ArgumentsByPosition(patches)

    def logits(prompt: Prompt, *ends: int) -> mx.array:
        layers, start = make_layers(), 0
        for end in ends:
            chunk = mx.array(prompt.ids[start:end].astype(np.int32))[None]
            with arguments.reading(layers, prompt, start, end) as placed:
                out = model(chunk, cache=placed)
            start = end
        last: mx.array = out[0, -1].astype(mx.float32)
        return last

    together, apart, near = (
        logits(thin, len(ids)),
        logits(thin, 6, len(ids)),
        logits(Prompt(ids), len(ids)),
    )
    spread = float(mx.max(apart) - mx.min(apart))
    off = float(mx.max(mx.abs(together - apart)))
    moved = float(mx.max(mx.abs(together - near)))
    return off <= TOLERANCE * spread and moved > 0
