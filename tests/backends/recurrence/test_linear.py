"""Linear attention and RWKV 7's recurrence in chunks, beside float64."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firn.backends.recurrence.chunks import in_float32
from firn.backends.recurrence.delta import gated_delta
from firn.backends.recurrence.linear import linear_attention
from firn.backends.recurrence.wkv import wkv7
from tests.backends.recurrence.reference import (
    Arguments,
    Array,
    Shape,
    WkvArguments,
    in_float64,
    linear_in_float64,
    relative,
    wkv_in_float64,
)

CLOSE = 1e-6
shapes = st.builds(
    Shape,
    n_tokens=st.integers(1, 150),
    n_batch=st.integers(1, 2),
    n_key_heads=st.just(2),
    n_heads=st.sampled_from([2, 4, 6]),
    width=st.sampled_from([8, 16]),
    n_values=st.sampled_from([8, 24]),
)
chunks = st.sampled_from([1, 2, 16, 64])
seeds = st.integers(0, 2**32 - 1)
decays = st.sampled_from([0.0, 1e-4, 0.1, 5.0, 200.0])
extremes = st.sampled_from([0.0, 0.3, 1.0])


def linear(arguments: Arguments, mask: Array | None = None, **how: Any) -> tuple[Any, Any]:
    q, k, v, g, beta, state = arguments.on_device
    given_mask = None if mask is None else mx.array(mask)
    return linear_attention(q, k, v, g, state, given_mask, beta, **how)


def linear_reference(a: Arguments, mask: Array | None = None) -> tuple[Array, Array]:
    return linear_in_float64(a.q, a.k, a.v, a.g, a.state, a.beta, mask)


def wkv(arguments: WkvArguments, mask: Array | None = None, **how: Any) -> tuple[Any, Any]:
    return wkv7(*arguments.on_device, None if mask is None else mx.array(mask), **how)


def some_zeros(a: Array, share: float, rng: np.random.Generator) -> Array:
    a = a.copy()
    a[rng.random(a.shape) < share] = 0
    return a


@given(shape=shapes, chunk=chunks, seed=seeds, decay=decays, share=extremes)
@settings(max_examples=40, deadline=None)
def test_linear_attention(shape: Shape, chunk: int, seed: int, decay: float, share: float) -> None:
    """Any decays from 1 to 0, lengths that are no multiple, heads that share keys."""
    rng = np.random.default_rng(seed)
    arguments = Arguments.random(shape, rng, decay=decay)
    arguments = replace(arguments, g=some_zeros(arguments.g, share, rng))
    want_y, want_state = linear_reference(arguments)
    y, state = linear(arguments, chunk=chunk)
    assert relative(y, want_y) < CLOSE
    assert relative(state, want_state) < CLOSE


@given(
    shape=shapes, chunk=chunks, seed=seeds, decay=decays, share=extremes, n_keys=st.integers(0, 3)
)
@settings(max_examples=60, deadline=None)
def test_rwkv_7(
    shape: Shape, chunk: int, seed: int, decay: float, share: float, n_keys: int
) -> None:
    """Keys that are read and rewritten may repeat."""
    rng = np.random.default_rng(seed)
    arguments = WkvArguments.random(shape, rng, n_keys=n_keys, decay=decay)
    arguments = replace(arguments, w=some_zeros(arguments.w, share, rng))
    want_y, want_state = wkv_in_float64(arguments)
    y, state = wkv(arguments, chunk=chunk)
    assert relative(y, want_y) < CLOSE
    assert relative(state, want_state) < CLOSE


@given(shape=shapes, chunk=chunks, seed=seeds, is_wkv=st.booleans())
@settings(max_examples=30, deadline=None)
def test_masked_tokens_move_no_state(shape: Shape, chunk: int, seed: int, is_wkv: bool) -> None:
    rng = np.random.default_rng(seed)
    mask = rng.random((shape.n_batch, shape.n_tokens)) < 0.6
    if is_wkv:
        of_wkv = WkvArguments.random(shape, rng)
        want_y, want_state = wkv_in_float64(of_wkv, mask)
        y, state = wkv(of_wkv, mask, chunk=chunk)
    else:
        arguments = Arguments.random(shape, rng)
        want_y, want_state = linear_reference(arguments, mask)
        y, state = linear(arguments, mask, chunk=chunk)
    assert relative(state, want_state) < CLOSE
    if mask.any():
        assert relative(np.array(y)[mask], want_y[mask]) < CLOSE


@pytest.mark.parametrize("is_wkv", [False, True])
@pytest.mark.parametrize("decay", [0.0, 1e-3, 30.0])
def test_a_long_sequence_is_as_exact_as_a_short_one(is_wkv: bool, decay: float) -> None:
    """Where nothing decays and what is read is not rewritten, a state grows, and stays finite."""
    shape = Shape(100_000, n_key_heads=1, n_heads=1, width=8, n_values=8)
    rng = np.random.default_rng(2)
    if is_wkv:
        of_wkv = WkvArguments.random(shape, rng, decay=decay)
        want, got = wkv_in_float64(of_wkv), wkv(of_wkv, chunk=16)
    else:
        arguments = Arguments.random(shape, rng, decay=decay)
        want, got = linear_reference(arguments), linear(arguments, chunk=64)
    for mine, theirs in zip(got, want, strict=True):
        # Sums of 100,000 values in float32 are that far off, in any order.
        assert relative(mine, theirs) < (CLOSE if decay else 10 * CLOSE)


@pytest.mark.parametrize("is_wkv", [False, True])
def test_a_row_that_is_all_padding_keeps_its_state_bit_for_bit(is_wkv: bool) -> None:
    shape, rng = Shape(40, n_batch=2), np.random.default_rng(3)
    mask = np.array([[True] * 40, [False] * 40])
    if is_wkv:
        of_wkv = WkvArguments.random(shape, rng)
        before, (_, state) = of_wkv.state, wkv(of_wkv, mask, chunk=16)
    else:
        arguments = Arguments.random(shape, rng)
        before, (_, state) = arguments.state, linear(arguments, mask, chunk=16)
    np.testing.assert_array_equal(np.array(state)[1], before[1])


@pytest.mark.parametrize("cut", [32, 64, 96])
def test_cut_between_chunks_a_prompt_gives_the_same_bits(cut: int) -> None:
    shape, rng = Shape(130), np.random.default_rng(5)
    *values, state = WkvArguments.random(shape, rng).on_device
    _, whole = wkv7(*values, state, chunk=16)
    _, head = wkv7(*(a[:, :cut] for a in values), state, chunk=16)
    _, tail = wkv7(*(a[:, cut:] for a in values), head, chunk=16)
    assert mx.array_equal(tail, whole)
    q, k, v, g, _, state = Arguments.random(shape, rng).on_device
    _, whole = linear_attention(q, k, v, g, state, chunk=32)
    _, head = linear_attention(*(a[:, :cut] for a in (q, k, v, g)), state, chunk=32)
    _, tail = linear_attention(*(a[:, cut:] for a in (q, k, v, g)), head, chunk=32)
    assert mx.array_equal(tail, whole)


def tf32(a: mx.array, b: mx.array) -> mx.array:
    """As tensor cores multiply: of each number's mantissa they take ten bits."""

    def rounded(x: mx.array) -> mx.array:
        bits = x.view(mx.uint32)
        return ((bits + 0x1000) & 0xFFFFE000).view(mx.float32)

    product: mx.array = mx.matmul(rounded(a), rounded(b))
    return product


