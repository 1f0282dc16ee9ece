"""A cut returns the row's settled tokens, or is refused: never others, whatever a layer went through."""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import (
    ArraysCache,
    ChunkedKVCache,
    KVCache,
    QuantizedKVCache,
    RotatingKVCache,
)

from firn.cache.codecs import codec_for
from firn.cache.layout import Layout
from firn.cache.parts import Part
from firn.cache.prefix import CacheSettings
from firn.core.errors import RowInDoubt, TokensNotHeld
from firn.core.ports import MAX_STEP_TOKENS, At
from firn.models.decode.batch import Group, Row
from firn.models.decode.ragged import RaggedRing
from firn.models.decode.rewind import RaggedStep, plain, ready
from firn.models.decode.verify import Verification
from tests.models.speculation.simulated import NO_PICKS

WINDOW = 24
CODEC = codec_for(RotatingKVCache(max_size=WINDOW))


def fed(layer: Any, starts: Sequence[int], n: int) -> Any:
    """Feed each row its next `n` tokens, whose keys and values are their positions."""
    at = np.array(starts, dtype=np.float32)[:, None] + np.arange(n, dtype=np.float32)
    keys = mx.array(np.repeat(at[:, None, :, None], 2, axis=3))
    layer.update_and_fetch(keys, -keys)
    mx.eval(layer.state)
    return layer


def lone(n: int, *, chunk: int = 0) -> Any:
    """A ring that was fed `n` tokens, one by one or in chunks."""
    layer = RotatingKVCache(max_size=WINDOW)
    step = chunk or 1
    for start in range(0, n, step):
        fed(layer, [start], min(step, n - start))
    return layer


def n_held(layer: Any, at: At) -> int:
    """How many of the row's newest tokens can be cut. Asserts that each cut is right."""
    held = 0
    for start in range(at.n_tokens):
        try:
            keys, values = CODEC.cut(layer, at, start, at.n_tokens)
        except TokensNotHeld:
            continue
        want = list(range(start, at.n_tokens))
        assert np.array(keys)[0, 0, :, 0].tolist() == want, (start, at)
        assert (-np.array(values))[0, 0, :, 0].tolist() == want, (start, at)
        held = max(held, at.n_tokens - start)
    return held


@pytest.mark.parametrize("n", [1, 7, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW, 3 * WINDOW + 5])
def test_a_lone_ring_holds_its_window_and_no_more_is_cut(n: int) -> None:
    assert n_held(lone(n), At(0, n)) == min(n, WINDOW)
    assert n_held(lone(n, chunk=10), At(0, n)) >= min(n, WINDOW)


def test_a_group_of_rings_holds_each_rows_window() -> None:
    lengths = [5, WINDOW, 61]
    group = RotatingKVCache.merge([lone(n) for n in lengths])
    for _ in range(2 * WINDOW):
        for i, n in enumerate(lengths):
            assert n_held(group, At(i, n)) >= min(n, WINDOW)
        fed(group, lengths, 1)
        lengths = [n + 1 for n in lengths]


@pytest.mark.parametrize("seed", range(4))
def test_a_drafting_ring_holds_its_window_whatever_is_taken_back(seed: int) -> None:
    """It is joined, left, extracted and made from shorter rings, with steps of all widths."""
    rng = random.Random(seed)
    lengths = [9, WINDOW + 30]
    layers: list[Any] = ready([RotatingKVCache.merge([lone(n) for n in lengths])])
    for _ in range(60):
        width = rng.randint(1, MAX_STEP_TOKENS)
        step = RaggedStep(layers, [width] * len(lengths), width)
        fed(layers[0], lengths, width)
        unread = [n_held(layers[0], At(i, n, width)) for i, n in enumerate(lengths)]
        assert all(held >= min(n, WINDOW) for held, n in zip(unread, lengths, strict=True))
        kept = [rng.randint(1, width) for _ in lengths]
        step.keep(kept)
        lengths = [n + k for n, k in zip(lengths, kept, strict=True)]
        ring = layers[0]
        assert isinstance(ring, RaggedRing)
        assert all(n_held(ring, At(i, n)) >= min(n, WINDOW) for i, n in enumerate(lengths))
        change = rng.random()
        if change < 0.2:  # as when a row joins a lone one
            alone = plain(RaggedRing.of([ring.extract(0)]))
            assert n_held(alone, At(0, lengths[0])) == min(lengths[0], WINDOW)
            lengths = [lengths[0], rng.randint(1, 90)]
            layers = ready([RotatingKVCache.merge([alone, lone(lengths[1])])])
        elif change < 0.4:
            lengths[1] = rng.randint(1, 90)
            ring.place(lone(lengths[1]), 1)
        elif change < 0.6:
            more = rng.randint(1, 90)
            ring.extend(RotatingKVCache.merge([lone(more)]))
            ring.filter([2, 0])
            lengths = [more, lengths[0]]


