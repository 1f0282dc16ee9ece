"""Feeds a group several tokens per row, and takes back those that were wrong.

    attention     moves the end of each row back; nothing is computed again
    other layers  (recurrent states, whatever cannot be cut) return to their arrays from before the
                  step; the row's accepted tokens are fed once more, together with its next draft

Owner: the engine thread, through a verification.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any

import mlx.core as mx

from firn.models.decode.ragged import (
    ALL_COLUMNS,
    Columns,
    IndexArrays,
    RaggedCache,
    RaggedKVCache,
    RaggedRing,
)
from firn.models.layers import kind, leaves

TRIMMED = frozenset({"KVCache", "QuantizedKVCache", "ChunkedKVCache"})
"""Lone caches that forget their newest tokens by moving their end."""


def is_rewindable(layers: Sequence[Any]) -> bool:
    """Whether any number of tokens can be taken back; if not, only all of a step's."""
    return all(
        isinstance(c, RaggedCache)
        or kind(c) in TRIMMED
        or kind(c) in ("BatchKVCache", "BatchRotatingKVCache")
        or (kind(c) == "RotatingKVCache" and not c.keep)
        for c in leaves(layers)
    )


def can_be_cut_meanwhile(layers: Sequence[Any]) -> bool:
    """Whether records can be cut out of rows while a step with drafts runs.

    The step writes only after all of their tokens, and records are cut by position.
    """
    return all(
        isinstance(c, RaggedCache) or kind(c) in ("KVCache", "QuantizedKVCache")
        for c in leaves(layers)
    )


def ready(layers: Sequence[Any], columns: Columns = ALL_COLUMNS) -> list[Any]:
    """These caches, of classes whose rows can be rewound one by one. Done once per group."""
    arrays = IndexArrays(columns)
    return [_ready(layer, arrays) for layer in layers]


def _ready(layer: Any, arrays: IndexArrays) -> Any:
    if hasattr(layer, "caches"):
        layer.caches = tuple(_ready(c, arrays) for c in layer.caches)
    elif kind(layer) == "BatchKVCache":
        return RaggedKVCache.of(layer, arrays)
    elif kind(layer) == "BatchRotatingKVCache":
        return RaggedRing.of([layer.extract(i) for i in range(len(layer.offset))], arrays)
    elif kind(layer) == "RotatingKVCache" and not layer.keep:
        return RaggedRing.of([layer], arrays)
    return layer


def plain(layer: Any) -> Any:
    """A lone row's cache as mlx-lm's own class again: undoes `ready`."""
    if hasattr(layer, "caches"):
        layer.caches = tuple(plain(c) for c in layer.caches)
        return layer
    return layer.extract(0) if isinstance(layer, RaggedCache) else layer


@dataclass(eq=False)
class RaggedStep:
    """One step in which rows consume unequal numbers of tokens; shorter ones are padded at their ends.

    fed: how many tokens each row consumes. width: of the step, if it is wider than the longest row.
    follows: the previous step, if this one was dispatched before that was settled.
    """

    layers: Sequence[Any]
    fed: Sequence[int]
    width: int = 0
    follows: InitVar[RaggedStep | None] = None
    lengths: list[int] = field(default_factory=list)
    """How many tokens each row holds after the step."""
    _before: list[tuple[Any, Any]] = field(default_factory=list)

    def __post_init__(self, follows: RaggedStep | None) -> None:
        unequal = min(self.fed) < max(*self.fed, self.width)
        for layer in leaves(self.layers):
            if isinstance(layer, RaggedCache):
                before = layer.lengths if follows is None else follows.lengths
                self._before.append((layer, before))
            elif kind(layer) in TRIMMED:
                self._before.append((layer, None))
            elif kind(layer) == "ArraysCache":
                self._before.append((layer, list(layer.cache)))
                if unequal:
                    layer.lengths = mx.array(list(self.fed))
            else:
                self._before.append((layer, _handles(layer)))

    def keep(self, kept: Sequence[int]) -> None:
        """kept: how many of the tokens it was fed each row keeps, from the first on."""
        same: tuple[Any, Any] = None, None
        for layer, before in self._before:
            if isinstance(layer, RaggedCache):
                if before == same[1]:  # usually, all layers hold the same tokens
                    layer.keep_like(same[0])
                else:
                    self.lengths = [n + k for n, k in zip(before, kept, strict=True)]
                    layer.keep(self.lengths)
                    same = layer, before
            elif kind(layer) in TRIMMED:
                layer.trim(max(self.fed[0], self.width) - kept[0])
            elif kind(layer) == "ArraysCache":
                layer.lengths = None
                _choose(layer, before, [k == n for k, n in zip(kept, self.fed, strict=True)])
            elif kept[0] < self.fed[0]:
                vars(layer).update(before)


def _choose(layer: Any, before: list[mx.array | None], accepted: Sequence[bool]) -> None:
    """Keep a row's state after the step if all its tokens were right, else restore the one before."""
    if all(accepted):
        return
    if not any(accepted):
        layer.cache = list(before)
        return
    which = mx.array(list(accepted))
    for i, (old, new) in enumerate(zip(before, layer.cache, strict=True)):
        if old is not None and new is not None:
            layer.cache[i] = mx.where(which.reshape(-1, *[1] * (new.ndim - 1)), new, old)


def _handles(layer: Any) -> dict[str, Any]:
    """Every field as it is now. Arrays get a second handle: the layer may write into its own."""

    def handle(value: Any) -> Any:
        if isinstance(value, mx.array):
            return value[...]
        if isinstance(value, list | tuple):
            return type(value)(handle(v) for v in value)
        return dict(value) if isinstance(value, dict) else value

    return {name: handle(value) for name, value in vars(layer).items()}
