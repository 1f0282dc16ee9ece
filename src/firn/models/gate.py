"""How many tokens are worth drafting: what a step costs, by rows and width, against what it brings.

Costs are measured while serving, and a price is in plain steps of the same rows: a plain step is one
token a row with the next step in flight, as without speculation. A step of several tokens may have to be
read before the next one is launched, and changing to such steps and back leaves the device idle for a
moment; its price includes both. A host's speed can change from one second to the next, so seconds are
kept, and a price follows the newest steps of both kinds.

    a step of width w pays where   tokens(w) / (price(w) + change / episode)  >  1

Losses are bounded, whatever the measurements say: drafts may lose a two-hundredth of the time of plain
steps. Once they have lost more, nothing is drafted until plain steps have made up for it.

Owner: the engine thread, through the speculation.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from firn.models.traits import Traits

N_KEPT = 9
"""Newest measurements of each kind; their median counts: a single slow step says nothing."""
N_PLAIN = 3
"""Plain steps to measure before anything is tried."""
N_STALE, N_UNSURE = 128, 32
"""A width that was passed over so often forgets its dearest measurement: what made it dear may be over.
The second where it has few measurements, which may all be of one bad moment."""
N_UNSEEN, N_DOUBTFUL = 512, 16
"""Wide steps after which plain ones are measured again. The second where the gain may be an illusion:
plain steps that were measured in a slow moment make drafts look good. It doubles each time that plain
steps take as long as was believed."""
CLEAR_GAIN, AS_BELIEVED = 1.6, 0.8
"""A gain that is none in a slow moment only; how much less than believed plain steps may take."""
N_FRESH = 16
"""A width that is not among so many newest measurements was measured in another moment, when the machine
may have been slower or faster: all of that counts as one measurement once there are newer ones."""
PRIOR_CHANGE = 0.3
PRIOR_EPISODE = 2.0
MAX_EPISODE = 16.0
MIN_GAIN = 1.05
"""What drafts must gain for a step in flight to be given up for them."""
MIN_MORE = 1.02
"""What they must gain once no step is in flight."""
EARNED, START, MOST, LEAST = 0.005, 2.0, 10.0, -0.5
"""Plain steps that drafts may lose: earned by each plain step, at the start, and at most. A debt below
the least is forgiven."""
N_SURE = 3
"""Measurements that outvote the prior."""
MAX_OFF = 4.0
"""A single measurement counts for at most this many times what was believed."""
MAX_PREPARING = 1.6
"""Plain steps that a step is charged with at most which compiles kernels: it does so once."""
SLOWER_RATE, FASTER_RATE = 0.1, 0.3
"""How fast the believed drafting time follows a measurement that is slower, or faster."""
MAX_GUESSING, MAX_REST = 0.01, 31
"""The share of plain steps that drafts may take which are not tried, and the most steps between two."""
GUESS_RATE = 0.1
"""How fast the time that a draft takes follows a measurement."""
MEMORY = 300.0
"""Effective number of drafted tokens of a kind that count."""
PRIOR_WEIGHT = 8.0
FADING = 0.99
HOPELESS = 1e-3
"""Drafted tokens that are accepted less often than this count for nothing."""
Kind = tuple[int, int]
"""Which drafter, and which of its kinds of drafted tokens."""


class Recent:
    """The newest few measurements of one quantity."""

    def __init__(self) -> None:
        self._values: deque[float] = deque(maxlen=N_KEPT)
        self._median: float | None = None

    def __len__(self) -> int:
        return len(self._values)

    def saw(self, value: float) -> None:
        self._values.append(value)
        self._median = None

    def sum_up(self) -> None:
        """Keep the median alone."""
        if self._values:
            self._values = deque([self.median], maxlen=N_KEPT)

    def forget_worst(self) -> None:
        if self._values:
            self._values.remove(max(self._values))
            self._median = None

    def believed(self, prior: float) -> float:
        """The median, filled up with the prior while there are few measurements."""
        if len(self._values) >= N_SURE:
            return self.median
        return statistics.median([*self._values, *[prior] * (N_SURE - len(self._values))])

    @property
    def median(self) -> float:
        """The lower of two middle ones: a machine is slow at times, and never fast by accident."""
        if self._median is None:
            self._median = statistics.median_low(self._values)
        return self._median


@dataclass(eq=False, slots=True)
class _Measured:
    """For one number of rows: seconds of plain steps and of wide ones, by width. A change to wide steps
    and back in plain steps."""

    plain: Recent = field(default_factory=Recent)
    wide: dict[int, Recent] = field(default_factory=dict)
    change: Recent = field(default_factory=Recent)
    newest: deque[int] = field(default_factory=lambda: deque(maxlen=N_FRESH))
    """Widths of the newest measurements."""
    n_seen: Counter[int] = field(default_factory=Counter)
    n_wanted: int = N_PLAIN
    """Plain steps to measure before anything more is tried."""
    n_since_plain: int = 0
    n_trusted: int = N_DOUBTFUL
    """Wide steps for which plain ones are believed unless the gain is clear."""
    gain: float = 1.0
    """That the newest drafts should bring."""
    doubted_s: float = 0.0
    """What plain steps were believed to take when they were last doubted."""
    n_passed: int = 0
    prices: dict[int, float] = field(default_factory=dict)
    """What `wide` says, by width; empty when it has changed. It is asked for at every step."""


class StepTimes:
    """What steps take, for each number of rows."""

    def __init__(self, traits: Traits) -> None:
        self._traits = traits
        self._rows: dict[int, _Measured] = {}
        self._episode = PRIOR_EPISODE

    # --- learning --------------------------------------------------------------------------

    def saw_plain(self, n_rows: int, seconds: float) -> None:
        """seconds: between the tokens of two plain steps, one of which was in flight."""
        rows = self._of(n_rows)
        if rows.n_since_plain >= N_FRESH:
            rows.plain.sum_up()
        rows.plain.saw(seconds)
        rows.prices.clear()
        rows.n_wanted = max(rows.n_wanted - 1, 0)
        rows.n_since_plain = 0
        if rows.doubted_s and not rows.n_wanted:
            is_confirmed = rows.plain.median >= AS_BELIEVED * rows.doubted_s
            rows.n_trusted = min(2 * rows.n_trusted, N_UNSEEN) if is_confirmed else N_DOUBTFUL
            rows.doubted_s = 0.0

    def saw_wide(
        self, n_rows: int, width: int, seconds: float, *, is_new: bool = False
    ) -> float | None:
        """Returns what the step cost, in plain steps; None if those were not measured yet.

        is_new: it took longer than such steps will, as it had a new shape.
        With enough measurements that is the believed price of its width: a single slow step is the
        machine's doing, and happens to plain steps as well.
        """
        rows = self._of(n_rows)
        rows.n_since_plain += 1
        rows.n_passed = 0
        rows.n_seen[width] += 1
        if not rows.plain:
            return None
        measured, before = seconds / rows.plain.median, self.price(n_rows, width)
        if is_new or rows.n_seen[width] <= self._traits.n_preparing:
            return min(measured, MAX_PREPARING)
        known = rows.wide.setdefault(width, Recent())
        if width not in rows.newest:
            known.sum_up()
        known.saw(seconds)
        rows.newest.append(width)
        rows.prices.clear()
        if rows.n_since_plain >= (N_UNSEEN if rows.gain >= CLEAR_GAIN else rows.n_trusted):
            rows.n_wanted, rows.doubted_s = N_PLAIN, rows.plain.median
        price = self.price(n_rows, width)
        return price if len(known) >= N_SURE else min(measured, MAX_OFF * before)

    def expect(self, n_rows: int, gain: float) -> None:
        """The drafts of the next step should bring so many tokens in the time of one."""
        self._of(n_rows).gain = gain

    def saw_episode(self, n_rows: int, n_steps: int, extra_s: float) -> float:
        """`n_steps` steps in a row had drafts; changing to them and back took `extra_s`. Returns what
        such a change costs, in plain steps."""
        rows = self._of(n_rows)
        self._episode += 0.2 * (min(n_steps, MAX_EPISODE) - self._episode)
        if not rows.plain:
            return 0.0
        rows.change.saw(max(extra_s, 0.0) / rows.plain.median)
        return rows.change.believed(PRIOR_CHANGE)

    def passed_over(self, n_rows: int) -> None:
        """There were drafts, and none was tried."""
        rows = self._of(n_rows)
        rows.n_passed += 1
        for each in (*rows.wide.values(), rows.change):
            if rows.n_passed % (N_STALE if len(each) >= N_SURE else N_UNSURE) == 0:
                each.forget_worst()
                rows.prices.clear()

    # --- asking ----------------------------------------------------------------------------

    def knows(self, n_rows: int) -> bool:
        """Whether enough plain steps with `n_rows` rows were seen, and not too long ago."""
        rows = self._rows.get(n_rows)
        return rows is not None and not rows.n_wanted

    def plain_s(self, n_rows: int) -> float:
        return self._of(n_rows).plain.median

    def change(self, n_rows: int) -> float:
        """What changing to wide steps and back costs each of them, in plain steps."""
        change = self._of(n_rows).change
        return change.believed(PRIOR_CHANGE) / max(self._episode, 1.0)

    def is_measured(self, n_rows: int, width: int) -> bool:
        return bool(self._of(n_rows).wide.get(self._traits.shape(width)))

    def price(self, n_rows: int, width: int) -> float:
        """What a wide step costs, in plain steps: measured, interpolated, or the device's prior.

        Never less than one: where it seems so, the plain steps were of a slower moment, or could be as
        fast. Drafts that are wrong must not be tried for it.
        """
        if width == 1:
            return 1.0
        prices = self._of(n_rows).prices
        if width not in prices:
            prices[width] = max(self._price(n_rows, self._traits.shape(width)), 1.0)
        return prices[width]

    def _price(self, n_rows: int, width: int) -> float:
        rows = self._of(n_rows)
        if rows.wide.get(width):
            return self._measured_price(n_rows, width)
        seen = {w: self._measured_price(n_rows, w) for w, times in rows.wide.items() if times}
        below = max((w for w in seen if w < width), default=1)
        above = min((w for w in seen if w > width), default=None)
        if above is None:
            return seen.get(below, 1.0) * self._prior(n_rows, width) / self._prior(n_rows, below)
        low = seen[below] if below > 1 else min(1.0 + self._traits.flat, seen[above])
        return low + (width - below) / (above - below) * (seen[above] - low)

    def _measured_price(self, n_rows: int, width: int) -> float:
        rows = self._of(n_rows)
        plain_s = rows.plain.median
        return rows.wide[width].believed(self._prior(n_rows, width) * plain_s) / plain_s

    def lowest_price(self, n_rows: int, width: int) -> float:
        """Its price if it differs from those of other widths only as much as is usual on this device:
        its own measurements may be out of date, or of one bad moment. Its own price if they are new."""
        if self._of(n_rows).newest.count(self._traits.shape(width)) >= N_SURE:
            return self.price(n_rows, width)
        shapes = {self._traits.shape(w) for w in self._traits.widths if w > 1}
        own = self._prior(n_rows, self._traits.shape(width))
        best = self.price(n_rows, width)
        for shape in shapes:
            best = min(best, self.price(n_rows, shape) * own / self._prior(n_rows, shape))
        return max(best, 1.0)

    def _prior(self, n_rows: int, width: int) -> float:
        traits = self._traits
        return 1.0 + (traits.flat + traits.slope * n_rows * (width - 1) if width > 1 else 0.0)

    def _of(self, n_rows: int) -> _Measured:
        rows = self._rows.get(n_rows)
        if rows is None:
            rows = self._rows[n_rows] = _Measured()
        return rows


@dataclass(eq=False, slots=True)
class Allowance:
    """What drafts may still lose, in plain steps."""

    steps: float = START

    def earn(self) -> None:
        self.steps = min(self.steps + EARNED, MOST)

    def settle(self, gain: float) -> None:
        """gain: of a step with drafts, or of a change to drafting and back; negative for a loss."""
        self.steps = max(min(self.steps + gain, MOST), LEAST)

    def covers(self, loss: float) -> bool:
        return self.steps > 0.0 and self.steps >= min(loss, START)


class DraftTimes:
    """Seconds per token that the costly drafter takes, by the number of rows."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._begun: set[int] = set()

    def saw(self, n_rows: int, seconds: float) -> bool:
        """Returns whether the measurement counts: the first includes the time to prepare."""
        if n_rows not in self._begun:
            self._begun.add(n_rows)
            return False
        known = self._seconds.get(n_rows, seconds)
        rate = SLOWER_RATE if seconds > known else FASTER_RATE
        self._seconds[n_rows] = known + rate * (min(seconds, MAX_OFF * known) - known)
        return True

    def of(self, n_rows: int) -> float:
        """What is believed; for a number of rows that was never measured, the least of the others."""
        least = min(self._seconds.values(), default=0.0)
        return self._seconds.get(n_rows, least)

    def forgive(self) -> None:
        """The drafter was not asked: believe it a little cheaper, so that it is tried again."""
        for n_rows in self._seconds:
            self._seconds[n_rows] *= FADING


