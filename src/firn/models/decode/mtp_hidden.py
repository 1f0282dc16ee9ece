"""The hidden states that a prediction head continues from: where they are, and as one array.

A row remembers places in the outputs of earlier steps, not copies. As long as a group does not
change, its rows' states are one array, which is passed on without a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import mlx.core as mx


@dataclass(frozen=True, slots=True)
class HiddenAt:
    """One state: `states` is (rows, tokens, width)."""

    states: mx.array
    row: int
    token: int

    @property
    def array(self) -> mx.array:
        return self.states[self.row, self.token]


Hidden = Sequence[HiddenAt]
"""Of one row: the states before each of its pending tokens."""


def first_hidden(rows: Sequence[Hidden]) -> mx.array | None:
    """(rows, width): the state before each row's first pending token; None if no row has one."""
    places = [hidden[0] if hidden else None for hidden in rows]
    first = places[0]
    if first is not None and len(rows) == first.states.shape[0]:
        whole = [HiddenAt(first.states, i, first.token) for i in range(len(rows))]
        if all(_is_same(p, w) for p, w in zip(places, whole, strict=True)):
            return first.states[:, first.token]
    known = next((p for p in places if p is not None), None)
    if known is None:
        return None
    zeros = mx.zeros_like(known.array)
    return mx.stack([zeros if p is None else p.array for p in places])


def hidden_of(rows: Sequence[Hidden], width: int, *, like: mx.array) -> mx.array:
    """(rows, width, size): the states before each pending token; zeros where they are not known."""
    if width == 1:
        states = first_hidden(rows)
        if states is not None:
            return states[:, None]
    zeros = mx.zeros((like.shape[-1],), dtype=like.dtype)
    table = []
    for hidden in rows:
        own = [p.array for p in hidden[:width]]
        table.append(mx.stack([*own, *[zeros] * (width - len(own))]))
    return mx.stack(table)


def _is_same(a: HiddenAt | None, b: HiddenAt) -> bool:
    return a is not None and a.states is b.states and (a.row, a.token) == (b.row, b.token)
