"""How many tokens to draft for the next step: the width that yields the most tokens per second.

    a step of width w pays if   tokens(w) / (price(w) + change)  >  MIN_GAIN

`step_times` supplies the prices, `draft_odds` the expected tokens. However wrong these are, losses
are bounded: drafts may lose MAX_LOSS of the time of plain steps. Once they have lost more, nothing is
drafted until plain steps have earned it back.

Owner: the engine thread, through the speculation.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from firn.core.measure import Median
from firn.models.speculation.draft_odds import ExpectedTokens
from firn.models.speculation.step_times import MAX_LOSS, N_AGED, StepTimes

START, MOST = 2.0, 10.0
"""Plain steps that drafts may lose at the start, before any were earned, and the most that are saved.
The largest debt is START: it is paid off after 400 plain steps."""
MIN_GAIN = 1.05
"""Tokens in the time of a plain step that drafts must promise: less is within the error of measuring."""


@dataclass(eq=False, slots=True)
class Allowance:
    """What drafts may still lose, in plain steps."""

    steps: float = START

    def earn(self) -> None:
        self.settle(MAX_LOSS)

    def settle(self, gain: float) -> None:
        """gain: of a step with drafts, or of changing to drafts and back. Losses are negative."""
        self.steps = max(min(self.steps + gain, MOST), -START)

    def covers(self, loss: float) -> bool:
        return self.steps > 0.0 and self.steps >= min(loss, START)


@dataclass(eq=False, slots=True)
class DraftTimes:
    """Seconds per drafted token of the costly drafter, by the number of rows."""

    _times: dict[int, Median] = field(default_factory=dict)
    _begun: Counter[int] = field(default_factory=Counter)

    def saw(self, n_rows: int, seconds: float) -> bool:
        """Returns whether the measurement counts. The first does not: it includes compiling."""
        self._begun[n_rows] += 1
        if self._begun[n_rows] == 1:
            return False
        self._times.setdefault(n_rows, Median()).add(seconds)
        return True

    def of(self, n_rows: int) -> float:
        """The estimate; for a number of rows that was never measured, the lowest of the others."""
        known = self._times.get(n_rows)
        if known:
            return known.value
        return min((times.value for times in self._times.values() if times), default=0.0)

    def age(self) -> None:
        """The drafter was passed over for a while: it is tried again eventually."""
        for times in self._times.values():
            times.age()


@dataclass(eq=False, slots=True)
class Overhead:
    """How long the host takes to draft for a row, and to decide against all drafts."""

    draft: Median = field(default_factory=Median)
    decide: Median = field(default_factory=Median)

    def rest(self, n_rows: int, plain_s: float) -> int:
        """Steps that a row skips between drafts, to keep all rows together below MAX_LOSS, but
        never more than N_AGED: what did not pay may pay by then."""
        share = (self.draft.beside(0.0) + self.decide.beside(0.0)) * n_rows / plain_s
        return min(max(math.ceil(share / MAX_LOSS) - 1, 0), N_AGED)


@dataclass(frozen=True, slots=True)
class BestWidth:
    """width: of the next step. rate: expected tokens per row in the time of a plain step."""

    width: int
    rate: float


def best_width(
    times: StepTimes,
    rows: Sequence[ExpectedTokens],
    *,
    n_seats: int,
    widths: Sequence[int],
    step_in_flight: bool = False,
    allowance: Allowance | None = None,
    draft_s: Callable[[int], float] = lambda width: 0.0,
) -> BestWidth:
    """The width that yields the most tokens per second; 1 if no drafts pay.

    A row drafts as many tokens as the width leaves after those it must be fed. step_in_flight: one
    would have to be drained first, and the first step with drafts must pay for the change. draft_s: how
    long drafting takes for a step of a given width.
    """
    least = max(row.n_pending for row in rows)
    best = BestWidth(1, MIN_GAIN / times.price(n_seats, least))
    if all(len(row.gains) == 1 for row in rows) or not times.knows(n_seats):
        return best
    change, plain_s = times.change(n_seats) if step_in_flight else 0.0, times.plain_s(n_seats)
    most = sum(row.gains[-1] for row in rows) / len(rows)
    for width in widths:
        price = times.price(n_seats, width) + change
        if width <= least or most <= best.rate * price:
            continue
        loss = 0.0 if times.is_measured(n_seats, width) else price - 1.0
        if allowance is not None and not allowance.covers(loss):
            continue
        rate = sum(row.tokens(width) for row in rows) / len(rows)
        rate /= price + draft_s(width) / plain_s
        if rate > best.rate:
            best = BestWidth(width, rate)
    return best
