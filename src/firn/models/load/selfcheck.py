"""Does this model give the same answer in a batch as alone? Tried at load.

Some architectures of mlx-lm cannot be batched, without saying so: padded rows come out wrong, or
the step raises. Three short rows of unequal length are decoded alone and together; if they differ
by far more than rounding, the model is served row by row.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from firn.models.decode.sampling import to_host
from firn.models.faults import first_line
from firn.models.layers import MakeLayers

LENGTHS = (13, 4, 9)
FAR = 0.3
"""In standard deviations of the logits. Rounding is far less; wrong rows are off by 0.9 or more."""
N_TRIALS = 2

WRONG_WHEN_LONG = {
    "minimax_m3_vl": "key blocks are cut over padding, which short rows do not show",
}
"""Architectures whose batches go wrong only at lengths that are too long to try at load."""
CHUNKS_MATTER = {
    "plamo3": "its prefill mask is one token wider than the window it keeps",
    "phi3small": "its sparse layers look to the end of their block",
}
"""Architectures whose results depend on chunk boundaries: records are reused only at chunk ends."""


def batch_fault(model: Any, make_layers: MakeLayers, architecture: str) -> str | None:
    """Why rows cannot be decoded together; None if they can."""
    if architecture in WRONG_WHEN_LONG:
        return WRONG_WHEN_LONG[architecture]
    worst = []
    for trial in range(N_TRIALS):
        try:
            worst.append(_difference(model, make_layers, seed=trial))
        except (ValueError, RuntimeError, TypeError, IndexError) as e:
            return f"a batched step of mlx-lm's {architecture} fails: {first_line(e)}"
    # A near-tie in expert routing may flip one trial; a wrong mask is off in all of them.
    if min(worst) > FAR:
        return f"rows of mlx-lm's {architecture} come out different in a batch ({min(worst):.1f})"
    return None


def _difference(model: Any, make_layers: MakeLayers, *, seed: int) -> float:
    """The largest difference between the logits of a row alone and in a batch."""
    rows = [[(7 * i + 3 * j + seed) % 50 + 1 for j in range(n)] for i, n in enumerate(LENGTHS)]
    caches = [prefilled(model, make_layers(), ids[:-1]) for ids in rows]
    alone = [
        model(mx.array([ids[-1:]]), cache=copy.deepcopy(c))[0, -1]
        for ids, c in zip(rows, caches, strict=True)
    ]
    merged = [type(same[0]).merge(list(same)) for same in zip(*caches, strict=True)]
    together = model(mx.array([ids[-1:] for ids in rows]), cache=merged)[:, -1]
    return max(distance(a, b) for a, b in zip(alone, together, strict=True))


def distance(alone: mx.array, together: mx.array) -> float:
    """The distance between rows of logits. Infinite if they rule out (-inf) different tokens."""
    a, b = alone.astype(mx.float32), together.astype(mx.float32)
    possible = mx.isfinite(a)
    a = mx.where(possible, a, 0.0)
    far = mx.max(mx.abs(a - mx.where(possible, b, 0.0))) / (mx.std(a) + 1e-6)
    same_places = mx.all(possible == mx.isfinite(b))
    # A NaN in one of them makes the finite places differ, so the distance is infinite.
    return float(to_host(far)) if to_host(same_places) else math.inf


def prefilled(model: Any, layers: list[Any], ids: Sequence[int]) -> list[Any]:
    model(mx.array([list(ids)]), cache=layers)
    mx.eval([layer.state for layer in layers])
    return layers
