"""Softmax and sigmoid for MLX's CPU backend, where they take most of a prefill.

MLX's exp is slow on x86-64, and so is everything built on it; its power function is not, least of all
for powers of two (see `stubs`). So attention and sigmoid are computed by powers of two: the same results
to the last bit or two, in a third of the time. Which is faster on this machine is measured at each
start. Small attention is left to MLX: there the number of operations dominates.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from firn.backends.cpu import imports, stubs
from firn.models.patches import Patches

MIN_SCORES = 1 << 13
"""Below this, the additional operations cost more than they save."""
LOG2_E = math.log2(math.e)
LEAST = float(np.finfo(np.float32).min)
TINY = 1e-30
N_TRIES = 3
_plain_attention = mx.fast.scaled_dot_product_attention
_plain_sigmoid = mx.sigmoid


def install_if_faster(patches: Patches) -> bool:
    """Replace MLX's own functions with these, for this process, if they are faster here."""
    _hasten_powers_of_two(patches)
    faster = _seconds(attention) < _seconds(_plain_attention)
    if faster:
        patches.replace(mx.fast, "scaled_dot_product_attention", attention)
        patches.replace(mx, "sigmoid", sigmoid)
    return faster


def _hasten_powers_of_two(patches: Patches) -> None:
    if sys.platform != "linux" or not stubs.can_run():
        return
    with contextlib.suppress(OSError, AttributeError, imports.NoSlot):
        libm = ctypes.CDLL("libm.so.6")
        powf, exp2f = (ctypes.cast(libm[name], ctypes.c_void_p).value for name in ("powf", "exp2f"))
        if powf and exp2f:
            slot = imports.find_slots(imports.MLX, ("powf",))["powf"]
            patches.add(f"{imports.MLX}:powf", partial(slot.set, slot.get()))
            slot.set(stubs.powf_of_two(powf=powf, exp2f=exp2f))


def sigmoid(a: mx.array, **more: Any) -> mx.array:
    """What mx.sigmoid computes; swiglu, silu and gates use it."""
    if more or not isinstance(a, mx.array) or not mx.issubdtype(a.dtype, mx.floating):
        return _plain_sigmoid(a, **more)
    return (1.0 / (1.0 + mx.power(2.0, a.astype(mx.float32) * -LOG2_E))).astype(a.dtype)


def attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    *,
    scale: float,
    mask: mx.array | str | None = None,
    sinks: mx.array | None = None,
    **more: Any,
) -> mx.array:
    """What MLX's attention computes, from arrays (batch, heads, tokens, width).

    Unlike MLX's result, it is zero for a token that may attend to nothing.
    """
    n_scores = math.prod(q.shape[:-1]) * k.shape[-2]
    known = mask.ndim in (2, 4) if isinstance(mask, mx.array) else mask in (None, "causal")
    if n_scores < MIN_SCORES or sinks is not None or more or not known:
        return _plain_attention(q, k, v, scale=scale, mask=mask, sinks=sinks, **more)
    batch, heads, n_tokens, width = q.shape
    kv_heads, n_keys = k.shape[1:3]
    # The tokens of all heads that share keys form one matrix.
    shared = (q * (scale * LOG2_E)).reshape(batch, kv_heads, -1, width)
    scores = (shared @ k.swapaxes(-1, -2)).astype(mx.float32)
    if mask is not None:
        scores = scores.reshape(batch, heads, n_tokens, n_keys) + _added(mask, n_tokens, n_keys)
        scores = scores.reshape(batch, kv_heads, -1, n_keys)
    highest = mx.maximum(scores.max(axis=-1, keepdims=True), LEAST)
    powers = mx.power(2.0, scores - highest)
    total = mx.maximum(powers @ mx.ones((n_keys, 1)), TINY)  # faster than sum()
    out = (powers.astype(v.dtype) @ v) / total
    return out.reshape(batch, heads, n_tokens, -1).astype(q.dtype)


def _added(mask: mx.array | str, n_tokens: int, n_keys: int) -> mx.array:
    """The mask as numbers to add. Masked scores are -inf, whose power is cheapest to compute."""
    if isinstance(mask, str):
        ends = mx.arange(n_keys - n_tokens, n_keys)
        mask = mx.arange(n_keys)[None] <= ends[:, None]
    if mask.dtype == mx.bool_:
        return mx.where(mask, 0.0, -math.inf)
    return mask.astype(mx.float32) * LOG2_E


def _seconds(function: Callable[..., mx.array]) -> float:
    """The best of a few runs on arrays of a chunk's size."""
    q = mx.random.normal((1, 4, 128, 32))
    k = mx.random.normal((1, 4, 1024, 32))
    mx.eval(q, k)
    best = math.inf
    for _ in range(N_TRIES):
        began = time.perf_counter()
        mx.eval(function(q, k, k, scale=0.1))
        best = min(best, time.perf_counter() - began)
    return best
