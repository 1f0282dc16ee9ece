"""What the engine thread works with. The thread builds it when it starts."""

from __future__ import annotations

from dataclasses import dataclass, field

from firn.core.ports import EngineCache, LiveRow, Runner
from firn.engine.budget import Budget
from firn.engine.limits import EngineLimits
from firn.engine.preparation import NoPreparation, Preparer


@dataclass(frozen=True, slots=True)
class EngineParts:
    """Owner: the engine thread."""

    runner: Runner[LiveRow]
    cache: EngineCache
    budget: Budget
    limits: EngineLimits
    preparer: Preparer = field(default_factory=NoPreparation)

    def set_capacity(self, nbytes: int) -> None:
        """Set how much memory live requests and stored records may take together."""
        is_less = nbytes < self.budget.capacity_nbytes
        self.budget.capacity_nbytes = nbytes
        self.cache.set_room(self.budget.free_nbytes())
        if is_less:  # other programs shall have what was freed
            self.runner.free_memory()
