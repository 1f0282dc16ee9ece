"""Whole models compute the same with firn's functions for the CPU as with MLX's own.

One architecture for each kind of layer on every run; `-m sweep` tests all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import make_prompt_cache

from firn.backends.cpu import rope as cpu_rope
from firn.backends.cpu import softmax as cpu_softmax
from tests.zoo import ZOO, build, facts, probe
from tests.zoo.test_zoo import FAST, TOLERANCE

CHUNKS = (70, 42, *[1] * 8)


@contextmanager
def firns_own() -> Iterator[None]:
    """Use all of firn's functions, even for few scores. Compiled functions would keep MLX's own."""
    before = mx.fast.scaled_dot_product_attention, mx.fast.rope, mx.sigmoid, cpu_softmax.MIN_SCORES
    mx.disable_compile()
    mx.fast.scaled_dot_product_attention, mx.fast.rope = cpu_softmax.attention, cpu_rope.rope
    mx.sigmoid, cpu_softmax.MIN_SCORES = cpu_softmax.sigmoid, 0
    try:
        yield
    finally:
        mx.enable_compile()
        mx.fast.scaled_dot_product_attention, mx.fast.rope, mx.sigmoid, cpu_softmax.MIN_SCORES = (
            before
        )


def logits(model: nn.Module) -> mx.array:
    ids, cache, parts, start = probe.tokens(sum(CHUNKS)), make_prompt_cache(model), [], 0
    for n in CHUNKS:
        parts.append(probe.feed(model, ids[start : start + n], cache, chunk=n))
        start += n
    return mx.concatenate(parts, axis=1)


def check(name: str) -> None:
    model = build(name)
    want = logits(model)
    with firns_own():
        assert probe.difference(logits(model), want) < TOLERANCE
        if name not in facts.NO_BATCH_METHODS | facts.WRONG_IN_BATCHES:
            stages = probe.batch_stages(model, (110, 28, 45))
            assert not [s for s in stages if s.error or s.difference > TOLERANCE]


@pytest.mark.parametrize("name", FAST)
def test_a_model_computes_the_same_as_with_mlx_own(name: str) -> None:
    check(name)


@pytest.mark.sweep
@pytest.mark.parametrize("name", sorted(set(ZOO) - set(FAST)))
def test_every_model_computes_the_same_as_with_mlx_own(name: str) -> None:
    check(name)
