"""When a tier writes while rows decode: so seldom that it slows them down by a hundredth.

A write takes processor time, memory bandwidth and the GIL from the engine. How much longer a decode step
takes meanwhile depends on the device and the disk, so it is measured. Writes come in spells with pauses
between them, and the steps of a spell are compared with those of the pause before it:

    # | pause | spell |      pause      | spell |      extra time of a spell = cost * time of steps alone

Owner: the engine thread, through a tier's client.
"""

from __future__ import annotations

from collections import deque
from statistics import median

from firn.cache.planning.estimates import Samples

MAX_COST = 0.01
"""By how much decoding may be slowed down."""
MAX_WAIT_S = 10.0
"""Where records have waited for longer, decoding may be slowed down by more: by four times as much where
they have waited for twice as long. Memory is bounded, and a crash should lose seconds."""
LEAST_STEPS, LONG_STEPS = 8, 64
"""Steps of a pause, at least, and of a spell; the second for spells that disturb nobody."""


class WritePace:
    def __init__(self) -> None:
        self._in_spell = False
        self._steps_s: deque[float] = deque(maxlen=LONG_STEPS)
        """Of the spell or the pause: how long the last steps took, those of a spell only if it wrote."""
        self._total_s = 0.0
        """All of its steps together: a pause with nothing to write may last for hours."""
        self._pause_step_s = 0.0
        self._spell_s = 0.0
        self._slowdown = Samples(1.0)
        self._last: float | None = None

    @property
    def slowdown(self) -> float:
        """How much longer a step takes while something is written."""
        return max(self._slowdown.value, 1.0)

    def tick(self, now: float, *, is_writing: bool) -> None:
        """A decode step has ended."""
        if self._last is not None and (is_writing or not self._in_spell):
            self._steps_s.append(now - self._last)
            self._total_s += now - self._last
        self._last = now

    def disturbed(self) -> None:
        """The engine does something else: the time until the next step says nothing."""
        self._last = None

    def may_write(self, waited_s: float) -> bool:
        """waited_s: how long the next record has waited."""
        if self._in_spell and len(self._steps_s) >= self._n_spell:
            self._slowdown.see(median(self._steps_s) / max(self._pause_step_s, 1e-9))
            self._spell_s = self._total_s
            self._change()
        elif not self._in_spell and self._pause_is_over(waited_s):
            self._pause_step_s = median(self._steps_s)
            self._change()
        return self._in_spell

    def _change(self) -> None:
        """From a spell to a pause, or back."""
        self._in_spell = not self._in_spell
        self._steps_s.clear()
        self._total_s = 0.0

    @property
    def _n_spell(self) -> int:
        """Steps of a spell. Short ones, as a rule, so that no reply bears the cost of a long one."""
        is_harmless = self._slowdown.known and self.slowdown <= 1.0 + MAX_COST
        return LONG_STEPS if is_harmless else LEAST_STEPS

    def _pause_is_over(self, waited_s: float) -> bool:
        cost = MAX_COST * max(waited_s / MAX_WAIT_S, 1.0) ** 2
        extra_s = self._spell_s * (1 - 1 / self.slowdown)
        pause_s = extra_s * (1 + 1 / cost) - self._spell_s
        return len(self._steps_s) >= LEAST_STEPS and self._total_s >= pause_s