class GuessTimes:
    """What it takes the host to draft for a row with a free drafter, and not to try the draft."""

    def __init__(self) -> None:
        self._draft_s = self._decide_s = 0.0

    def saw(self, seconds: float) -> None:
        """To draft for one row."""
        self._draft_s += GUESS_RATE * (seconds - self._draft_s)

    def passed_over(self, seconds: float) -> None:
        """To decide that no draft of any row is worth a try."""
        self._decide_s += GUESS_RATE * (seconds - self._decide_s)

    def rest(self, n_rows: int, plain_s: float) -> int:
        """How many steps to skip between two drafts of a row, so that all rows together take little of a
        plain step."""
        share = (self._draft_s + self._decide_s) * n_rows / plain_s
        return min(max(math.ceil(share / MAX_GUESSING) - 1, 0), MAX_REST)


@dataclass(eq=False, slots=True)
class Odds:
    """How often drafted tokens were right, by kind."""

    _right: dict[Kind, float] = field(default_factory=dict)
    _all: dict[Kind, float] = field(default_factory=dict)

    def saw(self, kind: Kind, is_right: bool) -> None:
        n = self._all.get(kind, 0.0)
        fading = min(1.0, MEMORY / (n + 1.0))
        self._all[kind] = n * fading + 1.0
        self._right[kind] = self._right.get(kind, 0.0) * fading + is_right

    def fade(self, kinds: Iterable[Kind]) -> None:
        """These kinds were not tried: what is known of them counts a little less."""
        for kind in kinds:
            if kind in self._all:
                self._all[kind] *= FADING
                self._right[kind] *= FADING

    def of(self, kind: Kind, prior: float) -> float:
        right, n = self._right.get(kind, 0.0), self._all.get(kind, 0.0)
        return (right + PRIOR_WEIGHT * prior) / (n + PRIOR_WEIGHT)


