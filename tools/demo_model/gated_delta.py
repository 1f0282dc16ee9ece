"""The gated delta rule in chunks, for training.

mlx-lm's reference walks the tokens one by one, which is slow on a GPU. Within a chunk of C tokens
the rule is a triangular system, so a chunk is a few matrix products and only the chunk borders are
sequential. `python -m tools.demo_model.gated_delta` compares outputs, states and gradients with
mlx-lm's own op.
"""

from __future__ import annotations

import mlx.core as mx
import mlx.nn as nn
from mlx_lm.models import qwen3_next
from mlx_lm.models.gated_delta import compute_g, gated_delta_ops

BASE = 16  # inverted by power series; longer series would cancel badly in float32


@mx.custom_function
def inverse(a: mx.array) -> mx.array:
    """(I - a)^-1 for strictly lower triangular `a`, whose side is BASE times a power of two."""
    n = a.shape[-1]
    if n == BASE:
        eye = mx.eye(n, dtype=a.dtype)
        a2 = a @ a
        series = eye + a + a2 + a2 @ a
        a4 = a2 @ a2
        series = series + a4 @ series
        return series + (a4 @ a4) @ series
    half = n // 2
    # [[p, 0], [r, q]]^-1: both diagonal blocks together, then the corner.
    blocks = mx.stack([a[..., :half, :half], a[..., half:, half:]])
    p, q = inverse(blocks)
    corner = q @ (a[..., half:, :half] @ p)
    top = mx.concatenate([p, mx.zeros_like(p)], axis=-1)
    return mx.concatenate([top, mx.concatenate([corner, q], axis=-1)], axis=-2)


@inverse.vjp
def _inverse_vjp(primals: mx.array, cotangent: mx.array, output: mx.array) -> mx.array:
    turned = output.swapaxes(-1, -2)
    return mx.tril(turned @ cotangent @ turned, -1)


def chunked(
    q: mx.array, k: mx.array, v: mx.array, log_g: mx.array, beta: mx.array, *, chunk: int
) -> tuple[mx.array, mx.array]:
    """Like mlx-lm's `gated_delta_ops` from a zero state, with log decays.

    q, k: (B, T, Hk, Dk); v: (B, T, Hv, Dv); log_g, beta: (B, T, Hv). T is a multiple of `chunk`.
    Returns y (B, T, Hv, Dv) in q's dtype and the last state (B, Hv, Dv, Dk) in float32.
    """
    b, t, hk, dk = q.shape
    hv, dv = v.shape[-2:]
    n = t // chunk
    dtype = q.dtype

    def heads_first(x: mx.array) -> mx.array:  # (B, T, H, ...) -> (B, H, N, C, ...)
        if x.shape[2] != hv:
            x = mx.repeat(x, hv // hk, axis=2)
        x = x.astype(mx.float32).swapaxes(1, 2)
        return x.reshape(b, hv, n, chunk, *x.shape[3:])

    q, k, v, log_g, beta = map(heads_first, (q, k, v, log_g, beta))
    g = mx.cumsum(log_g, axis=-1)  # (B, H, N, C), decay since the start of the chunk
    lower = mx.tril(mx.ones((chunk, chunk), dtype=mx.bool_))
    # Mask before exp: the upper half would overflow and poison the gradient.
    decay = mx.exp(mx.where(lower, g[..., :, None] - g[..., None, :], -mx.inf))
    since = mx.exp(g)[..., None]
    until = mx.exp(g[..., -1:] - g)[..., None]
    whole = mx.exp(g[..., -1])[..., None, None]

    turned = k.swapaxes(-1, -2)
    k_beta = k * beta[..., None]
    solve = inverse(-mx.tril((k_beta @ turned) * decay, -1))
    fresh = solve @ (v * beta[..., None])  # what the chunk would write into an empty state
    erase = solve @ (k_beta * since)  # what it takes back from the state it starts with
    carry = (k * until).swapaxes(-1, -2)

    state = mx.zeros((b, hv, dk, dv), dtype=mx.float32)
    states, writes = [], []
    for i in range(n):
        states.append(state)
        write = fresh[:, :, i] - erase[:, :, i] @ state
        writes.append(write)
        state = state * whole[:, :, i] + carry[:, :, i] @ write
    before = mx.stack(states, axis=2)
    written = mx.stack(writes, axis=2)
    y = (q * since) @ before + ((q @ turned) * decay) @ written
    y = y.reshape(b, hv, t, dv).swapaxes(1, 2)
    return y.astype(dtype), state.swapaxes(-1, -2)


def _update(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    a: mx.array,
    b: mx.array,
    a_log: mx.array,
    dt_bias: mx.array,
    state: mx.array | None = None,
    mask: mx.array | None = None,
    *,
    use_kernel: bool = True,
) -> tuple[mx.array, mx.array]:
    """Stands in for mlx-lm's `gated_delta_update` while training: no state in, no mask."""
    assert state is None
    assert mask is None
    log_g = -mx.exp(a_log.astype(mx.float32)) * nn.softplus(a + dt_bias)
    chunk = 64 if q.shape[1] <= 1024 else 128
    return chunked(q, k, v, log_g, mx.sigmoid(b), chunk=chunk)


def use_for_training() -> None:
    """Make mlx-lm's qwen3_next train with chunks. Inference never calls this."""
    qwen3_next.gated_delta_update = _update


def check() -> None:
    mx.random.seed(0)
    b, t, hk, hv, d = 2, 256, 2, 4, 32
    q, k = (mx.random.normal((b, t, hk, d)) for _ in range(2))
    k = k.at[:, 64:128].add(40 * k[:, 64:65])  # nearly equal keys: the badly conditioned case
    q, k = (x / mx.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = mx.random.normal((b, t, hv, d))
    gate, bias = mx.random.normal((b, t, hv)), mx.random.normal((hv,))
    beta = mx.sigmoid(3 * mx.random.normal((b, t, hv)))
    a_log = mx.log(mx.random.uniform(0.001, 4, (hv,)))
    log_g = -mx.exp(a_log) * mx.logaddexp(gate + bias, mx.array(0.0))
    ct = mx.random.normal(v.shape)

    def slow(q, k, v, log_g, beta):  # type: ignore[no-untyped-def]
        return (gated_delta_ops(q, k, v, mx.exp(log_g), beta)[0] * ct).sum()

    def fast(q, k, v, log_g, beta):  # type: ignore[no-untyped-def]
        return (chunked(q, k, v, log_g, beta, chunk=chunk)[0] * ct).sum()

    inputs = (q, k, v, log_g, beta)
    want = gated_delta_ops(q, k, v, compute_g(a_log, gate, bias), beta)
    want_grads = mx.grad(slow, argnums=tuple(range(5)))(*inputs)
    for chunk in (16, 64, 128):
        got = chunked(*inputs, chunk=chunk)
        got_grads = mx.grad(fast, argnums=tuple(range(5)))(*inputs)
        names = ("y", "state", "dq", "dk", "dv", "dlog_g", "dbeta")
        for name, x, y in zip(names, (*want, *want_grads), (*got, *got_grads), strict=True):
            error = (mx.linalg.norm(x - y) / mx.linalg.norm(x)).item()
            print(f"chunk {chunk:3d} {name:7s} relative error {error:.1e}")
            assert error < 1e-3, (chunk, name, error)


if __name__ == "__main__":
    check()
