"""How many tokens are worth guessing: what a step takes, by rows and width, against what it will bring.

Both are learnt while serving. The time of a step is that between two steps' tokens, so it holds whatever
a server does in between; how often guesses come true is counted by kind, also where they are not tried.

Owner: the engine thread, through the speculation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

WIDTHS = (1, 2, 3, 5, 9, 17)
"""Tokens of a row in one step that are thought about; 1 is a step without drafts."""
PRIOR_SLOPE = 0.1
"""Of a step's time, for each further token: until it was measured."""
SLOWER_RATE, FASTER_RATE = 0.1, 0.3
"""Of what a step took more, or less, than thought, so much is believed."""
MAX_OFF = 4.0
DRIFT_SHARE = 0.3
"""How much of that, of a wide step, is put down to the server as a whole."""
N_PREPARING = 2
"""The first steps of a width may compile kernels, and are not counted."""
SETTLED = 8
"""After so many steps of a width, its time is known well enough to tell a slower server by it."""
FORGETTING = 0.004
"""A width that looks too dear comes this much nearer to what was thought of it at first, each time it is
passed over: one slow step must not rule it out for ever."""
MIN_GAIN = 1.05
"""What is expected of drafts, to give up steps in flight for them."""
MEMORY = 300.0
"""Guesses of a kind that are remembered, as it were."""
PRIOR_WEIGHT = 8.0
FADING = 0.99
Kind = tuple[int, int]
"""Which drafter, and which of its kinds of guesses."""


@dataclass(eq=False, slots=True)
class _Rows:
    """For one number of rows: seconds of a plain step, and how many of these a wider one takes."""

    plain_s: float
    factors: dict[int, float] = field(default_factory=dict)


class StepTimes:
    """Seconds of a step of so many rows, each so wide. Plain steps set the level: a server that becomes
    slower does so at every width."""

    def __init__(self) -> None:
        self._rows: dict[int, _Rows] = {}
        self._n_seen: Counter[tuple[int, int]] = Counter()

    def saw(self, n_rows: int, width: int, seconds: float) -> None:
        self._n_seen[n_rows, width] += 1
        n_seen = self._n_seen[n_rows, width]
        known = self._rows.get(n_rows)
        if known is None:
            self._rows[n_rows] = _Rows(seconds / _prior(n_rows, width), {1: 1.0})
            return
        if width > 1 and n_seen <= N_PREPARING:
            return
        off = min(max(seconds / self.of(n_rows, width), 0.1), MAX_OFF)
        # A busy machine makes single steps much slower, and none much faster: slower is believed slowly.
        rate = max(SLOWER_RATE, 0.5 / n_seen) if off > 1.0 else max(FASTER_RATE, 1.0 / n_seen)
        if width == 1:
            known.plain_s *= off**rate
            return
        drift = DRIFT_SHARE * rate if n_seen > SETTLED else 0.0
        known.factors[width] = self._factor(n_rows, width) * off ** (rate - drift)
        known.plain_s *= off**drift

    def of(self, n_rows: int, width: int) -> float:
        """Measured, or between two that were; only ratios of it mean something."""
        known = self._rows.get(n_rows)
        return (known.plain_s if known else 1.0) * self._factor(n_rows, width)

    def _factor(self, n_rows: int, width: int) -> float:
        known = self._rows.get(n_rows)
        if known is None:
            return _prior(n_rows, width)
        factors = known.factors
        if width in factors:
            return factors[width]
        below = max(w for w in factors if w < width)
        above = min((w for w in factors if w > width), default=None)
        if above is None:
            return factors[below] * _prior(n_rows, width) / _prior(n_rows, below)
        share = (width - below) / (above - below)
        return factors[below] + share * (factors[above] - factors[below])

    def knows(self, n_rows: int) -> bool:
        """Whether what it says are seconds."""
        return n_rows in self._rows

    def forgive(self, n_rows: int) -> None:
        """No drafts were tried: what speaks against them may be out of date."""
        known = self._rows.get(n_rows)
        for width in known.factors if known else ():
            assert known is not None
            hoped = _prior(n_rows, width)
            if known.factors[width] > hoped:
                known.factors[width] += FORGETTING * (hoped - known.factors[width])


