"""What a step costs, for each number of rows and each width, measured while serving.

    price   how long a step takes, in plain steps: those of one token a row, of which one is always
            in flight, as without speculation

Before a width is measured, its price is the device's prior, in proportion to the nearest narrower width
that was, and at most that of a wider one. Two things can make a measurement wrong for long:

    a width was dear in a bad moment        what is not measured is forgotten bit by bit, and tried again
    plain steps were slow, and are not      the less drafts gain, the sooner a few plain steps are
    measured while drafts seem to pay       measured again: that may cost MAX_LOSS

Owner: the engine thread, through the speculation.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

from firn.core.measure import N_SURE, Median
from firn.models.decode.step_profile import StepProfile

MAX_LOSS = 0.005
"""Share of the time of plain steps that drafts may lose."""
MAX_OUTLIER = 2.0
"""A single step may meet a hiccup of the machine, or compile kernels: it is charged at most this many
times its price."""
N_AGED = 32
"""Steps after which what was not measured or tried meanwhile is forgotten by one measurement."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """width: tokens of a row, as computed. is_asked: a costly drafter drafted, in the step's time."""

    width: int
    is_asked: bool = False


@dataclass(eq=False, slots=True)
class _OfRows:
    """For one number of rows. fresh: shapes measured of late."""

    plain: Median = field(default_factory=Median)
    wide: dict[StepShape, Median] = field(default_factory=dict)
    fresh: set[StepShape] = field(default_factory=set)
    n_measured: int = 0
    n_wide: int = 0
    """Wide steps since plain ones were measured, and how many of them took less than those."""
    n_cheap: int = 0

    def count(self, shape: StepShape) -> None:
        """A step of this shape was measured."""
        self.fresh.add(shape)
        self.n_measured += 1
        if self.n_measured % N_AGED == 0:
            for other in self.wide.keys() - self.fresh:
                self.wide[other].age()
            self.fresh.clear()


class StepTimes:
    """How long steps take, for each number of rows."""

    def __init__(self, profile: StepProfile) -> None:
        self.profile = profile
        self._rows: dict[int, _OfRows] = {}

    # --- learning --------------------------------------------------------------------------

    def observe_plain(self, n_rows: int, seconds: float) -> None:
        """seconds: from reading a plain step's tokens to the next one's, which was in flight."""
        rows = self._of(n_rows)
        rows.plain.add(max(seconds, 1e-9))  # a clock may stand still
        rows.count(StepShape(1))
        rows.n_wide = rows.n_cheap = 0

    def observe_wide(
        self, n_rows: int, shape: StepShape, seconds: float, *, is_new: bool = False
    ) -> float:
        """Returns what to charge for it, in plain steps: its price; or what it took, as long as that is
        hardly known.

        is_new: its kernels were compiled or traced, so it says nothing about later ones."""
        rows, price = (
            self._of(n_rows),
            partial(self.price, n_rows, shape.width, is_asked=shape.is_asked),
        )
        rows.n_wide += 1
        if not rows.plain:
            return price()
        rows.n_cheap += seconds < rows.plain.value
        measured, most = seconds / rows.plain.value, MAX_OUTLIER * price()
        times = rows.wide.setdefault(shape, Median())
        if not is_new:
            times.add(seconds)
            rows.count(shape)
        charged = times.value / rows.plain.value if len(times) > 1 else min(measured, most)
        return max(charged, 1.0)

    def trust(self, n_rows: int, gain: float) -> None:
        """The next drafts promise this many tokens in the time of a plain step. To measure plain steps
        instead yields `gain - 1` less each, which must be at most MAX_LOSS of all."""
        rows = self._of(n_rows)
        is_due = rows.n_wide >= (N_SURE - 1) * (gain - 1.0) / (MAX_LOSS * gain)
        if is_due or rows.n_cheap >= N_AGED:  # no wide step is cheaper
            rows.plain.sum_up()  # those of now shall decide
            rows.n_wide = rows.n_cheap = 0

    # --- asking ----------------------------------------------------------------------------

    def knows(self, n_rows: int) -> bool:
        """Whether enough plain steps with this many rows were measured, and recently enough."""
        rows = self._rows.get(n_rows)
        return rows is not None and rows.plain.is_sure

    def plain_s(self, n_rows: int) -> float:
        return self._of(n_rows).plain.value

    def is_measured(self, n_rows: int, width: int, *, is_asked: bool = False) -> bool:
        return bool(self._of(n_rows).wide.get(StepShape(self.profile.shape(width), is_asked)))

    def price(self, n_rows: int, width: int, *, is_asked: bool = False) -> float:
        """What a wide step costs, in plain steps.

        Never less than one. Where it seems less, the plain steps were measured in a slower moment, and
        wrong drafts must not be tried because of that.
        """
        shape = StepShape(self.profile.shape(width), is_asked)
        return max(self._price(n_rows, shape), 1.0) if width > 1 else 1.0

    def _price(self, n_rows: int, shape: StepShape) -> float:
        rows, plain_s = self._of(n_rows), self.plain_s(n_rows)
        known = {s.width: t for s, t in rows.wide.items() if t and s.is_asked == shape.is_asked}
        narrower = max((w for w in known if w < shape.width), default=0)
        wider = min((w for w in known if w > shape.width), default=0)
        if not plain_s:
            return self._prior(n_rows, shape.width)
        if shape.is_asked and not known:
            prior = self._price(n_rows, StepShape(shape.width))
        else:
            prior = self._prior(n_rows, shape.width)
            if narrower:
                prior *= known[narrower].value / plain_s / self._prior(n_rows, narrower)
            if wider:
                prior = min(prior, known[wider].value / plain_s)
        own = known.get(shape.width)
        return prior if own is None else own.beside(prior * plain_s) / plain_s

    def _prior(self, n_rows: int, width: int) -> float:
        return 1.0 + self.profile.flat + self.profile.slope * n_rows * (width - 1)

    def _of(self, n_rows: int) -> _OfRows:
        return self._rows.setdefault(n_rows, _OfRows())
