"""Several rows' prompts read in one pass.

mlx-lm's batched cache holds the rows' pasts right-justified. The new tokens of all rows begin at
the next column, and shorter ones are padded at the end. So each row's tokens are contiguous, and
the row's own caches become views of them, without a copy.

    row 0   . . p p p | n n n n n        row 0 holds columns [2, 10)
    row 1   p p p p p | n n . . .        row 1 holds columns [0, 7)

Recurrent layers have a state for each row, and mlx-lm's tell their models which tokens are padding:
those do not change it.

Owner: the engine thread, through the runner.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache, KVCache

from firn.core.values import TokenArray
from firn.models.decode.batch import Row
from firn.models.decode.kv_growth import ShapeBuckets
from firn.models.layers import MakeLayers
from firn.models.load.selfcheck import FAR, LENGTHS, distance, prefilled
from firn.models.model_arguments import PreparePass

PASTS = (5, 0, 3)
"""Tokens already read by each of the rows that a model is tried with."""


class BatchedPrefill:
    """Reads several rows at once. The first time, it checks that the model computes that correctly."""

    def __init__(self, model: Any, make_layers: MakeLayers) -> None:
        self._model = model
        self._make_layers = make_layers
        self._is_checked = False

    def can_read(self) -> bool:
        """Whether the model's layers allow it."""
        return can_batch(self._make_layers())

    def read(
        self,
        rows: Sequence[Row],
        tokens: Sequence[TokenArray],
        *,
        buckets: ShapeBuckets,
        prepare: PreparePass,
    ) -> None:
        """tokens: what each row consumes. Dispatched, not awaited. Raises ValueError if the model
        computes padded passes incorrectly."""
        if not self._is_checked:
            fault = batched_prefill_fault(self._model, self._make_layers)
            if fault is not None:
                raise ValueError(fault)
            self._is_checked = True
        step = PaddedRows(rows, tokens, width_of=buckets.width)
        prepare(len(rows) * step.width)
        self._model(step.feed, cache=step.layers)
        step.share_out()
        mx.async_eval([layer.state for row in rows for layer in row.layers])


def can_batch(layers: Sequence[Any]) -> bool:
    """Whether all layers are plain attention or states: padding would take up space in a window. Whether
    the model's states heed it, a trial shows."""
    return bool(layers) and all(type(layer) in (KVCache, ArraysCache) for layer in layers)


def batched_prefill_fault(model: Any, make_layers: MakeLayers) -> str | None:
    """Why rows come out of a padded pass differently than alone; None if they do not.

    Batched decode does not prove this, because its mask has one token per row.
    """
    worst = min(_difference(model, make_layers, seed=seed) for seed in range(2))
    return f"rows come out different in a padded pass ({worst:.1f})" if worst > FAR else None


def _difference(model: Any, make_layers: MakeLayers, *, seed: int) -> float:
    texts = [[(7 * i + 3 * j + seed) % 50 + 1 for j in range(n)] for i, n in enumerate(LENGTHS)]
    rows, alone = [], []
    for text, n_past in zip(texts, PASTS, strict=True):
        alone.append(model(mx.array([text]), cache=make_layers())[0, -1])
        row = Row(make_layers(), n_past)
        rows.append(row)
        if n_past:
            prefilled(model, row.layers, text[:n_past])
    step = PaddedRows(rows, [np.array(t[n:-1]) for t, n in zip(texts, PASTS, strict=True)])
    model(step.feed, cache=step.layers)
    step.share_out()
    return max(
        distance(logits, model(mx.array([text[-1:]]), cache=row.layers)[0, -1])
        for logits, text, row in zip(alone, texts, rows, strict=True)
    )


class PaddedRows:
    """One pass: run `feed` through the model with `layers`, then call `share_out`."""

    def __init__(
        self,
        rows: Sequence[Row],
        tokens: Sequence[np.ndarray[Any, Any]],
        *,
        width_of: Callable[[int], int] = lambda n_new: n_new,
    ) -> None:
        """tokens: what each row consumes. width_of: the width of a pass whose longest row has so many
        new tokens."""
        self._rows = rows
        self._n_new = [len(t) for t in tokens]
        self._n_past = max(row.n_tokens for row in rows)
        self.width = width_of(max(self._n_new))
        ids = np.zeros((len(rows), self.width), dtype=np.int32)
        for i, new in enumerate(tokens):
            ids[i, : len(new)] = new
        self.feed = mx.array(ids)
        each = zip(*(row.layers for row in rows), strict=True)
        self.layers = [self._merged(layers) for layers in each]

    def _merged(self, layers: Sequence[Any]) -> Any:
        batch = type(layers[0]).merge(list(layers))
        if isinstance(batch, ArraysCache):
            batch.prepare(lengths=self._n_new)
        return batch

    def share_out(self) -> None:
        """Give each row its part of the batched caches."""
        for i, (row, n_new) in enumerate(zip(self._rows, self._n_new, strict=True)):
            start, end = self._n_past - row.n_tokens, self._n_past + n_new
            for lone, batch in zip(row.layers, self.layers, strict=True):
                if isinstance(lone, ArraysCache):
                    lone.cache = [None if a is None else a[i : i + 1] for a in batch.cache]
                    continue
                lone.keys = batch.keys[i : i + 1, :, start:end]
                lone.values = batch.values[i : i + 1, :, start:end]
                lone.offset = end - start
            row.n_tokens += n_new
