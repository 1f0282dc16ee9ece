"""Several tokens per step: which drafter to ask, how many tokens to try, how they turned out.

Free drafters draft after every token. Drafts that are not tried are still compared with the tokens
the row takes, so their odds are known before the first one costs anything. Until then plain steps
are pipelined: one is launched while the one before it is computed. Drafting needs the newest token
on the host, so a step with drafts is read before the next one is launched.

What can hardly be wrong comes first (see `bounds`). Then the free drafters are asked in turn, and a
costly one where more is expected of it.

Owner: the engine thread, through the runner.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from firn.core.errors import may_be_device_fault
from firn.core.measure import Median
from firn.core.values import Job
from firn.models.decode.batch import Group, Row, StepInFlight, TakenTokens
from firn.models.decode.pipelined import DraftsAhead
from firn.models.decode.ragged import MAX_FEED
from firn.models.decode.step_profile import PLAIN_PROFILE, StepProfile
from firn.models.speculation.bounds import DECIDED, is_bound, within
from firn.models.speculation.draft_totals import DraftTotals
from firn.models.speculation.drafters import MAX_CHAIN, NO_DRAFT, Draft, Drafter
from firn.models.speculation.gate import Allowance, best_width
from firn.models.speculation.odds import ExpectedTokens, Odds
from firn.models.speculation.step_clock import StepClock
from firn.models.speculation.step_times import N_AGED, StepTimes

log = logging.getLogger("firn.models")

MAX_DRAFT = MAX_FEED - 1
FAULT_REST_S = 600.0
"""How long a costly drafter stays out of use after a failure: one that always fails must not look
like a failing device."""


@dataclass(eq=False, slots=True)
class RowDrafts:
    """The drafts of one row. next: the draft after its newest known token, by drafter `source`.

    has_costly: the costly drafter drafts for this row, too. is_ready: it has read the row's text.
    untold: tokens not yet passed on to the free drafters.
    """

    odds: Odds = field(default_factory=Odds)
    next: Draft = NO_DRAFT
    source: int = 0
    has_costly: bool = False
    is_ready: bool = False
    untold: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """width: tokens of a row in the next step. asks: rows for which the costly drafter is asked."""

    width: int
    asks: tuple[Row, ...] = ()


class Speculation:
    """Implements decode.steps.Speculator."""

    drafts = True

    def __init__(
        self,
        *drafters: Drafter,
        in_groups: bool = True,
        profile: StepProfile = PLAIN_PROFILE,
        clock: Callable[[], float] = time.perf_counter,
        allowance: Callable[[], Allowance] = Allowance,
    ) -> None:
        """drafters: at most one may be costly (not free). in_groups: whether rows that take unequal
        numbers of tokens can share a group. profile: the device's. allowance: what drafts may lose, and
        looking for them."""
        self.totals = DraftTotals()
        self.profile = profile
        self.in_groups = in_groups
        self.times = StepTimes(profile)
        self.allowance, self.looking = allowance(), allowance()
        self.step_clock = StepClock(self.times, self.allowance, clock)
        self.drafters: tuple[Drafter, ...] = (*DECIDED, *drafters)
        self._free = [i for i, d in enumerate(self.drafters) if d.is_free]
        self._costly = next((i for i, d in enumerate(self.drafters) if not d.is_free), None)
        self._max_draft = min(profile.widths[-1] - 1, MAX_DRAFT)
        self._clock = clock
        self._odds = Odds()
        self._rows: dict[Row, RowDrafts] = {}
        self._asked: set[Row] = set()
        """Rows for whose newest step with drafts the costly drafter drafted."""
        self._vain_s = 0.0
        """The host's time to look for drafts and weigh them, since the last step."""
        self._n_looks = 0
        self._look_s = Median()
        """Such a time, for each row: a single one may meet a hiccup of the machine."""
        self._n_passed = 0
        """How often the costly drafter was considered, and not asked."""
        self._costly_from = 0.0
        """When the costly drafter may be used again after a failure."""

    # --- rows ------------------------------------------------------------------------------

    def open(self, row: Row, job: Job) -> None:
        self.disturbed()
        if job.speculates:
            drafted = self._rows[row] = RowDrafts()
            for i in self._free:
                self.drafters[i].open(row, job)
            if self._costly is not None and self._clock() >= self._costly_from:
                with self._costly_work():
                    self.drafters[self._costly].open(row, job)
                    drafted.has_costly = True

    def extend(self, row: Row, tokens: Sequence[int]) -> None:
        """The row's reply continues with these tokens: score its draft by them, and draft again."""
        drafted = self._rows.get(row)
        if drafted is None:
            return
        draft, source = drafted.next, drafted.source
        for token, expected, kind in zip(tokens, draft.tokens, draft.kinds, strict=False):
            self._odds.observe((source, kind), token == expected)
            drafted.odds.observe((source, kind), token == expected)
            if token != expected:
                break
        if self._costly is not None:
            self.drafters[self._costly].extend(row, tokens)
        drafted.untold += tokens
        drafted.next = NO_DRAFT
        if self.looking.is_open:
            self._look(row, drafted)

    def close(self, row: Row) -> None:
        drafted = self._rows.pop(row, None)
        if drafted is not None:
            self.disturbed()
            self._asked.discard(row)
            self._tell(row, drafted)
            for drafter in self.drafters:
                drafter.close(row)

    def end(self) -> None:
        """The engine is stopping."""
        self._rows.clear()
        for drafter in self.drafters:
            drafter.end()

    # --- steps -----------------------------------------------------------------------------

    def propose(self, group: Group, read_all: Callable[[], None]) -> list[tuple[int, ...]] | None:
        """One draft for each seat, or None for a step of one token each.

        read_all: brings every token of the group to the host, and calls `observe` for each step.
        """
        known = [(row, d) for row in group.rows if (d := self._rows.get(row)) is not None]
        # A row whose cache is still empty cannot be rewound.
        can = self.in_groups or len(group.seats) == 1
        if not known or not can or not all(row.n_tokens for row in group.seats):
            return None
        self._prepare(known)
        drafts = self._propose(group, known, read_all)
        plain_s, n_looks = self.times.plain_s(len(group.seats)), self._n_looks
        if drafts is None and plain_s and n_looks:
            self._look_s.add(self._vain_s / n_looks)
            self.looking.add(-self._look_s.value * n_looks / plain_s)
        self._vain_s, self._n_looks = 0.0, 0  # what led to a step with drafts is part of its time
        return drafts

    def _propose(
        self,
        group: Group,
        known: Sequence[tuple[Row, RowDrafts]],
        read_all: Callable[[], None],
    ) -> list[tuple[int, ...]] | None:
        if group.has_step_in_flight:
            with self._weighing():
                if self._plan(group, step_in_flight=True).width == 1:
                    return None
            with self.step_clock.draining():
                read_all()
        with self._weighing():
            for row, drafted in known:
                if is_bound(row) or (not drafted.next.tokens and self.looking.is_open):
                    self._look(row, drafted)  # tokens may be forced now
                drafted.next = within(row, drafted.next)
            plan = self._plan(group)
            if plan.width == 1:
                return None
        self._asked.difference_update(row for row, _ in known)
        self._ask(plan)
        drafts: list[tuple[int, ...]] = []
        for row in group.seats:
            of_row = self._rows.get(row)
            n_most = max(plan.width - len(row.pending), 0)
            drafts.append(() if of_row is None else of_row.next.cut(n_most).tokens)
        return drafts if any(drafts) else None

    def propose_ahead(self, group: Group, width: int) -> DraftsAhead | None:
        """What to feed each seat after the step in flight, which has this width. None: no drafts
        pay off, or most of them are too short."""
        known = [(row, d) for row in group.rows if (d := self._rows.get(row)) is not None]
        if self._costly is not None or not known:
            return None
        for row, drafted in known:
            if not drafted.next.tokens and self.looking.is_open:
                self._look(row, drafted)
        best = self._plan(group).width
        if best == 1:
            return None
        self._vain_s, self._n_looks = 0.0, 0
        next_width = self.profile.shape(best)
        n_most = width + next_width - 1
        of = {row: within(row, drafted.next.cut(n_most)).tokens for row, drafted in known}
        texts = tuple(of.get(row, ()) for row in group.seats)
        n_enough = sum(len(text) == n_most for text in texts)
        return DraftsAhead(next_width, texts) if 2 * n_enough > sum(map(bool, texts)) else None

    def observe(self, group: Group, taken: Sequence[TakenTokens], step: StepInFlight) -> None:
        """A step's tokens were read: learn what it cost and how good its drafts were."""
        self.step_clock.read(group, taken, step, is_asked=any(t.row in self._asked for t in taken))
        self.totals.count_step(taken)
        if step.width == 1:
            self.looking.earn()
        with self._weighing():
            for each in taken:
                if each.row.group is group:
                    self.totals.count_row(each)
                    self.extend(each.row, each.tokens)

    def counters(self) -> dict[str, int]:
        return self.totals.view()

    def disturbed(self) -> None:
        """The device computes something else, or the rows change: past decisions may not hold."""
        self.step_clock.disturbed()

    # --- drafts ----------------------------------------------------------------------------

    def _look(self, row: Row, drafted: RowDrafts) -> None:
        """Draft what comes next from free sources."""
        self._tell(row, drafted)
        self._n_looks += 1
        drafted.next = NO_DRAFT
        for i in self._free:
            draft = self.drafters[i].draft([row], self._max_draft)[0]
            if draft.tokens:
                drafted.next, drafted.source = draft, i
                return

    def _tell(self, row: Row, drafted: RowDrafts) -> None:
        """Pass on to the free drafters what the row took while none of them was asked."""
        if drafted.untold:
            for i in self._free:
                self.drafters[i].extend(row, drafted.untold)
            drafted.untold = []

    @contextmanager
    def _weighing(self) -> Iterator[None]:
        """Time that is lost unless a step with drafts follows."""
        began = self._clock()
        try:
            yield
        finally:
            self._vain_s += self._clock() - began

    def _plan(self, group: Group, *, step_in_flight: bool = False) -> DraftPlan:
        """The best width of the next step, with free drafts alone or with the costly drafter's.

        step_in_flight: a step has been launched whose tokens have not been read.
        """
        has_drafts = any(self._rows[r].next.tokens for r in group.rows if r in self._rows)
        can_ask = self._costly is not None and self.looking.is_open
        if not self.allowance.is_open or not (has_drafts or can_ask):
            return DraftPlan(1)
        self._n_looks += can_ask
        n_seats = len(group.seats)
        free: list[ExpectedTokens] = []
        mixed: list[ExpectedTokens] = []
        asks: list[Row] = []
        for row in group.rows:
            # With a step in flight, the first drafted token predicts the result of that step.
            n_pending = 1 if step_in_flight else len(row.pending)
            expected, costly = self._expected(row, n_pending)
            free.append(expected)
            if costly.tokens(MAX_CHAIN) > expected.tokens(MAX_CHAIN):
                asks.append(row)
                expected = costly
            mixed.append(expected)
        best, asked = best_width(self.times, free, self.allowance, n_seats=n_seats), False
        if asks:
            with_costly = best_width(
                self.times, mixed, self.allowance, n_seats=n_seats, is_asked=True
            )
            if with_costly.rate > best.rate:
                best, asked = with_costly, True
        if best.width > 1:
            self.times.trust(n_seats, best.rate)
        if not asked and self._costly is not None:
            self._pass_over(self._costly, group)
        return DraftPlan(best.width, tuple(asks) if asked else ())

    def _expected(self, row: Row, n_pending: int) -> tuple[ExpectedTokens, ExpectedTokens]:
        """Tokens expected of the row's next step, by its free draft and by the costly drafter's."""
        none, drafted = ExpectedTokens(n_pending), self._rows.get(row)
        if drafted is None:
            return none, none
        kinds, source = drafted.next.kinds, drafted.source
        chances = {kind: self._chance(drafted, source, kind) for kind in set(kinds)}
        free = ExpectedTokens.of(map(chances.__getitem__, kinds), n_pending=n_pending)
        is_decided = bool(row.forced) or (source < len(DECIDED) and bool(kinds))
        if self._costly is None or not drafted.is_ready or is_decided:
            return free, none
        odds = [self._chance(drafted, self._costly, i) for i in range(MAX_CHAIN)]
        return free, ExpectedTokens.of(odds, n_pending=n_pending)

    def _chance(self, drafted: RowDrafts, source: int, kind: int) -> float:
        prior = self.drafters[source].odds(kind)
        return drafted.odds.of((source, kind), self._odds.of((source, kind), prior))

    def _pass_over(self, costly: int, group: Group) -> None:
        """The costly drafter is not asked. What it is worth is not seen then: it is forgotten."""
        self._n_passed += 1
        if self._n_passed % N_AGED == 0:
            for odds in (self._odds, *(self._rows[r].odds for r in group.rows if r in self._rows)):
                odds.age(costly)

    # --- the costly drafter ----------------------------------------------------------------

    def _prepare(self, known: Sequence[tuple[Row, RowDrafts]]) -> None:
        """Let the costly drafter read on for one row that is not ready. Only one: all rows wait."""
        late = [(row, d) for row, d in known if d.has_costly and not d.is_ready]
        if late and self._costly is not None:
            row, drafted = late[self.totals.n_steps % len(late)]
            with self._costly_work():
                drafted.is_ready = self.drafters[self._costly].prepare(row)

    def _ask(self, plan: DraftPlan) -> None:
        """Ask the costly drafter for drafts of the rows that gain by them."""
        self._asked.update(plan.asks)
        if self._costly is None or not plan.asks:
            return
        drafts: Sequence[Draft] = ()
        try:
            drafts = self.drafters[self._costly].draft(plan.asks, plan.width - 1)
        except Exception as e:
            self._failed(e)
        for row, draft in zip(plan.asks, drafts, strict=False):
            drafted = self._rows[row]
            drafted.is_ready = bool(draft.tokens)
            drafted.next, drafted.source = within(row, draft), self._costly

    @contextmanager
    def _costly_work(self) -> Iterator[None]:
        """Time spent inside does not count as a step's."""
        try:
            with self.step_clock.paused():
                yield
        except Exception as e:
            self._failed(e)

    def _failed(self, error: Exception) -> None:
        """Detach the costly drafter from all rows: everything it was computing may have failed.

        A fault costs drafts, not the request. One that may be the device's concerns all rows and is
        raised; they are computed again without the drafter.
        """
        assert self._costly is not None
        drafter = self.drafters[self._costly]
        log.warning(
            "drafting failed (%s): disabled for running requests and for the next %.0f minutes: %r",
            type(drafter).__name__,
            FAULT_REST_S / 60,
            error,
            exc_info=error,
        )
        self._costly_from = self._clock() + FAULT_REST_S
        for row, drafted in self._rows.items():
            drafted.has_costly = drafted.is_ready = False
            with suppress(Exception):
                drafter.close(row)
        if may_be_device_fault(error):
            raise error
