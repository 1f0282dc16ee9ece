"""Decode steps whose graph is traced once for each shape, instead of being built in Python every time.

A step of a 4B model is a graph of a thousand operations. Building it in Python takes the host 2 to
5 ms; MLX copies a traced one in less than one. On a GPU that computes a step in 5 ms, that is a
large part of every step of a group, and of every step with drafts, which cannot be built ahead.

A trace knows shapes and nothing else. So everything that changes from step to step is an array:
where new cells are written, at which position, and which columns are seen. Attention sees whole
blocks of columns, with those after a row's end masked:

    # [0, first) padding, masked   [first, at) the row's tokens   [at, at + width) new   [.., n) masked

The operations before the model are not traced: MLX fuses the simple operations of a trace into new
kernels, and compiling one takes seconds.

Owner: the engine thread, through a runner.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import mlx.core as mx

from firn.models.decode.ragged import Columns, RaggedKVCache, padded
from firn.models.decode.step_trace import RowLengths
from firn.models.faults import first_line
from firn.models.layers import MakeLayers, kind
from firn.models.load.selfcheck import FAR, LENGTHS, distance, prefilled

log = logging.getLogger("firn.models")

MAX_SHAPES = 64
"""Most recently used shapes whose traces are kept. A trace of 36 layers takes about a megabyte."""
N_BUILT = 4
"""Steps of a new shape that are built before it is traced: tracing takes as long as building
several, and while rows come and go a shape may last for a single step."""
PLAIN = Columns(256)
"""Columns that steps of one token see. mlx-lm's caches grow by the same number, so no step needs a
larger buffer than theirs."""
LONE_COLUMNS = 16_384
"""From this many columns on, a lone row's next token is not traced: attention without a mask saves
more time than building takes."""
N_TRIED = 3
"""Tokens that a model is tried with."""

Step = Callable[..., tuple[mx.array, list[mx.array], list[mx.array]]]


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a step of a group begins; the same for all of its layers.

    end: the end of the longest row, on the host. at: the column of each row's first new cell.
    offset: that cell's position. first: the first column that each row sees.
    """

    end: int
    at: mx.array
    offset: mx.array
    first: mx.array


@dataclass(eq=False, slots=True)
class _TracedShape:
    """n_steps: how many steps had this shape."""

    n_steps: int = 0
    step: Step | None = None


class TracedSteps:
    """Implements models.decode.step_trace.StepTrace."""

    is_deep = True

    def __init__(self, model: Any, *, n_built: int = N_BUILT) -> None:
        """n_built: steps of a new shape that are not traced."""
        self._model = model
        self._n_built = n_built
        self._shapes: OrderedDict[tuple[Any, ...], _TracedShape] = OrderedDict()
        self._is_broken = False
        self._is_new = False
        self._zero = mx.array([0])

    def plain(self, ids: mx.array, layers: Sequence[Any]) -> mx.array | None:
        if len(ids) == 1 and layers[0].size() + 1 >= LONE_COLUMNS:
            return None
        return self.wide(ids, layers, PLAIN)

    def wide(
        self,
        ids: mx.array,
        layers: Sequence[Any],
        columns: Columns,
        *,
        lengths: RowLengths | None = None,
    ) -> mx.array | None:
        place = None if self._is_broken else self._place(layers)
        if place is not None and lengths is not None:
            place = replace(place, end=place.end + lengths.n_more, at=lengths.at, offset=lengths.at)
        if place is None:
            return None
        width = ids.shape[1]
        n_seen = columns.width(place.end + width)
        room = columns.width(max(n_seen, layers[0].keys.shape[2]))
        step = self._trace((*ids.shape, n_seen, room, columns))
        if step is None:
            return None
        keys = [padded(layer.keys, room) for layer in layers]
        values = [padded(layer.values, room) for layer in layers]
        new = mx.broadcast_to(place.at[:, None] + mx.arange(width), ids.shape)[:, None, :, None]
        seen = mx.arange(n_seen)
        mask = (seen <= new) & (seen >= place.first[:, None, None, None])
        mask = columns.mask(mask, keys[0].dtype)
        try:
            logits, keys, values = step(ids, new, place.offset, mask, keys, values)
        except Exception as e:  # any model code runs here; nothing has been computed yet
            log.warning("steps are not traced from now on: %s", first_line(e), exc_info=e)
            self._is_broken = True
            return None
        for layer, k, v in zip(layers, keys, values, strict=True):
            layer.keys, layer.values = k, v
        _advance(layers, width, place)
        return logits

    def had_new_shape(self) -> bool:
        """Whether the newest step takes longer than others of its shape, because it was built, or
        traced for the first time. Resets the flag."""
        is_new, self._is_new = self._is_new, False
        return is_new

    def _place(self, layers: Sequence[Any]) -> _Place | None:
        first = layers[0]
        if not all(type(layer) is type(first) for layer in layers) or any(
            layer.empty() for layer in layers
        ):
            return None
        if isinstance(first, RaggedKVCache):
            return _Place(first.size(), first.offset, first.offset, self._zero)
        if kind(first) == "KVCache":
            at = mx.array([first.offset])
            return _Place(first.offset, at, at, self._zero)
        if kind(first) == "BatchKVCache":
            end = first.size()
            return _Place(end, mx.array([end]), first.offset, first.left_padding)
        return None

    def _trace(self, shape: tuple[Any, ...]) -> Step | None:
        """The traced step of this shape; None while the shape is too new. Each shape has a function
        of its own: MLX would search all shapes of a common function, and keep them all."""
        known = self._shapes.setdefault(shape, _TracedShape())
        self._shapes.move_to_end(shape)
        if len(self._shapes) > MAX_SHAPES:
            self._shapes.popitem(last=False)
        known.n_steps += 1
        self._is_new = known.step is None
        if known.n_steps <= self._n_built:
            return None
        if known.step is None:
            known.step = mx.compile(partial(_step, self._model))
        return known.step


