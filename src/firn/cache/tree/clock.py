"""The clock that times of use are read from: the wall clock, as long as it does not go back.

Times of use outlive the process, because tiers keep them, and several processes compare theirs in one
folder. So they are wall times. But what is used now must come after all that was used before, also
after a clock that was ahead is set right, and after a start with a clock that is behind: while the
wall clock is behind the latest time of use, this clock continues from there, at the same pace.

A time that is more than AHEAD_S ahead is nobody's to compare with: no tier believes it. If this clock
was that far ahead itself, tiers are told the right time from then on.

Owner: the tree.
"""

from __future__ import annotations

import math

from firn.cache.tiers import AHEAD_S
from firn.core.clock import Clock

TICK_S = 0.001
"""While the wall clock is behind, two uses are at least this far apart."""


class UseClock:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._latest = -math.inf
        self._read_at = clock.elapsed()
        self._shift_s = 0.0
        """How far times of use are ahead of those that tiers are told."""

    def now(self) -> float:
        read_at, wall = self._clock.elapsed(), self._clock.wall() + self._shift_s
        passed_s, self._read_at = read_at - self._read_at, read_at
        if wall < self._latest:
            behind_s = self._latest + max(passed_s, TICK_S) - wall
            self._shift_s += behind_s if behind_s > AHEAD_S else 0.0
            wall += behind_s
        self._latest = wall
        return wall

    def observe(self, stamp: float) -> bool:
        """Somebody has used a record at this time, by a tier. False: that cannot be."""
        if stamp >= self._clock.wall() + AHEAD_S:
            return False
        self._latest = max(self._latest, self.of_stamp(stamp))
        return True

    def stamp_of(self, used_at: float) -> float:
        """The time that tiers are told."""
        return used_at - self._shift_s

    def of_stamp(self, stamp: float) -> float:
        return stamp + self._shift_s
