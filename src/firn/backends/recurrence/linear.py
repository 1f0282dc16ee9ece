"""Linear attention with decays of heads over many tokens at once, in plain MLX operations.

    S <- g S + beta v k'
    y  = S q

Lightning attention (Ling, MiniMax 01) and Mamba 2 are of this kind. In chunks, with S the state before
one, p_t the decay from its begin to token t and D_ts the decay between two of its tokens,

    y_t = p_t S q_t + sum_{s<=t} D_ts (q_t k_s) v_s

Nothing that a token adds depends on the state, so all but one sum of states is matrix products for all
chunks together. Decays are products of the given ones: strong ones become 0, and nothing overflows.
"""

from __future__ import annotations

import mlx.core as mx

from firn.backends.recurrence.chunks import (
    Product,
    decays_between,
    in_chunks,
    joined,
    size_of,
)


def linear_attention(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    state: mx.array,
    mask: mx.array | None = None,
    beta: mx.array | None = None,
    *,
    chunk: int,
    multiply: Product = mx.matmul,
) -> tuple[mx.array, mx.array]:
    """y, like v in q's type, and the state after all tokens. chunk: tokens, a power of two.

    q, k (batch, tokens, key heads, width), v (batch, tokens, heads, value width), g (batch, tokens,
    heads), state (batch, heads, value width, width), beta (batch, tokens, heads): factors of v. Tokens
    outside the mask (batch, tokens) do not change the state; their y means nothing.
    """
    dtype, (n_batch, n_tokens, n_key_heads, width) = q.dtype, q.shape
    if beta is not None:
        v = v * beta[..., None]
    if mask is not None:
        v = mx.where(mask[..., None, None], v, 0)
        g = mx.where(mask[..., None], g, 1)
    size, heads = size_of(chunk, n_tokens), (n_key_heads, v.shape[2] // n_key_heads)
    q, k = (in_chunks(a, size, (n_key_heads, 1)) for a in (q, k))
    v, g = in_chunks(v, size, heads), in_chunks(g, size, heads, padding=1)
    between = decays_between(g)
    since = mx.cumprod(g, axis=-1)[..., None]
    reads = multiply(k, q.swapaxes(-1, -2)) * between
    k_out, q_in, decay = between[..., -1:] * k, since * q, since[..., -1:, :]
    now, y = state.astype(mx.float32).reshape(n_batch, *heads, -1, width), []
    for i in range(len(v)):
        y.append(multiply(q_in[i], now.swapaxes(-1, -2)))
        now = decay[i] * now + multiply(v[i].swapaxes(-1, -2), k_out[i])
    out = joined(multiply(reads.swapaxes(-1, -2), v) + mx.stack(y), n_tokens)
    return out.astype(dtype), now.reshape(state.shape).astype(state.dtype)
