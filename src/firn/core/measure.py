"""One way to learn a quantity from measurements: the middle of the newest few.

A single slow moment has no effect, and a first step that compiled its kernels is soon forgotten. What is
not measured any more can be forgotten bit by bit, the largest first: a machine can be slow by accident,
but not fast.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Iterable

N_KEPT = 9
"""Measurements that are kept of one quantity."""
N_SURE = 3
"""With this many, what was believed before counts for nothing."""
ONE_PIECE_S = 0.25
"""What comes within this time was not written one by one."""
CONTRADICTION = 3.0
"""Measurements that differ by more than this factor are not from the same machine."""


class Median:
    """The median of the newest measurements of one quantity, the lower of two; or what `of` makes of
    them."""

    __slots__ = ("_first", "_is_saved", "_known", "_of", "_values")

    def __init__(
        self,
        first: float = 0.0,
        *,
        kept: int = N_KEPT,
        of: Callable[[Iterable[float]], float] = statistics.median_low,
    ) -> None:
        """first: the estimate before the first measurement."""
        self._first = first
        self._of = of
        self._values: deque[float] = deque(maxlen=kept)
        self._known: float | None = None
        self._is_saved = False

    def __len__(self) -> int:
        return len(self._values)

    @property
    def is_sure(self) -> bool:
        return len(self._values) >= N_SURE

    @property
    def value(self) -> float:
        """The estimate."""
        if not self._values:
            return self._first
        if self._known is None:
            self._known = self._of(self._values)
        return self._known

    def beside(self, prior: float) -> float:
        """The estimate, if without measurements it were `prior`, which counts as the few that lack."""
        if self.is_sure:
            return self.value
        return statistics.median([*self._values, *[prior] * (N_SURE - len(self._values))])

    def add(self, value: float) -> None:
        if self._is_saved:
            self._is_saved = False
            if contradict(value, self.value):
                self._values.clear()
        self._values.append(value)
        self._known = None

    def age(self) -> None:
        """Forget the largest: what made it large may be over."""
        if self._values:
            self._values.remove(max(self._values))
            self._known = None

    def sum_up(self) -> None:
        """Let all that was measured so far count as one measurement."""
        if self._values:
            value = self.value
            self._values.clear()
            self._values.append(value)
            self._known = None

    def restore(self, value: float) -> None:
        """Begin with what an earlier process learned: one measurement, which the first new one may
        contradict."""
        if not self._values:
            self.add(value)
            self._is_saved = True


def contradict(one: float, other: float) -> bool:
    return not 1 / CONTRADICTION < (one + 1e-12) / (other + 1e-12) < CONTRADICTION


def writing_speed(n_tokens: int, since_first_s: float) -> float | None:
    """Tokens per second without the first token, whose time is that of the prefill.

    None for a reply of one piece, as drafts and ends make them: its speed would be nonsense.
    """
    if n_tokens < 2 or since_first_s < ONE_PIECE_S:
        return None
    return (n_tokens - 1) / since_first_s
