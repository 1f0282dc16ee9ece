"""Selective scans, h <- a h + b for each value: two operations a token, the rest for many at once.

mlx-lm's Jamba writes each token's state into an array of all tokens', which copies that array for each
token; its Mamba computes everything token by token, matrix products included. The order of sums is
theirs. Decays are powers of two, which MLX's CPU backend computes in a fifth of the
time of exponentials (see `cpu.softmax`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
from mlx import nn

from firn.backends.recurrence.replacements import Replacement, homes_of

SPAN = 64
"""Tokens whose states, (channels, state size) each, are in memory at the same time."""


def scan(decays: mx.array, news: mx.array, state: mx.array | None) -> mx.array:
    """The states after each token (batch, tokens, ...). None: before the first token."""
    states: list[mx.array] = []
    for t in range(news.shape[1]):
        state = news[:, t] if state is None else decays[:, t] * state + news[:, t]
        states.append(state)
    return mx.stack(states, axis=1)


def selective(
    x: mx.array,
    delta: mx.array,
    b: mx.array,
    c: mx.array,
    a: mx.array,
    state: mx.array | None,
) -> tuple[mx.array, mx.array | None]:
    """Mamba 1: x and delta (batch, tokens, channels); b and c (batch, tokens, state size); a (channels,
    state size). Returns y of the same shape as x, and the state after the last token."""
    y, rate = [], a * math.log2(math.e)
    for i in range(0, x.shape[1], SPAN):
        part = slice(i, i + SPAN)
        news = (delta[:, part] * x[:, part])[..., None] * b[:, part, None, :]
        states = scan(mx.power(2.0, delta[:, part, :, None] * rate), news, state)
        state = states[:, -1]
        y.append((states @ c[:, part, :, None])[..., 0])
    return mx.concatenate(y, axis=1), state


def gated_sum(x: mx.array, a: mx.array, state: mx.array | None) -> tuple[mx.array, mx.array]:
    """Recurrent Gemma: x and a (batch, tokens, channels). Returns h <- a h + x after each token, and
    after the last."""
    states = scan(a, x, state)
    return states, states[:, -1]


Selective = Callable[..., tuple[mx.array, mx.array | None]]
"""As `selective`."""


def _jamba_step(
    form: Selective, self: Any, x: mx.array, a: mx.array, state: mx.array | None = None
) -> Any:
    """JambaMambaMixer.ssm_step."""
    delta, b, c = _projected(self, x)
    delta, b, c = self.dt_layernorm(delta), self.b_layernorm(b), self.c_layernorm(c)
    y, state = form(x, nn.softplus(self.dt_proj(delta)), b, c, a, state)
    return y + self.D * x, state


def _mamba_sequence(
    form: Selective, self: Any, x: mx.array, conv_cache: Any, state: mx.array | None
) -> Any:
    """MambaBlock._process_sequence."""
    x, z = self.in_proj(x).split(indices_or_sections=2, axis=-1)
    n_before = self.conv_kernel_size - 1
    if conv_cache is None:
        x = mx.pad(x, [(0, 0), (n_before, 0), (0, 0)])
    else:
        x = mx.concatenate([conv_cache, x], axis=1)
    conv_cache = x[:, -n_before:, :]
    x = nn.silu(self.conv1d(x))
    delta, b, c = _projected(self, x)
    if self.use_bcdt_rms:
        eps = self.args.mixer_rms_eps
        delta, b, c = (mx.fast.rms_norm(a, weight=None, eps=eps) for a in (delta, b, c))
    a = -mx.exp(self.A_log)
    y, state = form(x, nn.softplus(self.dt_proj(delta)), b, c, a, state)
    return self.out_proj(nn.silu(z) * (y + self.D * x)), (conv_cache, state)


def _projected(self: Any, x: mx.array) -> Any:
    ends = [self.time_step_rank, self.time_step_rank + self.ssm_state_size]
    return mx.split(self.x_proj(x), ends, axis=-1)


def selective_scans(form: Selective) -> list[Replacement]:
    """Jamba's and Mamba's layers, computed by this form."""
    jamba, mamba = partial(_jamba_step, form), partial(_mamba_sequence, form)
    return [
        *(Replacement(h, "JambaMambaMixer.ssm_step", lambda _: jamba) for h in homes_of("jamba")),
        *(
            Replacement(h, "MambaBlock._process_sequence", lambda _: mamba)
            for h in homes_of("mamba")
        ),
    ]
