"""The gated delta rule over many tokens at once, in plain MLX operations.

mlx-lm's kernels for it are Metal's. Elsewhere it computes one token after the other, each with a
dozen operations on the whole state:

    S <- g S                        decay, of a head or of each of its channels
    u  = beta (v - S k)             what the state does not predict of the value
    S <- S + u k'
    y  = S q

Here tokens are taken in chunks. Within one, with S the state before it, p_t the decay from its begin
to token t, and D_ts the decay between two of its tokens,

    u_t + beta_t sum_{s<t} D_ts (k_t k_s) u_s  =  beta_t (v_t - p_t S k_t)
    y_t = p_t S q_t + sum_{s<=t} D_ts (q_t k_s) u_s

so a chunk takes a triangular inverse and some matrix products, most of them for all chunks together.
Decays are products of the given ones, never quotients, so strong ones become 0 and nothing overflows.
The inverse is joined from those of halves: sums of powers would cancel out where keys repeat.

Everything is in float32. A token's result depends on the ones that it shares a call with, by rounding
alone; the same call gives the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import mlx.core as mx
import numpy as np


def gated_delta(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array | None = None,
    mask: mx.array | None = None,
    *,
    chunk: int,
) -> tuple[mx.array, mx.array]:
    """What mlx_lm.models.gated_delta.gated_delta_ops computes. chunk: tokens, a power of two.

    q, k (batch, tokens, key heads, width), v (batch, tokens, heads, value width); g and beta (batch,
    tokens, heads), or g also (.., width); state (batch, heads, value width, width). Tokens outside
    the mask (batch, tokens) do not change the state; their y means nothing.
    """
    dtype, (n_batch, n_tokens, n_key_heads, width) = q.dtype, q.shape
    n_heads, value_width = v.shape[-2:]
    g, beta, state = completed(q, v, g, beta, state, mask)
    size = min(chunk, 1 << (n_tokens - 1).bit_length())
    n_missing = -n_tokens % size
    if n_missing:
        q, k, v, beta = (_padded(a, n_missing, 0) for a in (q, k, v, beta))
        g = _padded(g, n_missing, 1)
    shared = n_heads // n_key_heads

    def chunked(a: mx.array, *, is_key: bool = False) -> mx.array:
        """(chunks, batch, key heads, heads of each, tokens, ...)"""
        heads = (n_key_heads, 1 if is_key else shared)
        a = a.astype(mx.float32).reshape(n_batch, -1, size, *heads, *a.shape[3:])
        axes = (1, 0, 3, 4, 2, *range(5, a.ndim))
        return mx.contiguous(a.transpose(*axes))

    q, k = chunked(q, is_key=True), chunked(k, is_key=True)
    v, g, beta = chunked(v), chunked(g), chunked(beta)[..., None]
    within = _per_head if g.ndim == 5 else _per_channel
    parts = within(q, k, g, beta)
    grouped = state.reshape(n_batch, n_key_heads, shared, value_width, width)
    y, after = _over_chunks(parts, beta * v, grouped.astype(mx.float32))
    y = y.transpose(1, 0, 4, 2, 3, 5).reshape(n_batch, -1, n_heads, value_width)
    return y[:, :n_tokens].astype(dtype), after.reshape(state.shape).astype(state.dtype)


def completed(
    q: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array | None,
    mask: mx.array | None,
) -> tuple[mx.array, mx.array, mx.array]:
    """g, beta and state: tokens outside the mask leave the state alone, which begins empty."""
    if state is None:
        state = mx.zeros((len(v), *v.shape[2:], q.shape[-1]), dtype=mx.float32)
    if mask is not None:
        inside = mask[..., None]
        beta = mx.where(inside, beta, 0)
        g = mx.where(inside if g.ndim == 3 else inside[..., None], g, 1)
    return g, beta, state


def _padded(a: mx.array, n: int, value: int) -> mx.array:
    """With n more tokens."""
    more = mx.full((a.shape[0], n, *a.shape[2:]), value, dtype=a.dtype)
    return mx.concatenate([a, more], axis=1)


@dataclass(frozen=True, slots=True)
class _Chunks:
    """What a chunk takes besides its values and the state before it; arrays begin with the chunks."""

    inverse: mx.array
    """(tokens, tokens), transposed: of u's triangular system."""
    reads: mx.array
    """(tokens, tokens), transposed: what a token reads of the chunk's own."""
    k_in: mx.array
    """Keys, decayed since the chunk began."""
    q_in: mx.array
    k_out: mx.array
    """Keys, decayed until the chunk ends."""
    decay: mx.array
    """Of the whole chunk."""


