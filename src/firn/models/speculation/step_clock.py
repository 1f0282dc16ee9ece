"""Measures how long each step takes: from reading the tokens before it to reading its own.

    plain  plain  plain | wide  wide  wide | plain  plain
                  ^ read early: nothing     ^ late: two steps are built before it is read
                    else is in flight

The delays at both ends of an episode of wide steps are the cost of changing to drafts and back.

Owner: the engine thread, through the speculation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from firn.models.decode.batch import Group, StepInFlight, TakenTokens
from firn.models.decode.steps import PlainInFlight
from firn.models.speculation.gate import Allowance
from firn.models.speculation.step_times import StepTimes


@dataclass(eq=False, slots=True)
class Pace:
    """When a group's newest tokens were read. n_wide: wide steps since the last plain one. drained_s:
    how much longer that plain step took because it was read early, to draft; None if it was not."""

    read_at: float
    n_wide: int = 0
    drained_s: float | None = None


class StepClock:
    def __init__(self, times: StepTimes, allowance: Allowance, clock: Callable[[], float]) -> None:
        self._times = times
        self._allowance = allowance
        self._clock = clock
        self.paces: dict[int, Pace] = {}
        """By the id() of the group. Missing where the device has computed something else since."""
        self.is_draining = False

    def read(self, group: Group, taken: Sequence[TakenTokens], step: StepInFlight) -> None:
        """A step's tokens were read: record how long it took, and settle its gain or loss."""
        now, n_rows = self._clock(), len(group.seats)
        pace = self.paces.get(id(group))
        if pace is None:
            self.paces[id(group)] = Pace(now)
            return
        seconds, pace.read_at = now - pace.read_at, now
        times, allowance = self._times, self._allowance
        if not isinstance(step, PlainInFlight):
            pace.n_wide += 1
            price = times.saw_wide(n_rows, step.width, seconds, is_new=step.is_new)
            if price is not None:
                n_taken = sum(len(t.tokens) for t in taken if t.row.group is group)
                allowance.settle(n_taken / max(len(group.rows), 1) - price)
            return
        allowance.earn()
        has_changed = pace.n_wide or pace.drained_s is not None
        if has_changed and times.knows(n_rows):
            extra_s = (pace.drained_s or 0.0) + seconds - times.plain_s(n_rows)
            allowance.settle(-times.saw_episode(n_rows, pace.n_wide, extra_s))
        elif self.is_draining and times.knows(n_rows):
            pace.drained_s = seconds - times.plain_s(n_rows)
            return
        elif step.is_pipelined and not step.is_new:
            times.saw_plain(n_rows, seconds)
        pace.n_wide, pace.drained_s = 0, None

    @contextmanager
    def draining(self) -> Iterator[None]:
        """Inside the block, steps are read early, so that drafts can follow them."""
        self.is_draining = True
        try:
            yield
        finally:
            self.is_draining = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Time spent inside the block does not count as a step's."""
        began = self._clock()
        try:
            yield
        finally:
            took_s = self._clock() - began
            for pace in self.paces.values():
                pace.read_at += took_s

    def disturbed(self) -> None:
        """The device computes something else, so the time until the next tokens is not a step's."""
        self.paces.clear()
