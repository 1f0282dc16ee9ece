"""Rows and the groups they decode in.

A `Row` is one sequence's live state: one layer cache per model layer, as mlx-lm made them. A `Group`
is a set of rows that take their decode steps together, on mlx-lm's batched cache classes. A group of
one keeps the plain classes (no padding, no mask), so a lone request pays nothing for batching, and a
model whose layers cannot batch is simply served in groups of one.

Owner: the engine thread, through the runner.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from firn.models.sampling import Picker, Picks, to_host

MAX_WASTE = 2.0
"""A group is padded to its longest row: it holds at most this many cells for each one in use."""
SLACK_TOKENS = 2048
"""...but short rows always share a group: padding to this length costs less than a second step."""


@dataclass(eq=False)
class Row:
    """One sequence on the device.

    layers: its caches while it is alone; empty once it lives in a group.
    n_tokens: how many tokens the caches have consumed (decode steps in flight included).
    alone: it shares no group with others.
    forced: tokens that are not left to the sampler, by their position.
    shift: how far rotary positions are ahead of token counts, after the prompt's pictures.
    """

    layers: list[Any]
    n_tokens: int = 0
    shift: int = 0
    picker: Picker | None = None
    group: Group | None = None
    alone: bool = False
    forced: dict[int, int] = field(default_factory=dict)

    @property
    def index(self) -> int:
        return self.group.rows.index(self) if self.group else 0

    @property
    def live_layers(self) -> list[Any]:
        return self.group.layers if self.group else self.layers

    def resume(self, reply: Sequence[int]) -> None:
        """Read again after a failed step: the sampler goes on after `reply`, the row stays alone."""
        assert self.picker is not None
        self.picker.replay(reply)
        self.alone = True


@dataclass(eq=False, slots=True)
class Launched:
    """A dispatched step that has not been collected yet."""

    rows: tuple[Row, ...]
    picks: Picks
    _tokens: list[int] | None = None

    def read(self) -> list[int]:
        """Its tokens, one a row. Waits for them the first time, and tells the rows' grammars."""
        if self._tokens is None:
            self._tokens = to_host(self.picks.tokens)
            for row, token in zip(self.rows, self._tokens, strict=True):
                if row.picker and row.picker.constraint:
                    row.picker.constraint.take([token])
        return self._tokens


@dataclass(eq=False)
class Group:
    rows: list[Row]
    layers: list[Any]
    inputs: mx.array
    """The next token of every row; the newest may still be computing."""
    unread: list[Launched] = field(default_factory=list)

    @classmethod
    def of_one(cls, row: Row, token: int) -> Group:
        group = cls([row], row.layers, mx.array([token]))
        row.layers, row.group = [], group
        return group

    def has_room_for(self, row: Row, limit: int) -> bool:
        if len(self.rows) >= limit or row.alone or self.rows[0].alone:
            return False
        lengths = [r.n_tokens for r in self.rows] + [row.n_tokens]
        # Merging makes zeros of an empty cache, which is not the same to every model.
        if 0 in lengths:
            return False
        padded, used = max(lengths) * len(lengths), sum(lengths)
        return padded <= MAX_WASTE * used or max(lengths) <= SLACK_TOKENS

    def join(self, row: Row, token: int) -> None:
        if len(self.rows) == 1:
            pairs = zip(self.layers, row.layers, strict=True)
            self.layers = [type(a).merge([a, b]) for a, b in pairs]
        else:
            for mine, other in zip(self.layers, row.layers, strict=True):
                mine.extend(type(other).merge([other]))
        self.inputs = mx.concatenate([self.inputs, mx.array([token])])
        self.rows.append(row)
        row.layers, row.group = [], self

    def read_all(self) -> None:
        """Have every dispatched token on the host; the grammars of the rows then know them."""
        for step in self.unread:
            step.read()

    def leave(self, gone: Sequence[Row]) -> None:
        keep = [i for i, r in enumerate(self.rows) if r not in gone]
        for row in gone:
            row.group = None
        self.rows = [self.rows[i] for i in keep]
        if not keep:
            self.layers = []
            return
        self.inputs = self.inputs[mx.array(keep)]
        for layer in self.layers:
            layer.filter(keep)
        if len(keep) == 1:
            self.layers = [alone(layer) for layer in self.layers]


def alone(layer: Any) -> Any:
    """The plain cache of a batched one that has a single row left."""
    if hasattr(layer, "caches"):
        layer.caches = tuple(alone(c) for c in layer.caches)
        return layer
    if hasattr(layer, "cache"):  # ArraysCache is its own batched class
        layer.left_padding = layer.lengths = None
        return layer
    return layer.extract(0)


def fork(row: Row) -> Row:
    """A second row with the same past. Arrays are shared until one of the two writes."""
    return Row(copy.deepcopy(row.layers), row.n_tokens)


def can_batch(layers: Sequence[Any]) -> str | None:
    """None when rows of these caches can share a group, else the reason why not."""
    for layer in layers:
        if hasattr(layer, "caches"):
            why = can_batch(layer.caches)
            if why:
                return why
            continue
        if getattr(layer, "keep", 0):
            return f"{type(layer).__name__} keeps its first {layer.keep} tokens"
        if not hasattr(type(layer), "merge"):
            return f"{type(layer).__name__} has no batched form in mlx-lm"
    return None
