"""Prompts read in passes of few shapes, for a device that plans attention anew for each shape.

On CUDA, MLX computes attention of several tokens through cuDNN, which makes a plan for each
combination of new tokens, columns and buffer size: 70 ms on an H200, where the pass itself takes
20. Every prompt would have shapes of its own. So buffers grow to few sizes (`rounded`), and a chunk
that is not FULL tokens at a multiple of FULL is padded to one of WIDTHS. It sees columns up to a
common end, with those after each token masked:

    cells       # [0, offset) read before  # [offset, offset + n_new) new  . padding  . room
    passed to the model                                          width |            | columns

The padding is written after the row's end, where nothing is read and the next tokens will be
written. A wide chunk that begins at a multiple of FULL needs no mask, because a token sees only
those before it and padding comes last. Such a chunk sees columns up to its own padded end.

Recurrent layers are told how many tokens are not padding, which do not change their states. Whether
the model heeds that, a trial shows.

Owner: the engine thread, through a runner.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache, KVCache

from firn.core.common_chunks import common_end
from firn.models.decode.kv_growth import PaddedPass, ShapeBuckets
from firn.models.faults import first_line
from firn.models.layers import MakeLayers
from firn.models.load.selfcheck import FAR, distance, prefilled

WIDTHS = (16, 64, *range(256, 2049, 256))
FULL = WIDTHS[-1]
"""Chunks whose length and end are multiples of this have a common shape without padding. Other
chunks that are longer are not padded either: a plan is a small part of their time."""
NARROW = 512
"""Chunks up to this width see the whole buffer: columns are cheap, plans are not."""
MIN_ROOM = 256
PARTS = 8
"""Buffer sizes between two powers of two: at most an eighth of a buffer, or MIN_ROOM, is unused."""
N_PAST, N_NEW = 13, 11
"""Tokens that a model is tried with."""


def rounded(n_tokens: int) -> int:
    """The size of a buffer for this many tokens."""
    unit = max((1 << (n_tokens.bit_length() - 1)) // PARTS, MIN_ROOM)
    return -(-n_tokens // unit) * unit


def width_for(n_new: int) -> int:
    """The width of a pass that reads this many tokens; 0 if it is not padded."""
    return next((w for w in WIDTHS if w >= n_new), 0)


def growth(n_tokens: int) -> int:
    """By how many tokens a full buffer of this size grows."""
    return rounded(n_tokens + 1) - n_tokens if n_tokens == rounded(n_tokens) else MIN_ROOM


class FewBuckets(ShapeBuckets):
    common_chunk = FULL

    def __init__(self, dtype: mx.Dtype) -> None:
        """dtype: that of the model's keys and values."""
        self._dtype = dtype

    def width(self, n_new: int) -> int:
        return width_for(n_new) or n_new

    def _missing(self, n_tokens: int, n_room: int, offset: int, step: int) -> int:
        return rounded(n_tokens + step) - offset if n_room < n_tokens + step else 0

    def _step(self, n_room: int, step: int) -> int:
        return growth(n_room)

    def end(self, start: int, end: int) -> int:
        return common_end(start, end, multiple=FULL)

    def fit(self, layers: Sequence[Any], n_new: int) -> PaddedPass | None:
        first = _paged(layers)
        if first is None:
            return None
        offset, n_room = first.offset, first.step if first.keys is None else first.keys.shape[-2]
        width = width_for(n_new)
        if not width or offset + width > n_room or (n_new == FULL and offset % FULL == 0):
            return None
        if width > NARROW and offset % FULL == 0:
            return _padded_pass(width, layers, n_new, lambda layer: _ShortenedCache(layer, n_new))
        n_columns = n_room
        if width > NARROW:
            n_columns = min(-(-(offset + width) // FULL) * FULL, n_room)
        masks = _Masks(offset, width, n_columns, self._dtype)
        return _padded_pass(width, layers, n_new, lambda layer: _PaddedCache(layer, n_new, masks))


def _paged(layers: Sequence[Any]) -> KVCache | None:
    """The first layer of plain attention. None if there is none, so nothing is planned, or if there are
    other layers than these and states: padding would take up space in a window."""
    if not all(type(layer) in (KVCache, ArraysCache) for layer in layers):
        return None
    return next((layer for layer in layers if type(layer) is KVCache), None)


def _padded_pass(
    width: int, layers: Sequence[Any], n_new: int, pages: Callable[[KVCache], Any]
) -> PaddedPass:
    seen = [
        pages(layer) if type(layer) is KVCache else _padded_state(layer, n_new) for layer in layers
    ]
    return PaddedPass(width, seen)


def _padded_state(layer: ArraysCache, n_new: int) -> ArraysCache:
    """One that writes into this, and knows which tokens are padding."""
    seen = ArraysCache(len(layer.cache))
    seen.cache = layer.cache
    seen.prepare(lengths=[n_new])
    return seen


class _Masks:
    """The masks of a pass, computed once for all layers. They are added to the scores: MLX would
    expand a boolean mask in every layer, for all heads."""

    def __init__(self, offset: int, width: int, n_columns: int, dtype: mx.Dtype) -> None:
        self.n_columns = n_columns
        self._offset, self._width, self._dtype = offset, width, dtype
        self._made: dict[int | None, mx.array] = {}

    def get(self, window: int | None) -> mx.array:
        mask = self._made.get(window)
        if mask is None:
            rows = mx.arange(self._offset, self._offset + self._width)[:, None]
            columns = mx.arange(self.n_columns)[None]
            seen = rows >= columns
            if window is not None:
                seen = seen & (rows < columns + window)
            shown, hidden = mx.array(0, self._dtype), mx.array(-mx.inf, self._dtype)
            mask = self._made[window] = mx.where(seen, shown, hidden)
        return mask


class _ShortenedCache:
    """A lone row's cache during one pass whose last tokens are padding: it does not count them."""

    def __init__(self, cache: KVCache, n_new: int) -> None:
        self._cache, self._n_new = cache, n_new
        self.offset = cache.offset

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        padded: tuple[mx.array, mx.array] = self._cache.update_and_fetch(keys, values)
        self._cache.offset = self.offset + self._n_new
        return padded

    def __getattr__(self, name: str) -> Any:
        return getattr(self._cache, name)


class _PaddedCache(_ShortenedCache):
    """One with more columns after the padding, all of them masked."""

    def __init__(self, cache: KVCache, n_new: int, masks: _Masks) -> None:
        super().__init__(cache, n_new)
        self._masks = masks

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array:
        return self._masks.get(window_size)

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        super().update_and_fetch(keys, values)
        n = self._masks.n_columns
        return self._cache.keys[..., :n, :], self._cache.values[..., :n, :]


def find_buckets(model: Any, make_layers: MakeLayers) -> FewBuckets:
    """Tries the model once. Raises ValueError, with the reason, if padding changes results."""
    ids = np.arange(N_PAST + N_NEW + 1) % 50 + 1
    plain = prefilled(model, make_layers(), ids[:N_PAST].tolist())
    padded = prefilled(model, make_layers(), ids[:N_PAST].tolist())
    pages = _paged(padded)
    if pages is None:
        raise ValueError("not all of its layers are plain attention or states")
    shapes = FewBuckets(pages.keys.dtype)
    fitted = shapes.fit(padded, N_NEW)
    assert fitted is not None
    new = ids[N_PAST:-1]
    try:
        model(mx.array(fitted.pad(new).tolist())[None], cache=fitted.layers)
        prefilled(model, plain, new.tolist())
        last = mx.array([ids[-1:].tolist()])
        far = distance(*(model(last, cache=layers)[0, -1] for layers in (plain, padded)))
    except (ValueError, RuntimeError, TypeError, IndexError, AttributeError) as e:
        raise ValueError(f"a padded pass fails: {first_line(e)}") from e
    if far > FAR:
        raise ValueError(f"tokens come out different in a padded pass ({far:.1f})")
    return shapes