def in_two_parts(a: mx.array, b: mx.array) -> mx.array:
    return in_float32(a, b, multiply=tf32)


@pytest.mark.parametrize("per_channel", [False, True])
def test_tf32_would_show_and_does_not(per_channel: bool) -> None:
    """On a device whose products round to TF32."""
    shape, rng = (
        Shape(150, width=64, n_values=64, per_channel=per_channel),
        np.random.default_rng(8),
    )
    arguments = Arguments.random(shape, rng)
    want, _ = in_float64(arguments)
    far = [
        relative(gated_delta(*arguments.on_device, chunk=64, multiply=multiply)[0], want)
        for multiply in (tf32, in_two_parts)
    ]
    assert far[0] > 100 * CLOSE
    assert far[1] < CLOSE


@pytest.mark.parametrize("is_wkv", [False, True])
def test_tf32_shows_in_no_other_rule(is_wkv: bool) -> None:
    shape, rng = Shape(150, width=64, n_values=64), np.random.default_rng(9)
    if is_wkv:
        of_wkv = WkvArguments.random(shape, rng)
        want, form = wkv_in_float64(of_wkv)[0], partial(wkv, of_wkv, chunk=16)
    else:
        arguments = Arguments.random(shape, rng)
        want, form = linear_reference(arguments)[0], partial(linear, arguments, chunk=64)
    far = [relative(form(multiply=multiply)[0], want) for multiply in (tf32, in_two_parts)]
    assert far[0] > 100 * CLOSE
    assert far[1] < CLOSE
