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

import mlx.core as mx

from firn.backends.recurrence.chunks import (
    Product,
    decays_between,
    in_chunks,
    inverse,
    joined,
    levels,
    since_begin,
    size_of,
    until_end,
)


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
    multiply: Product = mx.matmul,
) -> tuple[mx.array, mx.array]:
    """What mlx_lm.models.gated_delta.gated_delta_ops computes. chunk: tokens, a power of two.

    q, k (batch, tokens, key heads, width), v (batch, tokens, heads, value width); g and beta (batch,
    tokens, heads), or g also (.., width); state (batch, heads, value width, width). Tokens outside
    the mask (batch, tokens) do not change the state; their y means nothing.
    """
    dtype, (n_batch, n_tokens, n_key_heads, width) = q.dtype, q.shape
    n_heads, value_width = v.shape[-2:]
    g, beta, state = completed(q, v, g, beta, state, mask)
    size = size_of(chunk, n_tokens)
    shared = n_heads // n_key_heads
    q, k = (in_chunks(a, size, (n_key_heads, 1)) for a in (q, k))
    v, beta = (in_chunks(a, size, (n_key_heads, shared)) for a in (v, beta))
    g, beta = in_chunks(g, size, (n_key_heads, shared), padding=1), beta[..., None]
    within = _per_head if g.ndim == 5 else _per_channel
    parts = within(q, k, g, beta, multiply)
    grouped = state.reshape(n_batch, n_key_heads, shared, value_width, width)
    y, after = _over_chunks(parts, beta * v, grouped.astype(mx.float32), multiply)
    after = after.reshape(state.shape).astype(state.dtype)
    return joined(y, n_tokens).astype(dtype), after


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


def _per_head(q: mx.array, k: mx.array, g: mx.array, beta: mx.array, multiply: Product) -> _Chunks:
    between = decays_between(g)
    since = mx.cumprod(g, axis=-1)[..., None]
    products = multiply(k, k.swapaxes(-1, -2)) * between
    return _Chunks(
        inverse=inverse(products * beta.swapaxes(-1, -2), multiply),
        reads=multiply(k, q.swapaxes(-1, -2)) * between,
        k_in=(since * beta) * k,
        q_in=since * q,
        k_out=between[..., -1:] * k,
        decay=since[..., -1:, :],
    )


def _per_channel(
    q: mx.array, k: mx.array, g: mx.array, beta: mx.array, multiply: Product
) -> _Chunks:
    """Two tokens whose decay is a product of channels: as seen from a border between them, with one
    of the powers of two as the distance of borders."""
    size = g.shape[-2]
    system, reads = mx.zeros(1), mx.eye(size) * (k * q).sum(axis=-1, keepdims=True)
    for level, mask in enumerate(levels(size)):
        blocks = g.reshape(*g.shape[:-2], -1, 1 << level, g.shape[-1])
        since, until = since_begin(blocks).reshape(g.shape), until_end(blocks).reshape(g.shape)
        before = until * k
        system = system + multiply(before, (since * k * beta).swapaxes(-1, -2)) * mask
        reads = reads + multiply(before, (since * q).swapaxes(-1, -2)) * mask
    since = since_begin(g)
    return _Chunks(
        inverse=inverse(mx.broadcast_to(system, reads.shape), multiply),
        reads=reads,
        k_in=since * beta * k,
        q_in=since * q,
        k_out=until_end(g) * k,
        decay=since[..., -1:, :],
    )


def _over_chunks(
    parts: _Chunks, v: mx.array, state: mx.array, multiply: Product
) -> tuple[mx.array, mx.array]:
    """v: times beta. Returns y of all chunks, and the state after them."""
    inverted, reads = parts.inverse.swapaxes(-1, -2), parts.reads.swapaxes(-1, -2)
    if v.shape[-2] > 1:
        news, k_in = multiply(inverted, v), multiply(inverted, parts.k_in)
    else:
        news, k_in = v, parts.k_in
    y = []
    for i in range(len(v)):
        before = state.swapaxes(-1, -2)
        news_i = news[i] - multiply(k_in[i], before)
        y.append(multiply(parts.q_in[i], before) + multiply(reads[i], news_i))
        more = multiply(news_i.swapaxes(-1, -2), parts.k_out[i])
        state = parts.decay[i] * state + more
    return mx.stack(y), state
