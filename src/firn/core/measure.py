"""One way to learn a quantity from measurements: the middle of the newest few, beside a prior.

A single slow moment has no effect. What is not measured any more can be forgotten bit by bit, the
largest first: a machine can be slow by accident, but not fast.
"""

from __future__ import annotations

import statistics
from collections import deque

N_KEPT = 9
"""Measurements that are kept of one quantity."""
N_SURE = 3
"""With this many, what was believed before counts for nothing."""


class Median:
    """The median of the newest measurements of one quantity; a prior stands in while there are few."""

    __slots__ = ("_median", "_values")

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=N_KEPT)
        self._median: float | None = None

    def __len__(self) -> int:
        return len(self._values)

    @property
    def is_sure(self) -> bool:
        return len(self._values) >= N_SURE

    def add(self, value: float) -> None:
        self._values.append(value)
        self._median = None

    def age(self) -> None:
        """Forget the largest: what made it large may be over."""
        if self._values:
            self._values.remove(max(self._values))
            self._median = None

    def value(self, prior: float) -> float:
        """The estimate, if without measurements it were `prior`."""
        if self.is_sure:
            return self.middle
        return statistics.median([*self._values, *[prior] * (N_SURE - len(self._values))])

    @property
    def middle(self) -> float:
        """The lower of two middle values. There must be a measurement."""
        if self._median is None:
            self._median = statistics.median_low(self._values)
        return self._median
