"""A row's caches, one per layer of the model: mlx-lm's and mlx-vlm's objects, told apart by class name.

They have no base class in common and no type stubs, so firn's annotations call them Any.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

MakeLayers = Callable[[], list[Any]]
"""Makes the empty caches of a new row."""
HOMES = frozenset({"mlx_lm.models.cache", "mlx_vlm.models.cache"})
"""Both define the cache classes that firn knows, by the same names and with the same fields."""


def kind(layer: Any) -> str:
    """The name of a cache class of these libraries; '' for any other class."""
    cls = type(layer)
    return cls.__name__ if cls.__module__ in HOMES else ""


def leaves(layers: Sequence[Any]) -> list[Any]:
    """Nested lists of caches, flattened in order."""
    flat: list[Any] = []
    for layer in layers:
        flat += leaves(layer.caches) if hasattr(layer, "caches") else [layer]
    return flat
