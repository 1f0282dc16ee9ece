"""Measures how long each step takes: from reading the tokens before it to reading its own.

    plain  plain  plain | wide  wide  wide | plain  plain
                  ^ read early: nothing     ^ late: two steps are built before it is read
                    else is in flight

A step that is read early passes its delay on to the first wide step; that of the first plain step
afterwards is what the change costs.

Owner: the engine thread, through the speculation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from firn.models.decode.batch import Group, StepInFlight, TakenTokens
from firn.models.decode.steps import PlainInFlight
from firn.models.speculation.gate import Allowance
from firn.models.speculation.step_times import StepTimes


class StepClock:
    def __init__(self, times: StepTimes, allowance: Allowance, clock: Callable[[], float]) -> None:
        self._times = times
        self._allowance = allowance
        self._clock = clock
        self.read_at: dict[int, float] = {}
        """When the newest tokens were read, by the id() of the group. Missing where the device has
        computed something else since."""
        self._has_drafted: set[int] = set()
        """Groups whose newest step was one with drafts, or was read early for drafts."""
        self.is_draining = False

    def read(self, group: Group, taken: Sequence[TakenTokens], step: StepInFlight) -> None:
        """A step's tokens were read: record how long it took, and settle its gain or loss."""
        now, n_rows = self._clock(), len(group.seats)
        before = self.read_at.get(id(group))
        self.read_at[id(group)] = now
        if before is None:
            return
        seconds, times, allowance = now - before, self._times, self._allowance
        has_drafted = id(group) in self._has_drafted
        self._has_drafted.discard(id(group))
        if not isinstance(step, PlainInFlight):
            self._has_drafted.add(id(group))
            price = times.saw_wide(n_rows, step.width, seconds, is_new=step.is_new)
            if price is not None:
                n_taken = sum(len(t.tokens) for t in taken if t.row.group is group)
                allowance.settle(n_taken / max(len(group.rows), 1) - price)
            return
        allowance.earn()
        if self.is_draining and times.knows(n_rows):
            # It was read early: what it took longer belongs to the step after it.
            self._has_drafted.add(id(group))
            self.read_at[id(group)] = min(before + times.plain_s(n_rows), now)
        elif step.is_new:
            return
        elif step.is_pipelined:
            times.saw_plain(n_rows, seconds)
        elif has_drafted:  # else a reply has just begun, which no drafts are to blame for
            allowance.settle(-times.saw_change(n_rows, seconds))

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
            self.read_at = {group: at + took_s for group, at in self.read_at.items()}

    def disturbed(self) -> None:
        """The device computes something else, so the time until the next tokens is not a step's."""
        self.read_at.clear()
        self._has_drafted.clear()
