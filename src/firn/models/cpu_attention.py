"""Attention for MLX's CPU backend, where softmax is most of a prefill.

MLX's exp and softmax go through one value at a time on some processors, its power does not. Softmax is
made of powers of e instead: the same function to the last bit or two, in about half of the time. Which
of the two is faster here is measured once. Few scores are left to MLX: there the number of operations
counts.
"""

from __future__ import annotations

import math
import time
from typing import Any

import mlx.core as mx
import numpy as np

MIN_SCORES = 1 << 16
"""Below this, more operations cost more than they save."""
LEAST = float(np.finfo(np.float32).min)
"""Of a score that is masked. As in MLX not infinite: where all are, the result is still a number."""
N_TRIES = 3
_plain = mx.fast.scaled_dot_product_attention


def install_if_faster() -> bool:
    """Put `attention` in the place of MLX's own, for this process, if it pays here."""
    faster = _seconds(attention) < _seconds(_plain)
    mx.fast.scaled_dot_product_attention = attention if faster else _plain
    return faster


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
    """What mx.fast.scaled_dot_product_attention computes: (batch, heads, tokens, width) each."""
    n_scores = math.prod(q.shape[:-1]) * k.shape[-2]
    known = mask.ndim in (2, 4) if isinstance(mask, mx.array) else mask in (None, "causal")
    if n_scores < MIN_SCORES or sinks is not None or more or not known:
        return _plain(q, k, v, scale=scale, mask=mask, sinks=sinks, **more)
    batch, heads, n_tokens, width = q.shape
    kv_heads = k.shape[1]
    # (batch, kv heads, heads that share one, tokens, ...)
    shared = (q * scale).reshape(batch, kv_heads, -1, n_tokens, width)
    scores = (shared @ k[:, :, None].swapaxes(-1, -2)).astype(mx.float32)
    scores = _masked(scores, mask, kv_heads)
    powers = mx.power(math.e, scores - scores.max(axis=-1, keepdims=True))
    total = powers.sum(axis=-1, keepdims=True)
    out = (powers.astype(v.dtype) @ v[:, :, None]) / total
    return out.astype(q.dtype).reshape(batch, heads, n_tokens, -1)


def _masked(scores: mx.array, mask: mx.array | str | None, kv_heads: int) -> mx.array:
    if mask is None:
        return scores
    n_tokens, n_keys = scores.shape[-2:]
    if isinstance(mask, str):
        ends = mx.arange(n_keys - n_tokens, n_keys)
        mask = mx.arange(n_keys)[None] <= ends[:, None]
    elif mask.ndim == 4:
        per_head = mask.shape[1] > 1
        mask = mask.reshape(mask.shape[0], kv_heads if per_head else 1, -1, *mask.shape[2:])
    if mask.dtype == mx.bool_:
        return mx.where(mask, scores, LEAST)
    return scores + mask.astype(mx.float32)


def _seconds(function: Any) -> float:
    """The best of a few, of a chunk's size."""
    q = mx.random.normal((1, 4, 128, 32))
    k = mx.random.normal((1, 4, 1024, 32))
    mx.eval(q, k)
    best = math.inf
    for _ in range(N_TRIES):
        began = time.perf_counter()
        mx.eval(function(q, k, k, scale=0.1))
        best = min(best, time.perf_counter() - began)
    return best
