"""What a codec owes if its pages may stay in a row: its buffers hold the tokens where it says."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from firn.cache.codecs import Arrays, At
from tests.cache.specimens import SPECIMENS, Specimen, all_same

IN_ROWS = pytest.mark.parametrize(
    "kind", [s for s in SPECIMENS if s.codec.buffers is not None], ids=lambda s: s.label
)


def as_they_lie(kind: Specimen, layer: Any, at: At, start: int, end: int) -> Arrays:
    buffers = kind.codec.buffers
    assert buffers is not None
    row, first = slice(at.index, at.index + 1), buffers.first_column(layer, at)
    present = [a for a in buffers.take(layer) if a is not None]
    return tuple(a[row, ..., first + start : first + end, :] for a in present)


@IN_ROWS
def test_a_lone_rows_tokens_lie_in_their_columns(kind: Specimen) -> None:
    layer = kind.fed([20, 1, 13])
    at = At(0, 34)
    for start, end in ((0, 34), (5, 21), (33, 34)):
        want = kind.codec.cut(layer, at, start, end)
        assert all_same(as_they_lie(kind, layer, at, start, end), want)


@IN_ROWS
def test_a_grouped_rows_tokens_lie_in_their_columns(kind: Specimen) -> None:
    lengths = (7, 30, 12)
    alone = [kind.fed([n], row=i) for i, n in enumerate(lengths)]
    if not hasattr(type(alone[0]), "merge"):
        assert kind.codec.buffers is not None
        assert kind.codec.buffers.is_lone(alone[0]), "it has no groups"
        return
    batch = type(alone[0]).merge(copy.deepcopy(alone))
    for i, n in enumerate(lengths):
        want = kind.codec.cut(alone[i], At(0, n), 2, n)
        assert all_same(as_they_lie(kind, batch, At(i, n), 2, n), want)


@IN_ROWS
def test_taken_buffers_can_be_given_to_another_row(kind: Specimen) -> None:
    layer, other, buffers = kind.fed([20]), kind.make(), kind.codec.buffers
    assert buffers is not None
    want = kind.codec.cut(kind.fed([20]), At(0, 20), 0, 16)
    buffers.give(other, buffers.take(layer), 16)
    assert all_same(kind.codec.cut(other, At(0, 16), 0, 16), want)
