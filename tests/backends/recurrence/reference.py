"""The gated delta rule in float64, one token after the other, and arguments for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True, slots=True)
class Shape:
    n_tokens: int
    n_batch: int = 1
    n_key_heads: int = 2
    n_heads: int = 4
    width: int = 16
    n_values: int = 24
    per_channel: bool = False


@dataclass(frozen=True, slots=True)
class Arguments:
    q: Array
    k: Array
    v: Array
    g: Array
    beta: Array
    state: Array

    @classmethod
    def random(
        cls, shape: Shape, rng: np.random.Generator, *, n_keys: int = 0, decay: float = 0.1
    ) -> Arguments:
        """n_keys: how many different keys; 0: each token has its own. decay: mean of -log g."""
        s = shape
        if n_keys:
            keys = rng.standard_normal((n_keys, s.n_key_heads, s.width))
            k = keys[rng.integers(0, n_keys, (s.n_batch, s.n_tokens))]
        else:
            k = rng.standard_normal((s.n_batch, s.n_tokens, s.n_key_heads, s.width))
        q = rng.standard_normal(k.shape)
        of_heads = (s.n_batch, s.n_tokens, s.n_heads)
        given = (
            q / np.linalg.norm(q, axis=-1, keepdims=True),
            k / np.linalg.norm(k, axis=-1, keepdims=True),
            rng.standard_normal((*of_heads, s.n_values)),
            np.exp(-rng.exponential(decay, (*of_heads, s.width) if s.per_channel else of_heads)),
            rng.random(of_heads),
            rng.standard_normal((s.n_batch, s.n_heads, s.n_values, s.width)),
        )
        return cls(*(a.astype(np.float32) for a in given))

    @property
    def all(self) -> tuple[Array, ...]:
        return (self.q, self.k, self.v, self.g, self.beta, self.state)

    @property
    def on_device(self) -> list[mx.array]:
        return [mx.array(a) for a in self.all]


def in_float64(given: Arguments, mask: Array | None = None) -> tuple[Array, Array]:
    """y and the state after all tokens."""
    q, k, v, g, beta, state = (a.astype(np.float64) for a in given.all)
    shared = v.shape[2] // q.shape[2]
    q, k, y = np.repeat(q, shared, axis=2), np.repeat(k, shared, axis=2), []
    for t in range(q.shape[1]):
        before = state
        state = state * (g[:, t][:, :, None] if g.ndim == 4 else g[:, t][..., None, None])
        u = (v[:, t] - np.einsum("bhvk,bhk->bhv", state, k[:, t])) * beta[:, t][..., None]
        state = state + u[..., None] * k[:, t][:, :, None]
        y.append(np.einsum("bhvk,bhk->bhv", state, q[:, t]))
        state = _where(mask, t, state, before)
    return np.stack(y, axis=1), state


def linear_in_float64(
    q: Array, k: Array, v: Array, g: Array, state: Array, beta: Array, mask: Array | None = None
) -> tuple[Array, Array]:
    """Of linear attention: y and the state after all tokens."""
    q, k, v, g, state, beta = (a.astype(np.float64) for a in (q, k, v, g, state, beta))
    shared = v.shape[2] // q.shape[2]
    q, k, y = np.repeat(q, shared, axis=2), np.repeat(k, shared, axis=2), []
    for t in range(q.shape[1]):
        before, u = state, v[:, t] * beta[:, t][..., None]
        state = state * g[:, t][..., None, None] + u[..., None] * k[:, t][:, :, None]
        y.append(np.einsum("bhvk,bhk->bhv", state, q[:, t]))
        state = _where(mask, t, state, before)
    return np.stack(y, axis=1), state


@dataclass(frozen=True, slots=True)
class WkvArguments:
    """Of RWKV 7's recurrence. As in its models, a has length 1, and b is a part of -a."""

    r: Array
    w: Array
    k: Array
    v: Array
    a: Array
    b: Array
    state: Array

    @classmethod
    def random(
        cls, shape: Shape, rng: np.random.Generator, *, n_keys: int = 0, decay: float = 0.1
    ) -> WkvArguments:
        """n_keys: how many different a; 0: each token has its own. decay: mean of -log w."""
        s = shape
        of_heads = (s.n_batch, s.n_tokens, s.n_heads)
        if n_keys:
            keys = rng.standard_normal((n_keys, s.n_heads, s.width))
            a = keys[rng.integers(0, n_keys, (s.n_batch, s.n_tokens))]
        else:
            a = rng.standard_normal((*of_heads, s.width))
        a = -a / np.linalg.norm(a, axis=-1, keepdims=True)
        given = (
            rng.standard_normal(a.shape),
            np.exp(-rng.exponential(decay, a.shape)),
            rng.standard_normal(a.shape),
            rng.standard_normal((*of_heads, s.n_values)),
            a,
            -a * rng.random(a.shape),
            rng.standard_normal((s.n_batch, s.n_heads, s.n_values, s.width)),
        )
        return cls(*(each.astype(np.float32) for each in given))

    @property
    def all(self) -> tuple[Array, ...]:
        return (self.r, self.w, self.k, self.v, self.a, self.b, self.state)

    @property
    def on_device(self) -> list[mx.array]:
        return [mx.array(a) for a in self.all]


def wkv_in_float64(given: WkvArguments, mask: Array | None = None) -> tuple[Array, Array]:
    r, w, k, v, a, b, state = (each.astype(np.float64) for each in given.all)
    y = []
    for t in range(r.shape[1]):
        before, c = state, np.einsum("bhvk,bhk->bhv", state, a[:, t])
        state = state * w[:, t][:, :, None] + v[:, t][..., None] * k[:, t][:, :, None]
        state = state + c[..., None] * b[:, t][:, :, None]
        y.append(np.einsum("bhvk,bhk->bhv", state, r[:, t]))
        state = _where(mask, t, state, before)
    return np.stack(y, axis=1), state


def _where(mask: Array | None, t: int, state: Array, before: Array) -> Array:
    if mask is None:
        return state
    kept: Array = np.where(mask[:, t][:, None, None, None], state, before)
    return kept


TINY = float(np.finfo(np.float32).tiny) / 2.0**-24
"""What is shorter has fewer digits in float32."""


def relative(got: Any, want: Array) -> float:
    """The distance, over the length of what was wanted; of next to nothing, the distance."""
    length = float(np.linalg.norm(want))
    far = float(np.linalg.norm(np.asarray(got, dtype=np.float64) - want))
    return far / (length if length > TINY else 1.0)
