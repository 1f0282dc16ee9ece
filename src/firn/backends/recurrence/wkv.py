"""RWKV 7's recurrence over many tokens at once, in plain MLX operations.

    c  = S a
    S <- S diag(w) + v k' + c b'
    y  = S r

a reads the state before it decays, and what it reads is written back along b: in mlx-lm one token after
the other. In chunks, with S the state before one and P_st the decays of channels behind token s up to
token t (P_0t: from the chunk's begin),

    c_t  =  S (P_0,t-1 a_t)  +  sum_{s<t} (k_s P_s,t-1 a_t) v_s + (b_s P_s,t-1 a_t) c_s
    y_t  =  S (P_0t r_t)     +  sum_{s<=t} (k_s P_st r_t) v_s + (b_s P_st r_t) c_s

so a chunk takes a triangular inverse and some matrix products, most of them for all chunks together, as
for the gated delta rule (`delta`).
"""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

from firn.backends.recurrence.chunks import (
    Product,
    in_chunks,
    inverse,
    joined,
    levels,
    since_begin,
    size_of,
    until_end,
)


def wkv7(
    r: mx.array,
    w: mx.array,
    k: mx.array,
    v: mx.array,
    a: mx.array,
    b: mx.array,
    state: mx.array,
    mask: mx.array | None = None,
    *,
    chunk: int,
    multiply: Product = mx.matmul,
) -> tuple[mx.array, mx.array]:
    """y in r's type, and the state after all tokens. chunk: tokens, a power of two.

    All (batch, tokens, heads, width), v of the values' width; state (batch, heads, value width, width).
    Tokens outside the mask (batch, tokens) do not change the state; their y means nothing.
    """
    dtype, (n_batch, n_tokens, n_heads, width) = r.dtype, r.shape
    w, k, b = kept(w, k, b, mask)
    size, heads = size_of(chunk, n_tokens), (n_heads, 1)
    r, k, v, a, b = (in_chunks(each, size, heads) for each in (r, k, v, a, b))
    w = in_chunks(w, size, heads, padding=1)
    now = state.astype(mx.float32).reshape(n_batch, *heads, -1, width)
    y, now = _over_chunks(_within(r, w, k, v, a, b, multiply), now, multiply)
    return joined(y, n_tokens).astype(dtype), now.reshape(state.shape).astype(state.dtype)


def kept(
    w: mx.array, k: mx.array, b: mx.array, mask: mx.array | None
) -> tuple[mx.array, mx.array, mx.array]:
    """w, k and b with which tokens outside the mask leave the state alone."""
    if mask is None:
        return w, k, b
    inside = mask[..., None, None]
    return mx.where(inside, w, 1), mx.where(inside, k, 0), mx.where(inside, b, 0)


@dataclass(frozen=True, slots=True)
class _Chunks:
    """Arrays begin with the chunks; what values alone give is summed up already."""

    c: mx.array
    """What tokens read of their chunk's values, by a."""
    c_in: mx.array
    """By which they read the state before it."""
    y: mx.array
    y_in: mx.array
    y_of_c: mx.array
    added: mx.array
    """To the state, by values."""
    b_out: mx.array
    """By which what they read is added."""
    decay: mx.array


def _within(
    r: mx.array,
    w: mx.array,
    k: mx.array,
    v: mx.array,
    a: mx.array,
    b: mx.array,
    multiply: Product,
) -> _Chunks:
    """Two tokens whose decay is a product of channels: as seen from a border between them, as in
    `delta._per_channel`. Keys and b are written, a and r read: one product of both with both."""
    size = w.shape[-2]
    written, read_late, read_early = mx.concatenate([k, b], axis=-2), r, a
    own = mx.eye(size)
    y_of_v = own * (k * r).sum(axis=-1, keepdims=True)
    y_of_c = own * (b * r).sum(axis=-1, keepdims=True)
    c_of_v = system = mx.zeros_like(y_of_v)
    for level, mask in enumerate(levels(size)):
        blocks = w.reshape(*w.shape[:-2], -1, 1 << level, w.shape[-1])
        until = until_end(blocks).reshape(w.shape)
        since = since_begin(blocks).reshape(w.shape) * read_late
        early = since_begin(blocks, with_own=False).reshape(w.shape) * read_early
        before = mx.concatenate([until, until], axis=-2) * written
        both = multiply(before, mx.concatenate([since, early], axis=-2).swapaxes(-1, -2))
        y_of_v = y_of_v + both[..., :size, :size] * mask
        c_of_v = c_of_v + both[..., :size, size:] * mask
        y_of_c = y_of_c + both[..., size:, :size] * mask
        system = system + both[..., size:, size:] * mask
    inverted, until = inverse(-system, multiply).swapaxes(-1, -2), until_end(w)
    since = since_begin(w)
    return _Chunks(
        c=multiply(inverted, multiply(c_of_v.swapaxes(-1, -2), v)),
        c_in=multiply(inverted, since_begin(w, with_own=False) * a),
        y=multiply(y_of_v.swapaxes(-1, -2), v),
        y_in=since * r,
        y_of_c=y_of_c.swapaxes(-1, -2),
        added=multiply(v.swapaxes(-1, -2), until * k),
        b_out=until * b,
        decay=since[..., -1:, :],
    )


def _over_chunks(parts: _Chunks, state: mx.array, multiply: Product) -> tuple[mx.array, mx.array]:
    y = []
    for i in range(len(parts.c)):
        before = state.swapaxes(-1, -2)
        c = parts.c[i] + multiply(parts.c_in[i], before)
        y.append(parts.y[i] + multiply(parts.y_in[i], before) + multiply(parts.y_of_c[i], c))
        more = multiply(c.swapaxes(-1, -2), parts.b_out[i])
        state = parts.decay[i] * state + parts.added[i] + more
    return mx.stack(y), state