@dataclass(frozen=True, slots=True)
class ExpectedTokens:
    """For one row and one step. n_pending: tokens that the row must be fed anyway. gains[k]: how many
    tokens it is expected to take with k drafted ones."""

    n_pending: int = 1
    gains: tuple[float, ...] = (1.0,)

    @classmethod
    def of(cls, odds: Iterable[float], *, n_pending: int = 1) -> ExpectedTokens:
        """odds: that each drafted token is right, given that those before it are."""
        gains, chance = [1.0], 1.0
        for p in odds:
            chance *= p
            gains.append(gains[-1] + chance)
            if chance < HOPELESS:
                break
        return cls(n_pending, tuple(gains))

    def tokens(self, width: int) -> float:
        """Expected from a step this wide."""
        n_drafted = min(max(width - self.n_pending, 0), len(self.gains) - 1)
        return self.gains[n_drafted]


NO_TOKENS = ExpectedTokens()
"""Of a row without drafts."""


@dataclass(frozen=True, slots=True)
class BestWidth:
    """width: of the next step. rate: tokens expected from it, per row and plain step."""

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
    """The width that yields the most tokens a second; 1 where no drafts pay.

    A row drafts what the width leaves after the tokens that it must be fed. step_in_flight: drafts would
    give it up. explores: try widths that may have become cheaper. draft_s: how long drafting takes for a
    step of this width.
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
