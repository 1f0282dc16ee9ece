"""A model with its own prediction head: one more layer, which predicts the token after the next.

    hidden state after token t-1, embedding of token t  ->  head  ->  prediction of token t+1

The head's KV is one more cache of plain attention, after the model's own. It is batched, rewound,
stored and restored like them, and written with them or a little later (`models.backlog`). In models
with recurrent layers, the hidden state that the head continues from is a layer, too:

    layers   [the model's ...][the head's KV][the hidden state after the newest token]

Models of plain attention alone are stored by block, and every block would need a hidden state of
its own: after a restored prefix the newest token is read once more instead (`look_back`).

Owner: the engine thread.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx import nn
from mlx_lm.models.base import create_attention_mask
from mlx_lm.models.cache import ArraysCache, KVCache

from firn.models.decode.rewind import TRIMMED
from firn.models.layers import MakeLayers, kind, leaves
from firn.models.vision.vision_model import VisionModel

STATE = "ArraysCache"


class PredictionHead(nn.Module):  # type: ignore[misc]
    """The head that DeepSeek's and Qwen's models have in common, under different names."""

    def __init__(self, layer: nn.Module, *, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.embed_norm = nn.RMSNorm(hidden_size, eps=eps)
        self.hidden_norm = nn.RMSNorm(hidden_size, eps=eps)
        self.join = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        self.layer = layer
        self.norm = nn.RMSNorm(hidden_size, eps=eps)

    def __call__(self, hidden: mx.array, embeds: mx.array, cache: Any) -> mx.array:
        """The hidden states that predictions are made from: (rows, tokens, width)."""
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
        """The layers below the logits."""
        return self._text.model

    @property
    def _text(self) -> Any:
        """The language model, without what reads pictures."""
        if self._pictures:
            return self.base.model.language_model
        return self.base.get("language_model", self.base)

    @property
    def hidden(self) -> mx.array:
        """The hidden states of the last call: (rows, tokens, width)."""
        assert self._hidden is not None
        return self._hidden

    def __call__(
        self,
        ids: mx.array,
        cache: list[Any],
        *,
        mtp_hidden: mx.array | None = None,
        **arguments: Any,
    ) -> mx.array:
        """Model and head. mtp_hidden: (rows, width), the hidden states before these tokens, if no layer
        keeps them. arguments: what a vision model takes besides ids."""
        head_kv, first = split(cache)[1], self.before(cache, mtp_hidden)
        hidden, embeds = self._read(ids, cache, arguments)
        if first is None:
            first = mx.zeros_like(hidden[:, 0])
        before = mx.concatenate([first[:, None].astype(hidden.dtype), hidden[:, :-1]], axis=1)
        self.head(before, embeds, head_kv)
        # Nothing else depends on the head's keys; left uncomputed, they would make the graph grow.
        logits: mx.array = mx.depends(self._logits(hidden), [head_kv.keys, head_kv.values])
        return logits

    def without_head(self, ids: mx.array, cache: list[Any], **arguments: Any) -> mx.array:
        """The model alone: the head's KV lags behind until `feed_head` reads these tokens, too."""
        hidden, _ = self._read(ids, cache, arguments)
        return self._logits(hidden)

    def feed_head(self, ids: mx.array, before: mx.array, head_cache: Any) -> None:
        """Let the head read tokens (rows, n) that the model has read; before: (rows, n, width), the
        hidden states before them. Only the head's keys and values are computed, no predictions."""
        self.head(before, self._embed(ids), head_cache)

    def before(self, cache: list[Any], mtp_hidden: mx.array | None) -> mx.array | None:
        """(rows, width): the hidden states after the newest tokens; None where they are not known."""
        state = split(cache)[2]
        return mtp_hidden if state is None or state[0] is None else state[0][:, 0]

    def look_back(self, token: int, cache: list[Any]) -> mx.array | None:
        """(1, 1, width): the hidden state after a lone row's newest token, computed once more; None if
        its layers cannot take that token back."""
        own, _, state = split(cache)
        hidden: mx.array | None
        if state is not None:
            hidden = state[0]
            return hidden
        if self._pictures or not all(kind(c) in TRIMMED and c.offset for c in own):
            return None
        for layer in own:
            layer.trim(1)
        hidden = self.base.model(mx.array([[token]]), own)
        return hidden

    def predict(self, ids: mx.array, hidden: mx.array, cache: Any) -> tuple[mx.array, mx.array]:
        """Logits and hidden states of the head alone, for tokens and the hidden states before them."""
        out = self.head(hidden, self._embed(ids), cache)
        return self._logits(out), out

    def _read(
        self, ids: mx.array, cache: list[Any], arguments: dict[str, Any]
    ) -> tuple[mx.array, mx.array]:
        """Hidden states and embeddings. Writes the newest state to its layer, if there is one."""
        own, _, state = split(cache)
        embeds = arguments.get("inputs_embeds") if self._pictures else None
        hidden: mx.array
        if self._pictures:
            hidden = self.base.hidden(ids, own, **arguments)
        else:
            hidden = self.base.model(ids, own)
        self._hidden = hidden
        if state is not None:
            state[0] = _newest(hidden, state)
        return hidden, self._embed(ids) if embeds is None else embeds

    def _embed(self, ids: mx.array) -> mx.array:
        embeds: mx.array = self._text.model.embed_tokens(ids)
        return embeds

    def _logits(self, hidden: mx.array) -> mx.array:
        text = self._text
        logits: mx.array
        if "lm_head" in text:
            logits = text.lm_head(hidden)
        else:
            logits = text.model.embed_tokens.as_linear(hidden)
        return logits


def with_head_layer(make_layers: MakeLayers) -> MakeLayers:
    """`make_layers` with the head's layers at the end."""

    def make() -> list[Any]:
        own = make_layers()
        keeps = any(kind(layer) == STATE for layer in leaves(own))
        return [*own, KVCache(), *([ArraysCache(1)] if keeps else [])]

    return make


def split(cache: list[Any]) -> tuple[list[Any], Any, Any | None]:
    """The model's own layers, the head's KV, and the layer of the hidden state, if there is one."""
    if kind(cache[-1]) == STATE:
        return cache[:-2], cache[-2], cache[-1]
    return cache[:-1], cache[-1], None


def _newest(hidden: mx.array, state: Any) -> mx.array:
    """(rows, 1, width): the state after each row's newest token; unchanged for rows that took none."""
    if state.lengths is None:
        return hidden[:, -1:]
    lengths = state.lengths[:, None, None]
    newest = mx.take_along_axis(hidden, mx.maximum(lengths - 1, 0), axis=1)
    return newest if state[0] is None else mx.where(lengths > 0, newest, state[0])
