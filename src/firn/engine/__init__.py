"""The engine thread: scheduler, prefill, decode, recovery, memory budget. Does not use MLX."""

from firn.engine.budget import Budget, RowCost
from firn.engine.engine import Engine
from firn.engine.parts import EngineLimits, EngineParts
from firn.engine.thinning import recipes_of

__all__ = ["Budget", "Engine", "EngineLimits", "EngineParts", "RowCost", "recipes_of"]
