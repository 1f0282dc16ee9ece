"""Starting the device on a step's first layers while the host still builds the others, or MLX still
looks at them: it walks all of a graph before it launches any of it.

A plain step is built while the device computes the one before it. A step with drafts has none before
it: the drafts follow from its tokens. Built as a whole, it would leave the device idle that long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import mlx.core as mx


@contextmanager
def in_stretches(layers: Sequence[Any], *, n_layers: int) -> Iterator[None]:
    """While the model is called with these caches, dispatch every `n_layers` of them as they are built;
    0: none."""
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
    """Dispatch a step that is built, every `n_layers` of it at once; 0: as a whole."""
    for layer in layers[n_layers - 1 : -1 : n_layers] if n_layers else ():
        mx.async_eval(layer.keys)
    mx.async_eval(logits)


def _update_and_dispatch(update: Callable[..., Any], *arrays: Any, **more: Any) -> Any:
    seen = update(*arrays, **more)
    mx.async_eval(seen)
    return seen
