"""What a step costs, for each number of rows and each width, measured while serving.

A price is relative to plain steps with the same number of rows. A plain step computes one token per
row while the next step is already in flight, as without speculation. The price of a wide step
includes the loss of that overlap: it may have to be read before the next one is launched.

The speed of a host can change from one second to the next. So seconds are kept, not ratios, and a price
follows the newest steps of both kinds.

Owner: the engine thread, through the speculation.
"""

from __future__ import annotations

import statistics
from collections import Counter, deque
from dataclasses import dataclass, field

from firn.models.decode.step_profile import StepProfile

N_KEPT = 9
"""Measurements kept of each kind. Their median is used, so a single slow step has no effect."""
N_PLAIN = 3
"""Plain steps to measure before any draft is tried."""
N_SURE = 3
"""With this many measurements, the prior is ignored."""
N_STALE, N_UNSURE = 128, 32
"""After this many steps whose drafts were all passed over, each width, and the change to wide
steps, forgets its most expensive measurement: whatever slowed it down may be over. N_UNSURE is for
those with few measurements, which may all come from one bad moment."""
N_UNSEEN, N_DOUBTFUL = 512, 16
"""Wide steps after which plain ones are measured again: N_UNSEEN if the gain is clear. Otherwise it
may be an illusion, because plain steps that were measured in a slow moment make drafts look good:
then N_DOUBTFUL, doubled up to N_UNSEEN each time the plain steps confirm their estimate."""
CLEAR_GAIN, AS_BELIEVED = 1.6, 0.8
"""A gain too large to be an illusion; the share of an estimate down to which it is confirmed."""
N_FRESH = 16
"""A width that is not among this many newest measurements was measured under other conditions. All its
old measurements together then count as one."""
PRIOR_CHANGE = 0.3
PRIOR_EPISODE, EPISODE_RATE, MAX_EPISODE = 2.0, 0.2, 16.0
MAX_OUTLIER_FACTOR = 4.0
"""A single measurement counts as at most this many times the estimate before it."""
MAX_PREPARING = 1.6
"""The most that a step of a new shape is charged, in plain steps: it compiles kernels once."""


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
        """Keep only the median."""
        if self._values:
            self._values = deque([self.median], maxlen=N_KEPT)

    def forget_worst(self) -> None:
        if self._values:
            self._values.remove(max(self._values))
            self._median = None

    def estimate(self, prior: float) -> float:
        """The estimate: the median, padded with the prior while there are few measurements."""
        if len(self._values) >= N_SURE:
            return self.median
        return statistics.median([*self._values, *[prior] * (N_SURE - len(self._values))])

    @property
    def median(self) -> float:
        """The lower of two middle values: a machine can be slow by accident, but not fast."""
        if self._median is None:
            self._median = statistics.median_low(self._values)
        return self._median


@dataclass(eq=False, slots=True)
class _Measured:
    """For one number of rows: the seconds of plain steps and, by width, of wide ones.

    change: what changing to wide steps and back costs, in plain steps. newest: the widths of the newest
    measurements.
    """

    plain: Recent = field(default_factory=Recent)
    wide: dict[int, Recent] = field(default_factory=dict)
    change: Recent = field(default_factory=Recent)
    newest: deque[int] = field(default_factory=lambda: deque(maxlen=N_FRESH))
    n_seen: Counter[int] = field(default_factory=Counter)
    n_wanted: int = N_PLAIN
    """Plain steps to measure before drafts are tried again."""
    n_since_plain: int = 0
    n_trusted: int = N_DOUBTFUL
    """Wide steps after which the plain estimate is doubted, unless the gain is clear."""
    gain: float = 1.0
    """Tokens per row expected from the newest drafts in the time of a plain step."""
    doubted_s: float = 0.0
    """The estimate of plain steps that is in doubt until they are measured again; 0: none is."""
    n_passed: int = 0
    prices: dict[int, float] = field(default_factory=dict)
    """By width. Derived from the measurements, and cleared when one is added."""


