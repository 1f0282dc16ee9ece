"""In which form a device computes a model's weights: as they are stored, unless it knows better."""

from __future__ import annotations

from typing import Any, Protocol


class WeightForm(Protocol):
    def widen(self, model: Any) -> bool:
        """Widen the weights of a model that was just read, if that is faster; whether it was done."""
        ...

    def rescue(self, model: Any) -> bool:
        """The model fails on this device: change its weights so that it may run. False: no way."""
        ...


class AsStored:
    def widen(self, model: Any) -> bool:
        return False

    def rescue(self, model: Any) -> bool:
        return False


AS_STORED = AsStored()
