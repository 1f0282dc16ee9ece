"""What a step costs, for each number of rows and each width, measured while serving.

A price is relative to plain steps with the same number of rows. A plain step computes one token per
row while the next step is already in flight, as without speculation. The price of a wide step
includes the loss of that overlap: it may have to be read before the next one is launched.

What is not measured any more is forgotten bit by bit, so a width that was dear in a bad moment is tried
again. Plain steps are not measured while drafts pay; now and then they are, at little cost.

Owner: the engine thread, through the speculation.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from firn.core.measure import N_SURE, Median
from firn.models.decode.step_profile import StepProfile

MAX_LOSS = 0.005
"""Share of the time of plain steps that drafts may lose."""
N_AGED = 32
"""After each so many steps without a measurement of a width, its largest one is forgotten."""
PRIOR_CHANGE = 0.3
"""What the first step after drafts takes longer, in plain steps, before it is measured: nothing was in
flight when it was launched."""
MAX_OUTLIER = 4.0
"""One step is charged at most this many times the estimate before it: a hiccup of the machine."""

MAX_PREPARING = 1.6
"""The most that a step of a new shape is charged, in plain steps: it compiles kernels once."""


@dataclass(eq=False, slots=True)
class _Measured:
    """For one number of rows: seconds of plain steps and, by width, of wide ones; what the change from
    drafts back to plain steps costs, in plain steps."""

    plain: Median = field(default_factory=Median)
    wide: dict[int, Median] = field(default_factory=dict)
    change: Median = field(default_factory=Median)
    episode: Median = field(default_factory=Median)
    """Wide steps before each change back."""
    n_of: Counter[int] = field(default_factory=Counter)
    """Steps of each width so far."""
    n_without: Counter[int] = field(default_factory=Counter)
    """Steps since each width was measured."""
    n_wanted: int = N_SURE
    """Plain steps to measure before drafts are tried again."""
    n_trusted: float = 0.0
    """Wide steps after which plain ones are measured again."""

    def count(self, width: int) -> None:
        """A step of this width was measured: all others are a step older."""
        self.n_without[width] = 0
        for other, times in self.wide.items():
            if other != width:
                self.n_without[other] += 1
                if self.n_without[other] % N_AGED == 0:
                    times.age()
        if width != 1:
            self.n_without[1] += 1


class StepTimes:
    """How long steps take, for each number of rows."""

    def __init__(self, profile: StepProfile) -> None:
        self._profile = profile
        self._rows: dict[int, _Measured] = {}

    # --- learning --------------------------------------------------------------------------

    def saw_plain(self, n_rows: int, seconds: float) -> None:
        """seconds: from reading a plain step's tokens to the next one's, which was in flight."""
        rows = self._of(n_rows)
        rows.plain.add(max(seconds, 1e-9))  # a clock may stand still
        rows.count(1)
        rows.n_wanted = max(rows.n_wanted - 1, 0)

    def saw_wide(
        self, n_rows: int, width: int, seconds: float, *, is_new: bool = False
    ) -> float | None:
        """Returns what the step cost, in plain steps; None if those have not been measured yet.
        With enough measurements that is the price of its width: plain steps can be slow, too.

        is_new: it had a new shape, and took longer than later steps of that shape will.
        """
        rows = self._of(n_rows)
        rows.n_of[width] += 1
        if not rows.plain:
            return None
        measured, before = seconds / rows.plain.value, self.price(n_rows, width)
        if is_new or rows.n_of[width] <= self._profile.n_preparing:
            return min(measured, MAX_PREPARING)
        times = rows.wide.setdefault(width, Median())
        times.add(seconds)
        rows.count(width)
        if rows.n_without[1] >= rows.n_trusted:
            rows.n_wanted = N_SURE
            rows.plain.sum_up()  # those of now shall decide
        if times.is_sure:
            return self.price(n_rows, width)
        return min(max(measured, 1.0), MAX_OUTLIER * before)

    def saw_change(self, n_rows: int, seconds: float) -> float:
        """A plain step took this long that was launched with nothing in flight. Returns what such a
        change costs, in plain steps."""
        rows = self._of(n_rows)
        if not rows.plain:
            return 0.0
        rows.change.add(max(seconds / rows.plain.value - 1.0, 0.0))
        rows.episode.add(rows.n_without[1])
        return rows.change.beside(PRIOR_CHANGE)

    def expect(self, n_rows: int, gain: float) -> None:
        """The next drafts are expected to yield this many tokens in the time of a plain step. Measuring
        plain steps instead may cost MAX_LOSS of that, so the smaller the gain, the sooner it is
        doubted."""
        self._of(n_rows).n_trusted = N_SURE * max(gain - 1.0, 0.0) / (MAX_LOSS * gain)

    # --- asking ----------------------------------------------------------------------------

    def knows(self, n_rows: int) -> bool:
        """Whether enough plain steps with this many rows were measured, and recently enough."""
        rows = self._rows.get(n_rows)
        return rows is not None and not rows.n_wanted

    def plain_s(self, n_rows: int) -> float:
        return self._of(n_rows).plain.value

    def change(self, n_rows: int) -> float:
        """What changing to drafts and back adds to each step of an episode, in plain steps."""
        rows = self._of(n_rows)
        return rows.change.beside(PRIOR_CHANGE) / max(rows.episode.beside(1.0), 1.0)

    def is_measured(self, n_rows: int, width: int) -> bool:
        return bool(self._of(n_rows).wide.get(self._profile.shape(width)))

    def price(self, n_rows: int, width: int) -> float:
        """What a wide step costs, in plain steps: measured, or between those of the nearest widths, or
        from the device's prior.

        Never less than one. Where it seems less, the plain steps were measured in a slower moment, and
        wrong drafts must not be tried because of that.
        """
        return max(self._price(n_rows, self._profile.shape(width)), 1.0) if width > 1 else 1.0

    def _price(self, n_rows: int, shape: int) -> float:
        rows, prior = self._of(n_rows), self._prior(n_rows, shape)
        if not rows.plain:
            return prior
        plain_s = rows.plain.value
        if own := rows.wide.get(shape):
            return own.beside(prior * plain_s) / plain_s
        known = [w for w, times in rows.wide.items() if times]
        below = max((w for w in known if w < shape), default=1)
        above = min((w for w in known if w > shape), default=None)
        low = self._price(n_rows, below) if below > 1 else 1.0
        if above is None:
            return low * prior / self._prior(n_rows, below)
        high = self._price(n_rows, above)
        if below == 1:
            low = min(1.0 + self._profile.flat, high)
        return low + (shape - below) / (above - below) * (high - low)

    def _prior(self, n_rows: int, width: int) -> float:
        profile = self._profile
        return 1.0 + (profile.flat + profile.slope * n_rows * (width - 1) if width > 1 else 0.0)

    def _of(self, n_rows: int) -> _Measured:
        rows = self._rows.get(n_rows)
        if rows is None:
            rows = self._rows[n_rows] = _Measured()
        return rows
