"""Bounds of sampling parameters: one table for the APIs, the flags and models' own files. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

INT_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True)
class Bound:
    """[low, high], or (low, high] if `above_low`. whole: integers only."""

    low: float
    high: float
    above_low: bool = False
    whole: bool = False

    def fault(self, value: object) -> str | None:
        """What is wrong with the value; None: it is valid."""
        kinds = (int,) if self.whole else (int, float)
        if type(value) not in kinds:  # a boolean is not a number
            return "must be an integer" if self.whole else "must be a number"
        assert isinstance(value, int | float)
        inside = self.low < value if self.above_low else self.low <= value
        if not (inside and value <= self.high and math.isfinite(value)):
            least = f"above {self.low:g}" if self.above_low else f"at least {self.low:g}"
            return f"must be {least} and at most {self.high:g}"
        return None


SAMPLING: Mapping[str, Bound] = MappingProxyType(
    {
        "temperature": Bound(0, 100),
        "top_p": Bound(0, 1, above_low=True),
        "top_k": Bound(-1, INT_MAX, whole=True),
        "min_p": Bound(0, 1),
        "repetition_penalty": Bound(0, 100, above_low=True),
        "presence_penalty": Bound(-2, 2),
        "frequency_penalty": Bound(-2, 2),
    }
)
"""Keyed by the fields of `core.values.Sampling`. vLLM's clients send a top_k of -1 for off."""

GREEDY_BELOW = 1e-5
"""Dividing logits by a smaller temperature would overflow, and pick the likeliest token anyway."""
