"""Measures how long each step takes: from reading the tokens before it to reading its own.

    plain  plain  plain | wide  wide  wide | plain  plain
                  ^ read early: nothing     ^ late: two steps are built before it is read
                    else is in flight

Whatever takes longer than a plain step is the wide ones' doing: a step that is read early passes its
delay on to the first wide step, and that of the first plain step afterwards is added to the last one.

Owner: the engine thread, through the speculation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from firn.models.decode.batch import Group, StepInFlight, TakenTokens
from firn.models.decode.steps import PlainInFlight
from firn.models.speculation.gate import Allowance
from firn.models.speculation.step_times import StepShape, StepTimes


@dataclass(slots=True)
class _WideStep:
    """A step with drafts whose time may still grow. n_tokens: taken, per row."""

    n_rows: int
    shape: StepShape
    seconds: float
    n_tokens: float
    is_new: bool


class StepClock:
    def __init__(self, times: StepTimes, allowance: Allowance, clock: Callable[[], float]) -> None:
        self._times = times
        self._allowance = allowance
        self._clock = clock
        self.read_at: dict[int, float] = {}
        """When the newest tokens were read, by the id() of the group. Missing where the device has
        computed something else since."""
        self._last: dict[int, _WideStep] = {}
        """The groups' newest steps, where these had drafts."""
        self.is_draining = False

    def read(
        self,
        group: Group,
        taken: Sequence[TakenTokens],
        step: StepInFlight,
        *,
        is_asked: bool = False,
    ) -> None:
        """A step's tokens were read. is_asked: a costly drafter drafted for it."""
        now, n_rows, times = self._clock(), len(group.seats), self._times
        before = self.read_at.get(id(group))
        self.read_at[id(group)] = now
        last = self._last.pop(id(group), None)
        if before is None:
            return
        seconds = now - before
        if not isinstance(step, PlainInFlight):
            n_tokens = sum(len(t.tokens) for t in taken if t.row.group is group)
            self._last[id(group)] = _WideStep(
                n_rows,
                StepShape(step.width, is_asked),
                seconds,
                n_tokens / max(len(group.rows), 1),
                step.is_new,
            )
        else:
            self._allowance.earn()
            if self.is_draining and times.knows(n_rows):
                self.read_at[id(group)] = min(before + times.plain_s(n_rows), now)
            elif step.is_pipelined and not step.is_new:
                times.observe_plain(n_rows, seconds)
            elif last is not None and not step.is_new:  # else a reply has just begun
                last.seconds += max(seconds - times.plain_s(last.n_rows), 0.0)
        if last is not None:
            self._settle(last)

    def _settle(self, step: _WideStep) -> None:
        price = self._times.observe_wide(step.n_rows, step.shape, step.seconds, is_new=step.is_new)
        self._allowance.add(step.n_tokens - price)

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
        for step in self._last.values():
            self._settle(step)
        self.read_at.clear()
        self._last.clear()
