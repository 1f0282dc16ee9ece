"""Paces a tier's writes while rows decode, so that they slow decoding by at most 1%.

A write takes processor time, memory bandwidth and the GIL from the engine. How much longer a decode step
takes meanwhile depends on the device and the disk, so it is measured. Writes come in spells with pauses
between them, and the steps of a spell are compared with those of the pause that follows:

    # | spell |.....|    pause    | spell |.....| pause     .. writes begun before are finishing
    #   writing          alone                              extra time of writing = cost * time alone

Means are compared: a write that holds up one step in twenty does not show in a median.

Owner: the engine thread, through a tier's spill queue.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from firn.core.measure import Median

N_KEPT = 5
"""Spells of which the mean slowdown counts."""
MAX_COST = 0.01
"""Largest share by which writes may slow decoding."""
MAX_WAIT_S = 10.0
"""Once records have waited longer than this, writes may slow decoding more: four times as much at
twice the wait. Memory is bounded, and a crash should lose no more than seconds."""
LEAST_STEPS, LONG_STEPS = 8, 64
"""Minimum steps of a pause, and steps of a spell: LONG_STEPS if spells do not slow decoding."""
MAX_SLOWDOWN = 4.0
"""Cap on the slowdown measured in one spell: beyond this, something else held up the engine."""


@dataclass(slots=True)
class _Steps:
    n: int = 0
    total_s: float = 0.0

    def add(self, seconds: float) -> None:
        self.n += 1
        self.total_s += seconds

    @property
    def mean_s(self) -> float:
        return self.total_s / max(self.n, 1)


class WritePace:
    def __init__(self) -> None:
        self._in_spell = True
        self._is_measured = False
        """Whether the slowdown of the last spell has been measured."""
        self._writing, self._alone = _Steps(), _Steps()
        """Steps with a write under way since the spell began, and without one since it ended."""
        self._slowdown = Median(1.0, kept=N_KEPT, of=fmean)
        self._last: float | None = None

    @property
    def slowdown(self) -> float:
        """The time of a step with a write under way, relative to one without."""
        return max(self._slowdown.value, 1.0)

    def tick(self, now: float, *, is_writing: bool) -> None:
        """A decode step has ended."""
        if self._last is not None:
            (self._writing if is_writing else self._alone).add(now - self._last)
        self._last = now

    def disturbed(self) -> None:
        """The engine is doing something else: the time until the next step must not be counted."""
        self._last = None

    def may_write(self, waited_s: float) -> bool:
        """Whether to write the next record now. waited_s: how long it has waited."""
        if self._in_spell:
            if self._writing.n >= self._n_spell:
                self._in_spell, self._alone = False, _Steps()
        elif self._alone.n >= LEAST_STEPS:
            self._measure()
            if self._pause_is_over(waited_s):
                self._in_spell, self._is_measured, self._writing = True, False, _Steps()
        return self._in_spell

    def _measure(self) -> None:
        if not self._is_measured:
            slowdown = self._writing.mean_s / max(self._alone.mean_s, 1e-9)
            self._slowdown.add(min(slowdown, MAX_SLOWDOWN))
            self._is_measured = True

    @property
    def _n_spell(self) -> int:
        """Steps of a spell: normally few, so that no one reply bears the cost of a long spell."""
        is_harmless = bool(self._slowdown) and self.slowdown <= 1.0 + MAX_COST
        return LONG_STEPS if is_harmless else LEAST_STEPS

    def _pause_is_over(self, waited_s: float) -> bool:
        cost = MAX_COST * max(waited_s / MAX_WAIT_S, 1.0) ** 2
        extra_s = self._writing.total_s * (1 - 1 / self.slowdown)
        pause_s = extra_s * (1 + 1 / cost) - self._writing.total_s
        return self._alone.total_s >= pause_s