def _step(
    model: Any,
    ids: mx.array,
    new: mx.array,
    offset: mx.array,
    mask: mx.array,
    keys: list[mx.array],
    values: list[mx.array],
) -> tuple[mx.array, list[mx.array], list[mx.array]]:
    """Logits, and the buffers with the new cells in them."""
    layers = [_TracedCache(k, v, offset, new, mask) for k, v in zip(keys, values, strict=True)]
    logits = model(ids, cache=layers)
    return logits, [c.keys for c in layers], [c.values for c in layers]


class _TracedCache:
    """The part of mlx-lm's cache interface that models use, while a step is traced."""

    def __init__(
        self, keys: mx.array, values: mx.array, offset: mx.array, new: mx.array, mask: mx.array
    ) -> None:
        self.keys, self.values, self.offset = keys, values, offset
        self._new, self._mask, self._n_seen = new, mask, mask.shape[-1]

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> mx.array:
        if window_size is None:
            return self._mask
        is_near = mx.arange(self._n_seen) > self._new - window_size
        if self._mask.dtype == mx.bool_:
            return self._mask & is_near
        return mx.where(is_near, self._mask, mx.array(-mx.inf, self._mask.dtype))

    def update_and_fetch(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        for name, new in (("keys", keys), ("values", values)):
            index = mx.broadcast_to(self._new, new.shape)
            setattr(self, name, mx.put_along_axis(getattr(self, name), index, new, axis=2))
        return self.keys_and_values()

    def keys_and_values(self) -> tuple[mx.array, mx.array]:
        return self.keys[..., : self._n_seen, :], self.values[..., : self._n_seen, :]


def _advance(layers: Sequence[Any], width: int, place: _Place) -> None:
    """Record that all layers hold `width` more tokens."""
    first = layers[0]
    if isinstance(first, RaggedKVCache):
        first.keep([n + width for n in first.lengths])
        for layer in layers[1:]:
            layer.keep_like(first)
    elif kind(first) == "KVCache":
        for layer in layers:
            layer.offset += width
    else:
        offset = place.offset + width
        for layer in layers:
            layer._idx += width
            layer.offset = offset


def traced_steps(model: Any, make_layers: MakeLayers) -> TracedSteps:
    """Tries the model once. Raises ValueError, with the reason, if steps cannot be traced."""
    texts = [[(7 * i + 3 * j) % 50 + 1 for j in range(n + N_TRIED)] for i, n in enumerate(LENGTHS)]
    rows = [prefilled(model, make_layers(), text[:-N_TRIED]) for text in texts]
    traced = TracedSteps(model, n_built=0)
    far = 0.0
    try:
        groups = [
            [type(same[0]).merge(list(same)) for same in zip(*rows, strict=True)] for _ in "ab"
        ]
        for i in range(-N_TRIED, 0):
            ids = mx.array([[text[i]] for text in texts])
            got = traced.plain(ids, groups[0])
            if got is None:
                raise ValueError("not all of its layers are plain attention")
            want = model(ids, cache=groups[1])
            far = max(far, *(distance(a, b) for a, b in zip(want[:, -1], got[:, -1], strict=True)))
    except ValueError:
        raise
    except Exception as e:  # any model code runs here
        raise ValueError(f"a traced step fails: {first_line(e)}") from e
    if far > FAR:
        raise ValueError(f"tokens come out different in a traced step ({far:.1f})")
    return TracedSteps(model)
