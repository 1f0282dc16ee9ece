"""Positions for models whose rotary embedding has three axes: time, height, width.

A picture takes up fewer positions than tokens, so after it positions and token counts differ. The
difference depends on all of the prompt's pictures, restored or not. Positions are passed with each call;
mlx-vlm keeps those of one request on the model, which does not work for a batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from firn.core.lru import Lru
from firn.core.values import Prompt
from firn.models.vision.picture import Picture

N_AXES = 3
MAX_KEPT = 1024
"""Pictures whose positions are remembered."""

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Extent:
    """relative: a picture's positions, (axes, tokens), counted from its first. length: the position of
    the next token after it."""

    relative: IntArray
    length: int

    @property
    def shift(self) -> int:
        return self.length - int(self.relative.shape[1])


class RotaryPositions:
    """Owner: the engine thread, through the vision model."""

    def __init__(self, language: Any) -> None:
        self._language = language
        self._extents: Lru[bytes, Extent] = Lru(MAX_KEPT)

    def chunk(self, prompt: Prompt, start: int, end: int) -> mx.array:
        """Positions of prompt tokens [start, end): (axes, 1, n)."""
        positions = np.tile(np.arange(start, end, dtype=np.int64), (N_AXES, 1))
        shift = 0
        for span, picture in zip(prompt.picture_spans, prompt.picture_inputs, strict=True):
            if span.start >= end:
                break
            extent = self._extent(span.digest, picture)
            low, high = max(span.start, start), min(span.end, end)
            if low < high:
                part = extent.relative[:, low - span.start : high - span.start]
                positions[:, low - start : high - start] = span.start + shift + part
            shift += extent.shift
            positions[:, max(span.end - start, 0) :] += extent.shift
        return mx.array(positions.astype(np.int32))[:, None]

    def step(self, positions: Sequence[int], width: int = 1) -> mx.array:
        """Positions of each row's next tokens, from these on: (axes, rows, width)."""
        first = mx.array(list(positions), dtype=mx.int32)[:, None]
        return mx.broadcast_to(first + mx.arange(width), (N_AXES, len(positions), width))

    def shift(self, prompt: Prompt) -> int:
        pairs = zip(prompt.picture_spans, prompt.picture_inputs, strict=True)
        return sum(self._extent(span.digest, picture).shift for span, picture in pairs)

    def of_text(self, layers: Sequence[Any], n_tokens: int) -> mx.array:
        """Positions of text without pictures after what these caches hold: (axes, rows, n)."""
        offset = next(layer.offset for layer in layers if hasattr(layer, "offset"))
        begin = mx.array(offset).reshape(-1, 1)
        one_axis = begin + mx.arange(n_tokens)[None]
        return mx.broadcast_to(one_axis, (N_AXES, *one_axis.shape))

    def _extent(self, digest: bytes, picture: Picture) -> Extent:
        extent = self._extents.get(digest)
        if extent is None:
            extent = self._compute(picture)
            self._extents.put(digest, extent)
        return extent

    def _compute(self, picture: Picture) -> Extent:
        """Computed by the model's own function, which needs the markup around the picture."""
        n = picture.last - picture.first
        grid = picture.tensors.get("image_grid_thw")
        if grid is None:  # such a picture has positions like text
            return Extent(np.tile(np.arange(n, dtype=np.int64), (N_AXES, 1)), n)
        ids = mx.array(picture.ids.astype(np.int32))[None]
        positions, _ = self._language.get_rope_index(ids, image_grid_thw=mx.array(grid))
        all_axes = np.array(positions).reshape(N_AXES, -1).astype(np.int64)
        own = all_axes[:, picture.first : picture.last] - picture.first
        return Extent(own, int(own.max()) + 1)
