"""Starts the device on a step's first layers before the rest of the step is ready.

The host may still be building the other layers, or MLX may still be traversing them: it walks all
of a graph before it launches any of it.

A plain step is built while the device computes the one before it. A step with drafts cannot overlap
like that, because its drafts follow from the tokens of the step before. Built as a whole, it would
leave the device idle meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import mlx.core as mx


@contextmanager
def dispatched_early(layers: Sequence[Any], *, n_layers: int) -> Iterator[None]:
    """Inside the block, a call of the model with these caches dispatches each run of `n_layers`
    layers as soon as it is built; 0: none."""
    attending = [layer for layer in layers if hasattr(layer, "update_and_fetch")]
    last_ones = attending[n_layers - 1 :: n_layers] if n_layers else []
    for layer in last_ones:
        layer.update_and_fetch = partial(_update_and_dispatch, layer.update_and_fetch)
    try:
        yield
    finally:
        for layer in last_ones:
            del layer.update_and_fetch


def dispatch(logits: mx.array, layers: Sequence[Any], *, n_layers: int) -> None:
    """Dispatch a step that has been built, `n_layers` layers at a time; 0: as a whole."""
    for layer in layers[n_layers - 1 : -1 : n_layers] if n_layers else ():
        mx.async_eval(layer.keys)
    mx.async_eval(logits)


def _update_and_dispatch(update: Callable[..., Any], *arrays: Any, **more: Any) -> Any:
    seen = update(*arrays, **more)
    mx.async_eval(seen)
    return seen
