"""Whether a model's masks are better added to the scores than applied as booleans. Tried at load."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from typing import Any

import mlx.core as mx

from firn.backends.cuda import attention
from firn.models.decode.batch import why_not_batchable
from firn.models.decode.padding import in_blocks
from firn.models.decode.ragged import Columns
from firn.models.decode.rewind import ready
from firn.models.layers import MakeLayers
from firn.models.load.selfcheck import FAR, LENGTHS, distance, prefilled

TRIED_BLOCK = 8
"""Columns of a block in the trial."""


def gains_by_bias(model: Any, make_layers: MakeLayers) -> bool:
    """Whether attention is MLX's and accepts masks of numbers. Models that apply masks by hand may
    need booleans."""
    n, text = LENGTHS[0], [3 * j % 50 + 1 for j in range(LENGTHS[0] + 4)]
    cache = prefilled(model, make_layers(), text[:n])
    group = [1, 2] if why_not_batchable(cache) is None else [1]

    def logits(n_rows: int, *, has_bias: bool) -> mx.array:
        return _wide_logits(model, cache, [text[n:]] * n_rows, Columns(TRIED_BLOCK, has_bias))

    try:
        if attention.takes_all(partial(logits, group[-1], has_bias=False)):
            return False
        for n_rows in group:
            masked, biased = (logits(n_rows, has_bias=has_bias) for has_bias in (False, True))
            if distance(masked, biased) > FAR:
                return False
    except Exception:  # any model code runs here; a request would have failed instead
        return False
    return True


def _wide_logits(
    model: Any, cache: list[Any], fed: Sequence[Sequence[int]], columns: Columns
) -> mx.array:
    layers = copy.deepcopy(cache)
    if len(fed) > 1:
        layers = [type(layer).merge([layer] * len(fed)) for layer in layers]
    ids = mx.array([list(f) for f in fed])
    logits: mx.array = model(ids, cache=in_blocks(ready(layers, columns), columns))
    return logits
