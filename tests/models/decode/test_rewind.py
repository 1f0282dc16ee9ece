"""Wrong drafts leave the caches the same to the bit, where the steps have the same shapes."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from firn.cache.codecs import At
from firn.cache.layout import Layout
from firn.models.decode.padding import in_blocks
from firn.models.decode.ragged import ALL_COLUMNS, Columns
from firn.models.decode.rewind import RaggedStep, is_rewindable, ready
from firn.models.load.selfcheck import prefilled
from tests.models.speculation.test_speculation import KINDS
from tests.zoo import build

LENGTHS = (19, 40, 33)
FED = 4
RIGHT = (1, 3, 2)
"""How many of the tokens fed each row keeps, if it can keep part of them."""


def text(row: int, n: int) -> list[int]:
    return [(7 * row + 3 * j) % 50 + 1 for j in range(n)]


def caches(model: Any, n_rows: int, *, columns: Columns) -> list[Any]:
    rows = [
        prefilled(model, list(make_prompt_cache(model)), text(i, LENGTHS[i])) for i in range(n_rows)
    ]
    layers = rows[0]
    if n_rows > 1:
        layers = [type(same[0]).merge(list(same)) for same in zip(*rows, strict=True)]
    return ready(layers, columns)


def take(
    model: Any, layers: list[Any], fed: list[list[int]], kept: Sequence[int], *, columns: Columns
) -> None:
    step = RaggedStep(layers, [len(f) for f in fed], FED)
    mx.eval(model(mx.array(fed), cache=in_blocks(layers, columns)))
    step.keep(kept)


def recorded(layers: list[Any], layout: Layout, lengths: Sequence[int]) -> list[bytes]:
    """The exact bytes that the rows' records would be made of."""
    out = []
    for i, n in enumerate(lengths):
        for part in {c.part: None for c in layout.codecs}:
            cut = layout.cut(part, layers, At(i, n), max(n - 16, 0), n)
            out += [np.array(stack).tobytes() for stack in cut.stacks]
    return out


@pytest.mark.parametrize("name", [k for k in KINDS if k != "llama4"])
@pytest.mark.parametrize("n_rows", [1, 3])
@pytest.mark.parametrize("columns", [ALL_COLUMNS, Columns(64)], ids=["all", "blocks"])
def test_rejected_tokens_leave_no_bit(name: str, n_rows: int, columns: Columns) -> None:
    model = build(name)
    layers = caches(model, n_rows, columns=columns)
    layout = Layout.of(list(make_prompt_cache(model)))
    lengths = LENGTHS[:n_rows]
    right = [text(i, n + FED)[n:] for i, n in enumerate(lengths)]
    partly = is_rewindable(layers)
    kept = RIGHT[:n_rows] if partly else (0,) * n_rows
    wrong = [
        [*r[: max(k, 1)], *[60 + i] * (FED - max(k, 1))]
        for i, (r, k) in enumerate(zip(right, kept, strict=True))
    ]
    other = copy.deepcopy(layers)
    before = recorded(layers, layout, lengths)
    assert before
    take(model, layers, wrong, kept, columns=columns)
    if partly:
        take(model, other, right, kept, columns=columns)
        after = [n + k for n, k in zip(lengths, kept, strict=True)]
        assert recorded(layers, layout, after) == recorded(other, layout, after)
    else:
        assert recorded(layers, layout, lengths) == before
        take(model, layers, right, [FED] * n_rows, columns=columns)
        take(model, other, right, [FED] * n_rows, columns=columns)
        after = [n + FED for n in lengths]
        assert recorded(layers, layout, after) == recorded(other, layout, after) != before