def _prior(n_rows: int, width: int) -> float:
    return 1.0 + PRIOR_SLOPE * n_rows * (width - 1)


class DraftTimes:
    """Seconds that guesses take which are not free, for each token of so many rows."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._begun: set[int] = set()

    def saw(self, n_rows: int, seconds: float) -> None:
        if n_rows not in self._begun:  # the first has things to prepare
            self._begun.add(n_rows)
            return
        known = self._seconds.get(n_rows, seconds)
        rate = SLOWER_RATE if seconds > known else FASTER_RATE
        self._seconds[n_rows] = known + rate * (min(seconds, MAX_OFF * known) - known)

    def of(self, n_rows: int) -> float:
        """As far as is known; of other numbers of rows, the least."""
        least = min(self._seconds.values(), default=0.0)
        return self._seconds.get(n_rows, least)

    def forgive(self) -> None:
        """None were asked for: what is known of them grows old."""
        for n_rows in self._seconds:
            self._seconds[n_rows] *= FADING


@dataclass(eq=False, slots=True)
class Odds:
    """How often guesses came true, by kind."""

    _right: dict[Kind, float] = field(default_factory=dict)
    _all: dict[Kind, float] = field(default_factory=dict)

    def saw(self, kind: Kind, is_right: bool) -> None:
        n = self._all.get(kind, 0.0)
        fading = min(1.0, MEMORY / (n + 1.0))
        self._all[kind] = n * fading + 1.0
        self._right[kind] = self._right.get(kind, 0.0) * fading + is_right

    def fade(self, kinds: Iterable[Kind]) -> None:
        """They were not tried: what is known of them grows old."""
        for kind in kinds:
            if kind in self._all:
                self._all[kind] *= FADING
                self._right[kind] *= FADING

    def of(self, kind: Kind, prior: float) -> float:
        right, n = self._right.get(kind, 0.0), self._all.get(kind, 0.0)
        return (right + PRIOR_WEIGHT * prior) / (n + PRIOR_WEIGHT)


@dataclass(frozen=True, slots=True)
class Hope:
    """One row's prospects. n_pending: tokens that it must be fed anyway.

    gains[k]: how many tokens it is expected to take with k guesses.
    """

    n_pending: int = 1
    gains: tuple[float, ...] = (1.0,)

    @classmethod
    def of(cls, odds: Sequence[float], *, n_pending: int = 1) -> Hope:
        """odds: of each guess, given that those before it were right."""
        gains, chance = [1.0], 1.0
        for p in odds:
            chance *= p
            gains.append(gains[-1] + chance)
        return cls(n_pending, tuple(gains))

    def tokens(self, width: int) -> float:
        """Expected of a step so wide."""
        n_drafted = min(max(width - self.n_pending, 0), len(self.gains) - 1)
        return self.gains[n_drafted]


@dataclass(frozen=True, slots=True)
class Best:
    """How wide the next step is to be, and what it is expected to bring: tokens a second."""

    width: int
    rate: float


def best_width(
    times: StepTimes,
    hopes: Sequence[Hope],
    *,
    n_seats: int,
    draft_s: Callable[[int], float] = lambda width: 0.0,
) -> Best:
    """The width that brings the most tokens a second; 1 where no drafts pay.

    A row drafts what the width leaves beside the tokens that it must be fed. draft_s: how long the
    guesses for a step of this width take.
    """
    least = max(h.n_pending for h in hopes)
    best = Best(1, MIN_GAIN * len(hopes) / times.of(n_seats, least))
    if all(len(h.gains) == 1 for h in hopes):
        return best
    for width in WIDTHS:
        if width > least:
            seconds = times.of(n_seats, width) + draft_s(width)
            rate = sum(h.tokens(width) for h in hopes) / seconds
            if rate > best.rate:
                best = Best(width, rate)
    return best
