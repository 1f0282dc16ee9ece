"""Forms of recurrences in place of what mlx-lm's and mlx-vlm's models compute token by token.

The libraries' signatures, arrangements and types stay; calls that a form does not suit are left to them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import mlx.core as mx

from firn.backends.recurrence.replacements import Function, Replacement, homes_of

Result = tuple[mx.array, mx.array]


class LinearForm(Protocol):
    """One of linear attention. The arguments are those of `linear.linear_attention`."""

    def suits(self, k: mx.array, v: mx.array) -> bool:
        """Whether to compute this call; otherwise it is left to the library."""

    def __call__(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        g: mx.array,
        state: mx.array,
        mask: mx.array | None = None,
        beta: mx.array | None = None,
    ) -> Result: ...


class WkvForm(Protocol):
    """One of RWKV 7's recurrence. The arguments are those of `wkv.wkv7`."""

    def suits(self, k: mx.array, v: mx.array) -> bool:
        """Whether to compute this call; otherwise it is left to the library."""

    def __call__(
        self,
        r: mx.array,
        w: mx.array,
        k: mx.array,
        v: mx.array,
        a: mx.array,
        b: mx.array,
        state: mx.array,
        mask: mx.array | None = None,
    ) -> Result: ...


LING, LING_HYBRID = homes_of("bailing_moe_linear"), homes_of("bailing_hybrid")
"""The latter's own form is in chunks as well, with a state in float32."""


def lightning(form: LinearForm, homes: Sequence[str]) -> list[Replacement]:
    """Ling's and Ring's linear attention."""
    return [Replacement(home, "recurrent_gla", partial(_gla, form)) for home in homes]


def _gla(form: LinearForm, plain: Function) -> Function:
    keeps_float32 = plain.__module__ in LING_HYBRID

    def recurrent_gla(
        q: mx.array,
        k: mx.array,
        v: mx.array,
        g: mx.array,
        scale: float,
        h: mx.array | None = None,
        **more: Any,
    ) -> Result:
        """q, k, v (batch, heads, tokens, ..), g (heads), the logarithm of its decay; h (batch, heads,
        width, values)."""
        n_batch, n_heads, n_tokens, width = q.shape
        if not form.suits(k.swapaxes(1, 2), v):
            result: Result = plain(q, k, v, g, scale=scale, h=h, **more)
            return result
        if h is None:
            dtype = mx.float32 if keeps_float32 else q.dtype
            h = mx.zeros((n_batch, n_heads, width, v.shape[-1]), dtype=dtype)
        # In float32: rounded to 16 bits, as mlx-lm has them in one of these, slow ones would be none.
        decays = mx.broadcast_to(mx.exp(g.astype(mx.float32)), (n_batch, n_tokens, n_heads))
        q, k, v = (a.swapaxes(1, 2) for a in (q * scale, k, v))
        y, after = form(q, k, v, decays, h.swapaxes(-1, -2), more.get("mask"))
        return y.swapaxes(1, 2), after.swapaxes(-1, -2)

    return recurrent_gla


def rwkv7(form: WkvForm) -> list[Replacement]:
    path = "Rwkv7TimeMixing._wkv7"
    return [Replacement(home, path, partial(_wkv, form)) for home in homes_of("rwkv7")]


def _wkv(form: WkvForm, plain: Function) -> Function:
    def _wkv7(
        self: Any,
        r: mx.array,
        w: mx.array,
        k: mx.array,
        v: mx.array,
        a: mx.array,
        b: mx.array,
        state: mx.array | None,
    ) -> Result:
        if not form.suits(k, v):
            result: Result = plain(self, r, w, k, v, a, b, state)
            return result
        if state is None:
            n_batch, _, n_heads, width = r.shape
            state = mx.zeros((n_batch, n_heads, v.shape[-1], width), dtype=r.dtype)
        return form(r, w, k, v, a, b, state)

    return _wkv7


GatedSum = Callable[[mx.array, mx.array, mx.array | None], Result]
"""As `scans.gated_sum`."""


def recurrent_gemma(form: GatedSum) -> list[Replacement]:
    homes = homes_of("recurrent_gemma")
    return [Replacement(home, "rnn_scan", partial(_rnn_scan, form)) for home in homes]


def _rnn_scan(form: GatedSum, plain: Function) -> Function:
    def rnn_scan(x: mx.array, a: mx.array, h0: mx.array | None) -> Result:
        """A token alone takes the library two operations."""
        return (form if x.shape[1] > 1 else plain)(x, a, h0)

    return rnn_scan