class StepTimes:
    """How long steps take, for each number of rows."""

    def __init__(self, profile: StepProfile) -> None:
        self._profile = profile
        self._rows: dict[int, _Measured] = {}
        self._episode = PRIOR_EPISODE

    # --- learning --------------------------------------------------------------------------

    def saw_plain(self, n_rows: int, seconds: float) -> None:
        """seconds: from reading a plain step's tokens to the next one's, which was in flight."""
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
        """Returns what the step cost, in plain steps; None if those have not been measured yet.
        With enough measurements that is the price of its width: plain steps can be slow, too.

        is_new: it had a new shape, and took longer than later steps of that shape will.
        """
        rows = self._of(n_rows)
        rows.n_since_plain += 1
        rows.n_passed = 0
        rows.n_seen[width] += 1
        if not rows.plain:
            return None
        measured, before = seconds / rows.plain.median, self.price(n_rows, width)
        if is_new or rows.n_seen[width] <= self._profile.n_preparing:
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
        return price if len(known) >= N_SURE else min(measured, MAX_OUTLIER_FACTOR * before)

    def expect(self, n_rows: int, gain: float) -> None:
        """The next drafts are expected to yield this many tokens in the time of a plain step."""
        self._of(n_rows).gain = gain

    def saw_episode(self, n_rows: int, n_steps: int, extra_s: float) -> float:
        """An episode of `n_steps` wide steps is over; changing to it and back took `extra_s`. Returns
        what such a change costs, in plain steps."""
        rows = self._of(n_rows)
        self._episode += EPISODE_RATE * (min(n_steps, MAX_EPISODE) - self._episode)
        if not rows.plain:
            return 0.0
        rows.change.saw(max(extra_s, 0.0) / rows.plain.median)
        return rows.change.estimate(PRIOR_CHANGE)

    def passed_over(self, n_rows: int) -> None:
        """There were drafts, but none was worth trying."""
        rows = self._of(n_rows)
        rows.n_passed += 1
        for each in (*rows.wide.values(), rows.change):
            if rows.n_passed % (N_STALE if len(each) >= N_SURE else N_UNSURE) == 0:
                each.forget_worst()
                rows.prices.clear()

    # --- asking ----------------------------------------------------------------------------

    def knows(self, n_rows: int) -> bool:
        """Whether enough plain steps with this many rows were measured, and recently enough."""
        rows = self._rows.get(n_rows)
        return rows is not None and not rows.n_wanted

    def plain_s(self, n_rows: int) -> float:
        return self._of(n_rows).plain.median

    def change(self, n_rows: int) -> float:
        """What changing to wide steps and back adds to each of them, in plain steps."""
        change = self._of(n_rows).change
        return change.estimate(PRIOR_CHANGE) / max(self._episode, 1.0)

    def is_measured(self, n_rows: int, width: int) -> bool:
        return bool(self._of(n_rows).wide.get(self._profile.shape(width)))

    def price(self, n_rows: int, width: int) -> float:
        """What a wide step costs, in plain steps: measured, interpolated, or from the device's prior.

        Never less than one. Where it seems less, the plain steps were measured in a slower moment, and
        wrong drafts must not be tried because of that.
        """
        if width == 1:
            return 1.0
        prices = self._of(n_rows).prices
        if width not in prices:
            prices[width] = max(self._price(n_rows, self._profile.shape(width)), 1.0)
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
        low = seen[below] if below > 1 else min(1.0 + self._profile.flat, seen[above])
        return low + (width - below) / (above - below) * (seen[above] - low)

    def _measured_price(self, n_rows: int, width: int) -> float:
        rows = self._of(n_rows)
        plain_s = rows.plain.median
        return rows.wide[width].estimate(self._prior(n_rows, width) * plain_s) / plain_s

    def lowest_price(self, n_rows: int, width: int) -> float:
        """What the width would cost if its ratio to the other widths were as usual on this device:
        its own measurements may be old, or come from one bad moment. If they are new, its own
        price."""
        if self._of(n_rows).newest.count(self._profile.shape(width)) >= N_SURE:
            return self.price(n_rows, width)
        shapes = {self._profile.shape(w) for w in self._profile.widths if w > 1}
        own = self._prior(n_rows, self._profile.shape(width))
        best = self.price(n_rows, width)
        for shape in shapes:
            best = min(best, self.price(n_rows, shape) * own / self._prior(n_rows, shape))
        return max(best, 1.0)

    def _prior(self, n_rows: int, width: int) -> float:
        profile = self._profile
        return 1.0 + (profile.flat + profile.slope * n_rows * (width - 1) if width > 1 else 0.0)

    def _of(self, n_rows: int) -> _Measured:
        rows = self._rows.get(n_rows)
        if rows is None:
            rows = self._rows[n_rows] = _Measured()
        return rows