def test_a_plain_ring_with_an_unread_step_is_not_read_at_all() -> None:
    layer = lone(WINDOW)
    fed(layer, [WINDOW], 3)
    assert n_held(layer, At(0, WINDOW, 3)) == 0
    assert n_held(layer, At(0, WINDOW)) == 0, "it holds more than the row says"


def test_a_chunk_that_was_dropped_is_not_cut() -> None:
    layer = ChunkedKVCache(256)
    for start in range(0, 640, 64):
        layer.maybe_trim_front()
        fed(layer, [start], 64)
    codec = codec_for(layer)
    first = layer.start_position
    assert first > 0
    keys = codec.cut(layer, At(0, 640), first, 640)[0]
    assert np.array(keys)[0, 0, :, 0].tolist() == list(range(first, 640))
    with pytest.raises(TokensNotHeld):
        codec.cut(layer, At(0, 640), first - 1, 640)


@pytest.mark.parametrize(
    ("part", "at", "start", "end"),
    [
        (Part.PAGES, At(0, 20, 4), 0, 21),
        (Part.PAGES, At(0, 20), 18, 22),
        (Part.WINDOW, At(0, 20), 18, 22),
        (Part.STATE, At(0, 24, 4), 0, 24),
        (Part.STATE, At(0, 24), 0, 20),
    ],
)
def test_only_settled_tokens_are_cut(part: Part, at: At, start: int, end: int) -> None:
    state = ArraysCache(1)
    state[0] = mx.zeros((1, 4))
    layers = [fed(KVCache(), [0], 24), lone(24), state]
    layout = Layout.of(layers)
    assert layout.cut(part, layers, At(0, 24), 0, 24)
    with pytest.raises(TokensNotHeld):
        layout.cut(part, layers, at, start, end)


def quantised(n: int) -> Any:
    layer = QuantizedKVCache(group_size=32, bits=8)
    layer.update_and_fetch(*[mx.zeros((1, 1, n, 32))] * 2)
    return layer


@pytest.mark.parametrize(
    ("layer", "at"),
    [
        (fed(KVCache(), [0], 20), At(0, 20)),
        (quantised(20), At(0, 20)),
        (KVCache.merge([fed(KVCache(), [0], n) for n in (9, 20)]), At(1, 20)),
        (ready([KVCache.merge([fed(KVCache(), [0], n) for n in (9, 20)])])[0], At(1, 20)),
    ],
    ids=["alone", "quantised", "in a group", "in a drafting group"],
)
def test_pages_are_not_cut_out_of_a_layer_that_lags_behind_its_row(layer: Any, at: At) -> None:
    codec = codec_for(quantised(1) if isinstance(layer, QuantizedKVCache) else KVCache())
    assert codec.cut(layer, at, 12, 16)[0].shape[-2] == 4
    assert codec.buffers is not None
    ahead = At(at.index, at.n_tokens + 1)
    for read in (
        partial(codec.cut, layer, ahead, 12, 16),
        partial(codec.buffers.first_column, layer, ahead),
    ):
        with pytest.raises(TokensNotHeld):
            read()


def test_a_row_shows_how_much_of_it_is_settled_and_nothing_after_a_failed_step() -> None:
    row = Row([fed(KVCache(), [0], 20)], 20)
    assert row.view().at == At(0, 20)
    group = Group.of_one(row, 5)
    step = Verification(group, (row,), ((1, 2, 3),), None, NO_PICKS, (), 4)
    group.unread.append(step)
    assert row.view().at == At(0, 20, 4)
    step.is_settled = True
    assert row.view().at == At(0, 20)
    step.fault = RuntimeError("the device is gone")
    with pytest.raises(RowInDoubt):
        row.view()


@pytest.mark.parametrize("window", [1, 20, 34, 35, 128, 280, 289, 290, 400])
def test_pieces_are_small_enough_for_a_step_that_is_settled_late(window: int) -> None:
    """Cut every `piece_tokens`, a window keeps what a step and two tokens in flight add meanwhile."""
    block = 256
    layout = Layout((), "", window, window)
    piece = layout.piece_tokens(block)
    n_late = MAX_STEP_TOKENS + 2
    if piece:
        assert piece == 1 or piece + n_late <= window
    else:
        assert block + n_late <= window


@pytest.mark.parametrize("window", [64, 128, 256, 512, 4096])
def test_records_of_windows_that_were_once_saved_too_late_are_not_found_any_more(
    window: int,
) -> None:
    """Windows of every size: a draft model saved all of them too late, and may be served by itself."""

    def text(layout: Layout) -> str:
        return CacheSettings(0, 256).layout_text(layout, "float32")

    assert text(Layout((), "kv", 0, 0)) == "kv;float32;block256;full"
    assert text(Layout((), f"window{window}", window, window)) != (
        f"window{window};float32;block256;full"
    )
