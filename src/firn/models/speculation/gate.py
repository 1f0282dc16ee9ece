"""How many tokens to draft for the next step: the width that yields the most tokens per second.

    a step of width w pays if   tokens(w) / (price(w) + change / episode)  >  1

`step_times` supplies the prices, `draft_odds` the expected tokens. However wrong these are, losses
are bounded: drafts may lose 0.5% of the time of plain steps. Once they have lost more, nothing is
drafted until plain steps have earned it back.

Owner: the engine thread, through the speculation.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from firn.models.speculation.draft_odds import FADING, ExpectedTokens
from firn.models.speculation.step_times import MAX_OUTLIER_FACTOR, StepTimes

MIN_GAIN = 1.05
"""Gain that drafts must promise to be worth draining a step in flight."""
MIN_MORE = 1.02
"""The same when no step is in flight."""
EARNED, START, MOST, LEAST = 0.005, 2.0, 10.0, -0.5
"""Plain steps that drafts may lose: earned by each plain step, at the start, and at most. Debts beyond
LEAST are forgiven."""
SLOWER_RATE, FASTER_RATE = 0.1, 0.3
"""Smoothing factors of the drafting-time estimates, for slower and faster measurements."""
MAX_OVERHEAD, MAX_REST = 0.01, 31
"""Share of a plain step that drafts which are not tried may take; the longest rest, in steps."""
OVERHEAD_RATE = 0.1
"""Smoothing factor of the overhead estimates."""


@dataclass(eq=False, slots=True)
class Allowance:
    """What drafts may still lose, in plain steps."""

    steps: float = START

    def earn(self) -> None:
        self.steps = min(self.steps + EARNED, MOST)

    def settle(self, gain: float) -> None:
        """gain: of a step with drafts, or of changing to drafts and back. Losses are negative."""
        self.steps = max(min(self.steps + gain, MOST), LEAST)

    def covers(self, loss: float) -> bool:
        return self.steps > 0.0 and self.steps >= min(loss, START)


class DraftTimes:
    """Seconds per drafted token of the costly drafter, by the number of rows."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._begun: set[int] = set()

    def saw(self, n_rows: int, seconds: float) -> bool:
        """Returns whether the measurement counts. The first does not: it includes compiling."""
        if n_rows not in self._begun:
            self._begun.add(n_rows)
            return False
        known = self._seconds.get(n_rows, seconds)
        rate = SLOWER_RATE if seconds > known else FASTER_RATE
        self._seconds[n_rows] = known + rate * (min(seconds, MAX_OUTLIER_FACTOR * known) - known)
        return True

    def of(self, n_rows: int) -> float:
        """The estimate; for a number of rows that was never measured, the lowest of the others."""
        least = min(self._seconds.values(), default=0.0)
        return self._seconds.get(n_rows, least)

    def forgive(self) -> None:
        """The drafter was skipped: lower its estimates, so that it is tried again eventually."""
        for n_rows in self._seconds:
            self._seconds[n_rows] *= FADING


class OverheadTimes:
    """How long the host takes to draft, and to decide against the drafts."""

    def __init__(self) -> None:
        self._draft_s = self._decide_s = 0.0

    def saw(self, seconds: float) -> None:
        """Drafting for one row took this long."""
        self._draft_s += OVERHEAD_RATE * (seconds - self._draft_s)

    def passed_over(self, seconds: float) -> None:
        """Deciding that no draft is worth trying took this long."""
        self._decide_s += OVERHEAD_RATE * (seconds - self._decide_s)

    def rest(self, n_rows: int, plain_s: float) -> int:
        """Steps that a row skips between drafts, to keep all rows together below MAX_OVERHEAD."""
        share = (self._draft_s + self._decide_s) * n_rows / plain_s
        return min(max(math.ceil(share / MAX_OVERHEAD) - 1, 0), MAX_REST)


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
    explores: bool = False,
    allowance: Allowance | None = None,
    draft_s: Callable[[int], float] = lambda width: 0.0,
) -> BestWidth:
    """The width that yields the most tokens per second; 1 if no drafts pay.

    A row drafts as many tokens as the width leaves after those it must be fed. step_in_flight: one
    would have to be drained first. explores: also consider widths that may have become cheaper.
    draft_s: how long drafting takes for a step of a given width.
    """
    least = max(row.n_pending for row in rows)
    best = BestWidth(1, (MIN_GAIN if step_in_flight else MIN_MORE) / times.price(n_seats, least))
    if all(len(row.gains) == 1 for row in rows) or not times.knows(n_seats):
        return best
    change, plain_s = times.change(n_seats) if step_in_flight else 0.0, times.plain_s(n_seats)
    most = sum(row.gains[-1] for row in rows) / len(rows)
    for width in widths:
        if width <= least:
            continue
        price = (times.lowest_price if explores else times.price)(n_seats, width)
        if most <= best.rate * (price + change):
            continue
        loss = 0.0 if times.is_measured(n_seats, width) else price - 1.0
        if allowance is not None and not allowance.covers(loss):
            continue
        tokens = sum(row.tokens(width) for row in rows) / len(rows)
        rate = tokens / (price + change + draft_s(width) / plain_s)
        if rate > best.rate:
            best = BestWidth(width, rate)
    return best
