"""How many tokens to draft for the next step: the width that yields the most tokens per second.

    a step of width w pays if   tokens(w) / price(w)  >  MIN_GAIN

`step_times` supplies the prices, `odds` the expected tokens. However wrong these are, losses are
bounded: what drafts lose is paid out of an allowance of MAX_LOSS of the time of plain steps, and the
host's time to look for drafts in vain out of another: looking must not take what trying needs. While
one is spent, nothing is tried, or nobody looks.

Owner: the engine thread, through the speculation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from firn.models.speculation.odds import ExpectedTokens
from firn.models.speculation.step_times import MAX_LOSS, StepTimes

CREDIT, MOST = 2.0, 6.0
"""Plain steps that drafts may lose before any were earned, and the most that are saved. The largest debt
is CREDIT: it is paid off after 400 plain steps."""
MIN_GAIN = 1.05
"""Tokens in the time of a plain step that drafts must promise: less is within the error of measuring."""


@dataclass(eq=False, slots=True)
class Allowance:
    """What drafts may still lose, in plain steps."""

    steps: float = CREDIT

    @property
    def is_open(self) -> bool:
        return self.steps > 0.0

    def covers(self, loss: float) -> bool:
        """Whether something may be tried that may lose this."""
        return self.steps >= min(loss, CREDIT)

    def earn(self) -> None:
        """A plain step."""
        self.add(MAX_LOSS)

    def add(self, gain: float) -> None:
        """gain: of a step with drafts. Losses are negative."""
        self.steps = max(min(self.steps + gain, MOST), -CREDIT)


class Unlimited(Allowance):
    """For drafts that are tried whatever they cost."""

    def add(self, gain: float) -> None:
        pass


@dataclass(frozen=True, slots=True)
class BestWidth:
    """width: of the next step. rate: expected tokens per row in the time of a plain step."""

    width: int
    rate: float


def best_width(
    times: StepTimes,
    rows: Sequence[ExpectedTokens],
    allowance: Allowance,
    *,
    n_seats: int,
    is_asked: bool = False,
) -> BestWidth:
    """The width that yields the most tokens per second; 1 if no drafts pay.

    A row drafts as many tokens as the width leaves after those it must be fed. is_asked: a costly
    drafter takes part.
    """
    least = max(row.n_pending for row in rows)
    best = BestWidth(1, MIN_GAIN / times.price(n_seats, least))
    if not times.knows(n_seats):
        return best
    for width in times.profile.widths:
        price = times.price(n_seats, width, is_asked=is_asked)
        is_measured = times.is_measured(n_seats, width, is_asked=is_asked)
        if width > least and (is_measured or allowance.covers(price - 1.0)):
            rate = sum(row.tokens(width) for row in rows) / len(rows) / price
            if rate > best.rate:
                best = BestWidth(width, rate)
    return best
