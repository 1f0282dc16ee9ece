"""Mamba 2's state space layers: in shorter chunks, or as the linear attention that they are.

mlx-lm computes them in chunks as well, of 256 tokens, with several matrices (tokens, tokens) for each
head, one of them of exponentials. Where those take longer than the products, shorter chunks pay.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import mlx.core as mx
from mlx_lm.models import ssm

from firn.backends.recurrence.families import LinearForm, Result
from firn.backends.recurrence.replacements import Replacement

HOMES = (ssm.__name__, "mlx_vlm.models.ssm")
NAME = "ssm_attn"


def shortened(step: int) -> list[Replacement]:
    """step: tokens of a chunk."""
    return [Replacement(home, NAME, lambda plain: partial(plain, step=step)) for home in HOMES]


def as_linear_attention(form: LinearForm) -> list[Replacement]:
    return [Replacement(home, NAME, lambda _: partial(_ssm, form)) for home in HOMES]


def _ssm(
    form: LinearForm,
    x: mx.array,
    a_log: mx.array,
    b: mx.array,
    c: mx.array,
    d: mx.array,
    dt: mx.array,
    dt_bias: mx.array,
    state: mx.array | None = None,
    time_step_limit: tuple[float, float] = (0.001, 100.0),
    mask: mx.array | None = None,
    lengths: mx.array | None = None,
    **_: Any,
) -> Result:
    """x (batch, tokens, heads, width); b and c (batch, tokens, groups of heads, state size); dt (batch,
    tokens, heads); state (batch, heads, width, state size)."""
    n_batch, n_tokens, n_heads, width = x.shape
    dt = ssm.compute_dt(dt, dt_bias, time_step_limit)
    if mask is None and lengths is not None:
        mask = mx.arange(n_tokens) < lengths[:, None]
    if state is None:
        state = mx.zeros((n_batch, n_heads, width, b.shape[-1]), dtype=mx.float32)
    decays = mx.exp(-mx.exp(a_log).astype(dt.dtype) * dt)
    y, state = form(c, b, x, decays, state, mask, dt)
    return y + x * d.reshape(n_heads, 1), state
