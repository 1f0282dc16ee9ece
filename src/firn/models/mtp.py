"""A model with its own prediction head: one more layer, which guesses the token after the next.

    hidden state behind token t-1, embedding of token t  ->  head  ->  guess of token t+1

The head is a part of the forward pass, and its KV one more cache of plain attention behind the others:
batched, set back, stored and restored as they are. The hidden state that it begins with (`carry`) is
handed in with each call; where none is known, behind a restored prefix, zeros take its place, and one
guess is worse for it.

Owner: the engine thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import KVCache


class Head(nn.Module):  # type: ignore[misc]
    """What DeepSeek's and Qwen's models have in common, whatever they call it."""

    def __init__(self, layer: nn.Module, *, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.embed_norm = nn.RMSNorm(hidden_size, eps=eps)
        self.hidden_norm = nn.RMSNorm(hidden_size, eps=eps)
        self.join = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        self.layer = layer
        self.norm = nn.RMSNorm(hidden_size, eps=eps)

    def __call__(self, hidden: mx.array, embeds: mx.array, cache: Any) -> mx.array:
        """The hidden states that the guesses are made of: (rows, tokens, width)."""
        both = [self.embed_norm(embeds), self.hidden_norm(hidden)]
        x = self.join(mx.concatenate(both, axis=-1))
        mask = create_attention_mask(x, cache, return_array=True)
        out: mx.array = self.norm(self.layer(x, mask=mask, cache=cache))
        return out


class MtpModel(nn.Module):  # type: ignore[misc]
    """Callable like mlx-lm's models; the last of its caches is the head's."""

    def __init__(self, base: Any, head: Head) -> None:
        super().__init__()
        self.base = base
        self.head = head
        self._hidden: mx.array | None = None

    @property
    def args(self) -> Any:
        return self.base.args

    @property
    def model(self) -> Any:
        """The layers without the vocabulary's."""
        return self.base.model

    @property
    def hidden(self) -> mx.array:
        """Of the last call: (rows, tokens, width)."""
        assert self._hidden is not None
        return self._hidden

    def __call__(
        self, ids: mx.array, cache: list[Any], *, carry: mx.array | None = None
    ) -> mx.array:
        """carry: (rows, width), the hidden states behind the tokens before these."""
        *own, last = cache
        hidden = self.base.model(ids, own)
        if carry is None:
            carry = mx.zeros_like(hidden[:, 0])
        before = mx.concatenate([carry[:, None].astype(hidden.dtype), hidden[:, :-1]], axis=1)
        self.head(before, self._embed(ids), last)
        self._hidden = hidden
        # Nothing else needs the head's keys: they would not be computed, and the graph would grow.
        logits: mx.array = mx.depends(self._logits(hidden), [last.keys, last.values])
        return logits

    def guess(self, ids: mx.array, hidden: mx.array, cache: Any) -> tuple[mx.array, mx.array]:
        """Logits and hidden states of the head alone; ids and hidden as in a call, side by side."""
        out = self.head(hidden, self._embed(ids), cache)
        return self._logits(out), out

    def _embed(self, ids: mx.array) -> mx.array:
        found: mx.array = self.base.model.embed_tokens(ids)
        return found

    def _logits(self, hidden: mx.array) -> mx.array:
        text = getattr(self.base, "language_model", self.base)
        out: mx.array
        if "lm_head" in text:
            out = text.lm_head(hidden)
        else:
            out = text.model.embed_tokens.as_linear(hidden)
        return out


def with_head_layer(make_layers: Callable[[], list[Any]]) -> Callable[[], list[Any]]:
    return lambda: [*make_layers(), KVCache()]
