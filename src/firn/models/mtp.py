"""A model with its own prediction head: one more layer, which guesses the token after the next.

    hidden state after token t-1, embedding of token t  ->  head  ->  guess of token t+1

The head's KV is one more cache of plain attention, the last one: batched, set back, stored and
restored as they are, and written along with them or a little later (`models.backlog`). The hidden state
that the head goes on from is a layer, too, in models that have states of their own:

    layers   [the model's ...][the head's KV][the hidden state after the newest token]

Models of plain attention are stored by block, and a state a block would be a multiple of it: after a
restored prefix its newest token is read once more instead (`look_back`).

Owner: the engine thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import ArraysCache, KVCache

from firn.models.rewind import TRIMMED, kind, leaves
from firn.models.vision import VisionModel

STATE = "ArraysCache"


class PredictionHead(nn.Module):  # type: ignore[misc]
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
    """Callable like mlx-lm's models; the last of its caches are the head's."""

    def __init__(self, base: Any, head: PredictionHead) -> None:
        super().__init__()
        self.base = base
        self.head = head
        self._pictures = isinstance(base, VisionModel)
        self._hidden: mx.array | None = None

    @property
    def args(self) -> Any:
        return self._text.args

    @property
    def model(self) -> Any:
        """The layers without the vocabulary's."""
        return self._text.model

    @property
    def _text(self) -> Any:
        """The part that says tokens."""
        if self._pictures:
            return self.base.model.language_model
        return self.base.get("language_model", self.base)

    @property
    def hidden(self) -> mx.array:
        """Of the last call: (rows, tokens, width)."""
        assert self._hidden is not None
        return self._hidden

    def __call__(
        self, ids: mx.array, cache: list[Any], *, carry: mx.array | None = None, **inputs: Any
    ) -> mx.array:
        """Model and head. carry: (rows, width), the hidden states after the tokens before these, where
        no layer keeps them. inputs: what a model of pictures takes beside ids."""
        last, first = split(cache)[1], self.before(cache, carry)
        hidden, embeds = self._read(ids, cache, inputs)
        if first is None:
            first = mx.zeros_like(hidden[:, 0])
        before = mx.concatenate([first[:, None].astype(hidden.dtype), hidden[:, :-1]], axis=1)
        self.head(before, embeds, last)
        # Nothing else needs the head's keys: they would not be computed, and the graph would grow.
        logits: mx.array = mx.depends(self._logits(hidden), [last.keys, last.values])
        return logits

    def without_head(self, ids: mx.array, cache: list[Any], **inputs: Any) -> mx.array:
        """The model alone: its head's KV stays behind, until `feed_head` has these tokens, too."""
        hidden, _ = self._read(ids, cache, inputs)
        return self._logits(hidden)

    def feed_head(self, ids: mx.array, before: mx.array, head_cache: Any) -> None:
        """Tokens (rows, n) that the model has read, and the hidden states before them (rows, n, width).

        What the head would say of them is never computed: its keys are enough.
        """
        self.head(before, self._embed(ids), head_cache)

    def before(self, cache: list[Any], carry: mx.array | None) -> mx.array | None:
        """(rows, width): the hidden states after the newest tokens; None where nothing is known."""
        state = split(cache)[2]
        return carry if state is None or state[0] is None else state[0][:, 0]

    def look_back(self, token: int, cache: list[Any]) -> mx.array | None:
        """The hidden state after a lone row's newest token, computed once more; None where its layers
        cannot take that back. (1, 1, width)"""
        own, _, state = split(cache)
        if state is not None:
            found: mx.array | None = state[0]
            return found
        if self._pictures or not all(kind(c) in TRIMMED and c.offset for c in own):
            return None
        for layer in own:
            layer.trim(1)
        hidden: mx.array = self.base.model(mx.array([[token]]), own)
        return hidden

    def guess(self, ids: mx.array, hidden: mx.array, cache: Any) -> tuple[mx.array, mx.array]:
        """Logits and hidden states of the head alone; ids and hidden as in a call, side by side."""
        out = self.head(hidden, self._embed(ids), cache)
        return self._logits(out), out

    def _read(
        self, ids: mx.array, cache: list[Any], inputs: dict[str, Any]
    ) -> tuple[mx.array, mx.array]:
        """Hidden states, which are kept as the layers keep them, and embeddings."""
        own, _, state = split(cache)
        embeds = inputs.get("inputs_embeds") if self._pictures else None
        hidden: mx.array
        if self._pictures:
            hidden = self.base.hidden(ids, own, **inputs)
        else:
            hidden = self.base.model(ids, own)
        self._hidden = hidden
        if state is not None:
            state[0] = _newest(hidden, state)
        return hidden, self._embed(ids) if embeds is None else embeds

    def _embed(self, ids: mx.array) -> mx.array:
        found: mx.array = self._text.model.embed_tokens(ids)
        return found

    def _logits(self, hidden: mx.array) -> mx.array:
        text = self._text
        out: mx.array
        if "lm_head" in text:
            out = text.lm_head(hidden)
        else:
            out = text.model.embed_tokens.as_linear(hidden)
        return out


def with_head_layer(make_layers: Callable[[], list[Any]]) -> Callable[[], list[Any]]:
    def make() -> list[Any]:
        own = make_layers()
        keeps = any(kind(layer) == STATE for layer in leaves(own))
        return [*own, KVCache(), *([ArraysCache(1)] if keeps else [])]

    return make


def split(cache: list[Any]) -> tuple[list[Any], Any, Any | None]:
    """The model's own layers, the head's KV, and the layer of the hidden state, where there is one."""
    if kind(cache[-1]) == STATE:
        return cache[:-2], cache[-2], cache[-1]
    return cache[:-1], cache[-1], None


def _newest(hidden: mx.array, state: Any) -> mx.array:
    """(rows, 1, width): after the newest token of each row; as it was for rows that took none."""
    if state.lengths is None:
        return hidden[:, -1:]
    lengths = state.lengths[:, None, None]
    newest = mx.take_along_axis(hidden, mx.maximum(lengths - 1, 0), axis=1)
    return newest if state[0] is None else mx.where(lengths > 0, newest, state[0])
