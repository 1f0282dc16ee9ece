"""What is learnt from measurements: the middle of the newest few, whatever a single slow moment was."""

from __future__ import annotations

import statistics
from collections import deque

N_KEPT = 9
"""Measurements that are kept of one quantity."""
N_SURE = 3
"""With this many, what was believed before counts for nothing."""
ONE_PIECE_S = 0.25
"""What comes within this time was not written one by one."""


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
        """The lower of two middle values: a machine can be slow by accident, but not fast."""
        if self._median is None:
            self._median = statistics.median_low(self._values)
        return self._median


def writing_speed(n_tokens: int, since_first_s: float) -> float | None:
    """Tokens per second without the first token, whose time is that of the prefill.

    None for a reply of one piece, as drafts and ends make them: its speed would be nonsense.
    """
    if n_tokens < 2 or since_first_s < ONE_PIECE_S:
        return None
    return (n_tokens - 1) / since_first_s