def _per_head(q: mx.array, k: mx.array, g: mx.array, beta: mx.array) -> _Chunks:
    size = g.shape[-1]
    later = mx.triu(mx.ones((size, size), dtype=mx.bool_), 1)  # of the column than of the row
    between = mx.triu(mx.cumprod(mx.where(later, g[..., None, :], 1), axis=-1))
    since = mx.cumprod(g, axis=-1)[..., None]
    products = (k @ k.swapaxes(-1, -2)) * between
    return _Chunks(
        inverse=_inverse(products * beta.swapaxes(-1, -2)),
        reads=(k @ q.swapaxes(-1, -2)) * between,
        k_in=(since * beta) * k,
        q_in=since * q,
        k_out=between[..., -1:] * k,
        decay=since[..., -1:, :],
    )


def _per_channel(q: mx.array, k: mx.array, g: mx.array, beta: mx.array) -> _Chunks:
    """Two tokens whose decay is a product of channels: as seen from a border between them, with one
    of the powers of two as the distance of borders."""
    size = g.shape[-2]
    system, reads = mx.zeros(1), mx.eye(size) * (k * q).sum(axis=-1, keepdims=True)
    for level, mask in enumerate(_levels(size)):
        blocks = g.reshape(*g.shape[:-2], -1, 1 << level, g.shape[-1])
        since = mx.cumprod(blocks, axis=-2).reshape(g.shape)
        until = mx.cumprod(blocks, axis=-2, reverse=True, inclusive=False).reshape(g.shape)
        before = until * k
        system = system + (before @ (since * k * beta).swapaxes(-1, -2)) * mask
        reads = reads + (before @ (since * q).swapaxes(-1, -2)) * mask
    since = mx.cumprod(g, axis=-2)
    until = mx.cumprod(g, axis=-2, reverse=True, inclusive=False)
    return _Chunks(
        inverse=_inverse(mx.broadcast_to(system, reads.shape)),
        reads=reads,
        k_in=since * beta * k,
        q_in=since * q,
        k_out=until * k,
        decay=since[..., -1:, :],
    )


@cache
def _levels(size: int) -> list[mx.array]:
    """Above the diagonal: the squares that join two blocks of 1, 2, 4, ... tokens into one."""
    block = [np.arange(size) >> level for level in range(size.bit_length() - 1)]
    masks = [(b[None] == b[:, None] + 1) & (b[None] % 2 == 1) for b in block]
    return [mx.array(mask.astype(np.float32)) for mask in masks]


def _inverse(system: mx.array) -> mx.array:
    """Of 1 + system, a strictly upper triangle, by blocks:

    | A  X |-1   | A'  -A' X B' |
    | .  B |   = | .       B'   |
    """
    size = system.shape[-1]
    inverse = mx.eye(size)
    for level, mask in enumerate(_levels(size)):
        square = system * mask
        inverse = inverse - (inverse @ square @ inverse if level else square)
    return inverse


def _over_chunks(parts: _Chunks, v: mx.array, state: mx.array) -> tuple[mx.array, mx.array]:
    """v: times beta. Returns y of all chunks, and the state after them."""
    inverse, reads = parts.inverse.swapaxes(-1, -2), parts.reads.swapaxes(-1, -2)
    if v.shape[-2] > 1:
        news, k_in = inverse @ v, inverse @ parts.k_in
    else:
        news, k_in = v, parts.k_in
    y = []
    for i in range(len(v)):
        before = state.swapaxes(-1, -2)
        news_i = news[i] - k_in[i] @ before
        y.append(parts.q_in[i] @ before + reads[i] @ news_i)
        state = parts.decay[i] * state + news_i.swapaxes(-1, -2) @ parts.k_out[i]
    return mx.stack(y), state
