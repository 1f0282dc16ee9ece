"""The gated delta rule in chunks, beside float64 and mlx-lm's own loop."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.gated_delta import gated_delta_ops

from firn.backends.recurrence.delta import gated_delta
from tests.backends.recurrence.reference import Arguments, Shape, in_float64, relative

CLOSE = 1e-6
"""Of float32: mlx-lm's loop is about a third of this away from float64, too."""

shapes = st.builds(
    Shape,
    n_tokens=st.integers(1, 150),
    n_batch=st.integers(1, 2),
    n_key_heads=st.just(2),
    n_heads=st.sampled_from([2, 4, 6]),
    width=st.sampled_from([8, 16]),
    n_values=st.sampled_from([8, 24]),
    per_channel=st.booleans(),
)
chunks = st.sampled_from([1, 2, 16, 64])
seeds = st.integers(0, 2**32 - 1)


@given(shape=shapes, chunk=chunks, seed=seeds, n_keys=st.integers(0, 3), data=st.data())
@settings(max_examples=60, deadline=None)
def test_it_is_the_rule(
    shape: Shape, chunk: int, seed: int, n_keys: int, data: st.DataObject
) -> None:
    """Any decays from 1 to 0, betas from 0 to 1, keys that repeat, lengths that are no multiple."""
    rng = np.random.default_rng(seed)
    arguments = Arguments.random(
        shape, rng, n_keys=n_keys, decay=data.draw(st.sampled_from([1e-4, 0.1, 5.0, 200.0]))
    )
    g, beta = arguments.g.copy(), arguments.beta.copy()
    for array in (g, beta):
        for extreme in (0, 1):
            array[rng.random(array.shape) < data.draw(st.sampled_from([0.0, 0.3, 1.0]))] = extreme
    arguments = replace(arguments, g=g, beta=beta)
    want_y, want_state = in_float64(arguments)
    y, state = gated_delta(*arguments.on_device, chunk=chunk)
    assert relative(y, want_y) < CLOSE
    assert relative(state, want_state) < CLOSE


@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("g", [0.0, 1e-30, 0.9, 1.0])
@pytest.mark.parametrize("beta", [0.0, 1.0])
def test_extremes_stay_finite_and_right(per_channel: bool, g: float, beta: float) -> None:
    shape = Shape(100, per_channel=per_channel)
    arguments = Arguments.random(shape, np.random.default_rng(1), n_keys=1)
    arguments = replace(
        arguments, g=np.full_like(arguments.g, g), beta=np.full_like(arguments.beta, beta)
    )
    want_y, want_state = in_float64(arguments)
    y, state = gated_delta(*arguments.on_device, chunk=32)
    assert relative(y, want_y) < CLOSE
    assert relative(state, want_state) < CLOSE


def test_betas_of_two_are_right_too() -> None:
    """With one key and no decay nothing fades: each token turns the state around, errors included."""
    arguments = Arguments.random(Shape(150), np.random.default_rng(7), n_keys=1)
    arguments = replace(
        arguments, g=np.ones_like(arguments.g), beta=np.full_like(arguments.beta, 2)
    )
    want_y, want_state = in_float64(arguments)
    y, state = gated_delta(*arguments.on_device, chunk=32)
    assert relative(y, want_y) < 200 * CLOSE
    assert relative(state, want_state) < 200 * CLOSE


@pytest.mark.parametrize("decay", [0.0, 1e-3, 30.0])
def test_a_long_sequence_is_as_exact_as_a_short_one(decay: float) -> None:
    shape = Shape(100_000, n_key_heads=1, n_heads=1, width=8, n_values=8)
    arguments = Arguments.random(shape, np.random.default_rng(2), decay=decay)
    want_y, want_state = in_float64(arguments)
    y, state = gated_delta(*arguments.on_device, chunk=64)
    assert relative(y, want_y) < CLOSE
    assert relative(state, want_state) < CLOSE


@given(shape=shapes, chunk=chunks, seed=seeds)
@settings(max_examples=25, deadline=None)
def test_masked_tokens_move_no_state(shape: Shape, chunk: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    arguments = Arguments.random(shape, rng)
    mask = rng.random((shape.n_batch, shape.n_tokens)) < 0.6
    want_y, want_state = in_float64(arguments, mask)
    y, state = gated_delta(*arguments.on_device, mx.array(mask), chunk=chunk)
    assert relative(state, want_state) < CLOSE
    if mask.any():
        assert relative(np.array(y)[mask], want_y[mask]) < CLOSE


def test_a_row_that_is_all_padding_keeps_its_state_bit_for_bit() -> None:
    arguments = Arguments.random(Shape(40, n_batch=2), np.random.default_rng(3))
    mask = np.array([[True] * 40, [False] * 40])
    _, state = gated_delta(*arguments.on_device, mx.array(mask), chunk=16)
    np.testing.assert_array_equal(np.array(state)[1], arguments.state[1])


def test_without_a_state_it_begins_with_zeros() -> None:
    arguments = Arguments.random(Shape(20), np.random.default_rng(4))
    given = arguments.on_device
    y, state = gated_delta(*given[:5], chunk=16)
    zero_y, zero_state = gated_delta(*given[:5], mx.zeros_like(given[5]), chunk=16)
    assert mx.array_equal(y, zero_y)
    assert mx.array_equal(state, zero_state)


@pytest.mark.parametrize("cut", [32, 64, 96])
def test_cut_between_chunks_a_prompt_gives_the_same_bits(cut: int) -> None:
    """What resumes at a multiple of the chunk ends in the state of an uninterrupted prompt."""
    given = Arguments.random(Shape(130), np.random.default_rng(5)).on_device
    y, whole = gated_delta(*given, chunk=32)
    head, state = gated_delta(*(a[:, :cut] for a in given[:5]), given[5], chunk=32)
    tail, state = gated_delta(*(a[:, cut:] for a in given[:5]), state, chunk=32)
    assert mx.array_equal(state, whole)
    assert mx.array_equal(mx.concatenate([head, tail], axis=1), y)


def test_types_are_those_of_the_loop() -> None:
    given = Arguments.random(Shape(9), np.random.default_rng(6)).on_device
    given[:3] = [a.astype(mx.bfloat16) for a in given[:3]]
    got, want = gated_delta(*given, chunk=16), gated_delta_ops(*given)
    assert [a.dtype for a in got] == [a.dtype for a in want]
    assert [a.shape for a in got] == [a.shape for a in want]
