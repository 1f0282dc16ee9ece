"""The engine thread: scheduler, prefill, decode, recovery, memory budget. Does not use MLX."""

from firn.engine.budget import Budget, RowCost
from firn.engine.chunks import ChunkSizes
from firn.engine.engine import Engine
from firn.engine.inflight import InFlight, RestoreFailed
from firn.engine.limits import EngineLimits
from firn.engine.parts import EngineParts
from firn.engine.preparation import IdleWork, NoPreparation, Preparer
from firn.engine.scheduler import chunk_end
from firn.engine.sequence import AS_IT_IS, AsItIs, PrefillTask, Sequence

__all__ = [
    "AS_IT_IS",
    "AsItIs",
    "Budget",
    "ChunkSizes",
    "Engine",
    "EngineLimits",
    "EngineParts",
    "IdleWork",
    "InFlight",
    "NoPreparation",
    "PrefillTask",
    "Preparer",
    "RestoreFailed",
    "RowCost",
    "Sequence",
    "chunk_end",
]
