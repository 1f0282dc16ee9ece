"""Several tokens per step: which drafter to ask, how many tokens to try, how they turned out.

Free drafters draft after every token. Drafts that are not tried are still compared with the tokens
the row takes, so their odds are known before the first one costs anything. Until then plain steps
are pipelined: one is launched while the one before it is computed. Drafting needs the newest token
on the host, so a step with drafts is read before the next one is launched. A group changes to such
steps, for an episode, when the expected gain of its drafts exceeds the cost of the change.

Tokens that can hardly be wrong come first: those that are forced (the end of a thinking budget) or
that a grammar leaves no choice about. Then the drafters are asked, the free ones first.

Owner: the engine thread, through the runner.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial

from firn.core.errors import may_be_device_fault
from firn.core.values import Job
from firn.models.decode.batch import Group, Row, StepInFlight, TakenTokens
from firn.models.decode.pipelined import DraftsAhead
from firn.models.decode.ragged import MAX_FEED
from firn.models.decode.step_profile import PLAIN_PROFILE, StepProfile
from firn.models.speculation.draft_bounds import forced_next, is_bound, within
from firn.models.speculation.draft_odds import NO_TOKENS, ExpectedTokens, Odds
from firn.models.speculation.draft_totals import DraftTotals
from firn.models.speculation.drafters import NO_DRAFT, Draft, Drafter
from firn.models.speculation.gate import Allowance, DraftTimes, Overhead, best_width
from firn.models.speculation.step_clock import StepClock
from firn.models.speculation.step_times import MAX_OUTLIER, N_AGED, StepTimes

log = logging.getLogger("firn.models")

MAX_DRAFT = MAX_FEED - 1
SURE, SURE_ODDS = -1, 0.999
"""Source and odds of drafted tokens that are forced."""
GRAMMAR, GRAMMAR_ODDS = -2, 0.95
"""The same for text that a grammar leaves no choice about. The model may split it into other tokens."""
N_PASSED = 4
"""A row for which N_PASSED times in a row there was no draft worth trying is skipped for a while, if
drafting takes long."""
MAX_COSTLY = 8
"""The most tokens that the costly drafter is asked for."""
FAULT_REST_S = 600.0
"""How long a costly drafter stays out of use after a failure: one that always fails must not look
like a failing device."""


@dataclass(eq=False, slots=True)
class RowDrafts:
    """The drafts of one row. next: the draft after its newest known token, by drafter `source`.

    has_costly: the costly drafter drafts for this row, too. is_ready: it has read the row's text.
    rest: steps until the free drafters are asked again. untold: tokens not yet passed on to them.
    n_passed: how many times in a row there was no draft, or none worth trying.
    """

    odds: Odds = field(default_factory=Odds)
    next: Draft = NO_DRAFT
    source: int = 0
    has_costly: bool = False
    is_ready: bool = False
    rest: int = 0
    untold: list[int] = field(default_factory=list)
    n_passed: int = 0


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
    ) -> None:
        """drafters: at most one may be costly (not free). in_groups: whether rows that take unequal
        numbers of tokens can share a group. profile: the device's."""
        self.totals = DraftTotals()
        self.profile = profile
        self.times = StepTimes(profile)
        self.allowance = Allowance()
        self._drafters = drafters
        self._free = [i for i, d in enumerate(drafters) if d.is_free]
        self._costly = next((i for i, d in enumerate(drafters) if not d.is_free), None)
        self._max_draft = min(profile.widths[-1] - 1, MAX_DRAFT)
        self.in_groups = in_groups
        self._clock = clock
        self.step_clock = StepClock(self.times, self.allowance, clock)
        self._odds = Odds()
        self._rows: dict[Row, RowDrafts] = {}
        self._draft_times = DraftTimes()
        self._overhead = Overhead()
        self._costly_overhead = Overhead()
        self._costly_rest = 0
        """Steps until the costly drafter is considered again."""
        self._n_costly_passed = 0
        self._costly_from = 0.0
        """When the costly drafter may be used again after a failure."""

    # --- rows ------------------------------------------------------------------------------

    def open(self, row: Row, job: Job) -> None:
        self.disturbed()
        if job.speculates:
            drafted = self._rows[row] = RowDrafts()
            for i in self._free:
                self._drafters[i].open(row, job)
            if self._costly is not None and self._clock() >= self._costly_from:
                with self._costly_work():
                    self._drafters[self._costly].open(row, job)
                    drafted.has_costly = True

    def took(self, row: Row, tokens: Sequence[int]) -> None:
        """The row's reply continues with these tokens: score its draft by them, and draft again."""
        drafted = self._rows.get(row)
        if drafted is None:
            return
        draft, source = drafted.next, drafted.source
        for token, expected, kind in zip(tokens, draft.tokens, draft.kinds, strict=False):
            if source != SURE:
                self._odds.saw((source, kind), token == expected)
                drafted.odds.saw((source, kind), token == expected)
            if token != expected:
                break
        if self._costly is not None:
            self._drafters[self._costly].took(row, tokens)
        drafted.untold += tokens
        drafted.next, drafted.source = NO_DRAFT, 0
        if drafted.rest:
            drafted.rest -= 1
        else:
            began = self._clock()
            self._draft_for_free(row, drafted)
            self._overhead.draft.add(self._clock() - began)
            drafted.n_passed += not drafted.next.tokens
            drafted.rest = self._rest(row, drafted)

    def _tell(self, row: Row, drafted: RowDrafts) -> None:
        """Pass on to the free drafters the tokens that the row took while it rested."""
        if drafted.untold:
            for i in self._free:
                self._drafters[i].took(row, drafted.untold)
            drafted.untold = []

    def close(self, row: Row) -> None:
        drafted = self._rows.pop(row, None)
        if drafted is not None:
            self.disturbed()
            self._tell(row, drafted)
            for drafter in self._drafters:
                drafter.close(row)

    def end(self) -> None:
        """The engine is stopping."""
        self._rows.clear()
        for drafter in self._drafters:
            drafter.end()

    # --- steps -----------------------------------------------------------------------------

    def propose(self, group: Group, read_all: Callable[[], None]) -> list[tuple[int, ...]] | None:
        """One draft for each seat, or None for a step of one token each.

        read_all: brings every token of the group to the host, and calls `observe` for each step.
        """
        if len(group.seats) > 1 and not self.in_groups:
            return None
        known = [(row, d) for row in group.rows if (d := self._rows.get(row)) is not None]
        # A row whose cache is still empty cannot be rewound.
        if not known or not all(row.n_tokens for row in group.seats):
            return None
        self._prepare(known)
        if group.has_step_in_flight:
            has_drafts = any(d.next.tokens for _, d in known)
            if self._costly is None or self._costly_rest:
                self._costly_rest = max(self._costly_rest - 1, 0)
                if not has_drafts:
                    return None
            began = self._clock()
            if self._width(group, step_in_flight=True).width == 1:
                self._pass_over(group, known, began)
                return None
            with self.step_clock.draining():
                read_all()
        for row, drafted in known:
            if not drafted.next.tokens or is_bound(row):  # it rested, or tokens may be forced now
                self._draft_for_free(row, drafted)
            drafted.next = within(row, drafted.next)
        best = self._width(group)
        if best.width == 1:
            return None
        if best.asks:
            self._ask(best)
        drafts: list[tuple[int, ...]] = []
        for row in group.seats:
            of_row = self._rows.get(row)
            if of_row is None:
                drafts.append(())
                continue
            of_row.n_passed = 0
            drafts.append(of_row.next.cut(max(best.width - len(row.pending), 0)).tokens)
        return drafts if any(drafts) else None

    def propose_ahead(self, group: Group, width: int) -> DraftsAhead | None:
        """What to feed each seat after the step in flight, which has this width. None: no drafts
        pay off, or most of them are too short."""
        known = [(row, d) for row in group.rows if (d := self._rows.get(row)) is not None]
        if self._costly is not None or not known:
            return None
        for row, drafted in known:
            if not drafted.next.tokens:
                self._draft_for_free(row, drafted)
        best = self._width(group).width
        if best == 1:
            return None
        next_width = self.profile.shape(best)
        n_most = width + next_width - 1
        of = {row: within(row, drafted.next.cut(n_most)).tokens for row, drafted in known}
        texts = tuple(of.get(row, ()) for row in group.seats)
        n_enough = sum(len(text) == n_most for text in texts)
        return DraftsAhead(next_width, texts) if 2 * n_enough > sum(map(bool, texts)) else None

    def observe(self, group: Group, taken: Sequence[TakenTokens], step: StepInFlight) -> None:
        """A step's tokens were read: learn what it cost and how good its drafts were."""
        self.step_clock.read(group, taken, step)
        self.totals.count_step(taken)
        for each in taken:
            if each.row.group is group:
                self.totals.count_row(each)
                self.took(each.row, each.tokens)

    def counters(self) -> dict[str, int]:
        return self.totals.view()

    def disturbed(self) -> None:
        """The device computes something else, or the rows change: past decisions may not hold."""
        self.step_clock.disturbed()
        self._costly_rest = 0

    # --- drafts ----------------------------------------------------------------------------

    def _draft_for_free(self, row: Row, drafted: RowDrafts) -> None:
        """Draft what comes next from free sources: forced tokens, the grammar, free drafters."""
        sure: Sequence[int] = forced_next(row)
        source = SURE
        if not sure and row.picker is not None and row.picker.constraint is not None:
            sure, source = row.picker.constraint.forced(MAX_DRAFT), GRAMMAR
        if sure:
            tokens = tuple(sure[:MAX_DRAFT])
            drafted.next, drafted.source = Draft(tokens, (0,) * len(tokens)), source
            return
        drafted.next, drafted.source = NO_DRAFT, 0
        if row.forced:  # further ahead: they will be the draft soon
            return
        self._tell(row, drafted)
        for i in self._free:
            draft = self._drafters[i].draft([row], self._max_draft)[0]
            if draft.tokens:
                drafted.next, drafted.source = draft, i
                return

    def _rest(self, row: Row, drafted: RowDrafts) -> int:
        """For how many steps to skip the row, because drafting takes host time."""
        return self._rest_of(row, drafted) if self._free and not is_bound(row) else 0

    def _rest_of(self, row: Row, drafted: RowDrafts) -> int:
        n_seats = len(row.group.seats) if row.group is not None else 0
        if drafted.n_passed < N_PASSED or not self.times.knows(n_seats):
            return 0
        return self._overhead.rest(len(self._rows), self.times.plain_s(n_seats))

    def _prepare(self, known: Sequence[tuple[Row, RowDrafts]]) -> None:
        """Let the costly drafter read on for one row that is not ready. Only one: all rows wait."""
        if self._costly is None:
            return
        late = [(row, d) for row, d in known if d.has_costly and not d.is_ready]
        if late:
            row, drafted = late[self.totals.n_steps % len(late)]
            with self._costly_work():
                drafted.is_ready = self._drafters[self._costly].prepare(row)

    def _ask(self, best: DraftPlan) -> None:
        """Ask the costly drafter for drafts of the rows that gain by them."""
        assert self._costly is not None
        n = best.width - 1
        drafts: Sequence[Draft] = ()
        began = self._clock()
        with self._costly_work():
            drafts = self._drafters[self._costly].draft(best.asks, n)
        if not drafts:  # it failed
            return
        took_s = self._clock() - began
        for row, draft in zip(best.asks, drafts, strict=True):
            drafted = self._rows[row]
            drafted.is_ready = bool(draft.tokens)
            drafted.next, drafted.source = within(row, draft), self._costly
        group = best.asks[0].group
        n_seats = len(group.seats) if group else 0
        if self._draft_times.saw(len(best.asks), took_s / max(n, 1)) and self.times.knows(n_seats):
            self.allowance.settle(-min(took_s / self.times.plain_s(n_seats), MAX_OUTLIER))

    @contextmanager
    def _costly_work(self) -> Iterator[None]:
        """Time spent inside does not count as a step's, and a fault costs drafts, not the request.

        A fault that may be the device's concerns all rows and is raised; they are computed again
        without the drafter.
        """
        try:
            with self.step_clock.paused():
                yield
        except Exception as e:
            self._drop_costly(e)
            if may_be_device_fault(e):
                raise

    def _drop_costly(self, error: Exception) -> None:
        """Detach the costly drafter from all rows: everything it was computing may have failed."""
        assert self._costly is not None
        drafter = self._drafters[self._costly]
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

    def _width(self, group: Group, *, step_in_flight: bool = False) -> DraftPlan:
        """The best width of the next step, with free drafts alone or with the costly drafter's.

        step_in_flight: a step has been launched whose tokens have not been read.
        """
        considers_costly = self._costly is not None and not (step_in_flight and self._costly_rest)
        if not considers_costly and not any(
            self._rows[r].next.tokens for r in group.rows if r in self._rows
        ):
            return DraftPlan(1)
        n_seats, free, asks = len(group.seats), [], []
        mixed: list[ExpectedTokens] = []
        for row in group.rows:
            drafted = self._rows.get(row)
            # With a step in flight, the first drafted token predicts the result of that step.
            n_pending = 1 if step_in_flight else len(row.pending)
            expected = self._expected_of_free(drafted, n_pending)
            free.append(expected)
            costly = self._expected_of_costly(row, drafted, n_pending) if considers_costly else None
            if costly is not None and costly.tokens(MAX_COSTLY) > expected.tokens(MAX_COSTLY):
                asks.append(row)
                expected = costly
            mixed.append(expected)
        choose = partial(
            best_width,
            self.times,
            n_seats=n_seats,
            widths=self.profile.widths,
            step_in_flight=step_in_flight,
            allowance=self.allowance,
        )
        best = choose(free)
        if asks:
            per_token = self._draft_times.of(len(asks))
            with_costly = choose(mixed, draft_s=lambda width: per_token * (width - 1))
            if with_costly.width > 1 and with_costly.rate > best.rate:
                self.times.expect(n_seats, with_costly.rate)
                return DraftPlan(with_costly.width, tuple(asks))
        if best.width > 1:
            self.times.expect(n_seats, best.rate)
        return DraftPlan(best.width)

    def _expected_of_free(self, drafted: RowDrafts | None, n_pending: int) -> ExpectedTokens:
        if drafted is None or not drafted.next.tokens:
            return NO_TOKENS if n_pending == 1 else ExpectedTokens(n_pending)
        if drafted.source == SURE:
            return ExpectedTokens.of([SURE_ODDS] * len(drafted.next.tokens), n_pending=n_pending)
        kinds = drafted.next.kinds
        odds = {kind: self._chance(drafted, drafted.source, kind) for kind in set(kinds)}
        return ExpectedTokens.of(map(odds.__getitem__, kinds), n_pending=n_pending)

    def _expected_of_costly(
        self, row: Row, drafted: RowDrafts | None, n_pending: int
    ) -> ExpectedTokens | None:
        if self._costly is None or drafted is None or not drafted.is_ready or row.forced:
            return None
        if drafted.source < 0 and drafted.next.tokens:
            return None
        odds = [self._chance(drafted, self._costly, i) for i in range(MAX_COSTLY)]
        return ExpectedTokens.of(odds, n_pending=n_pending)

    def _chance(self, drafted: RowDrafts, source: int, kind: int) -> float:
        prior = GRAMMAR_ODDS if source == GRAMMAR else self._drafters[source].odds(kind)
        return drafted.odds.of((source, kind), self._odds.of((source, kind), prior))

    def _pass_over(
        self, group: Group, known: Sequence[tuple[Row, RowDrafts]], began: float
    ) -> None:
        """No draft of any row is worth trying; that decision began at `began`."""
        n_seats, considered = len(group.seats), self._costly is not None and not self._costly_rest
        for _, drafted in known:
            drafted.n_passed += bool(drafted.next.tokens)
        if not considered:
            self._overhead.decide.add(self._clock() - began)
            return
        assert self._costly is not None
        self._n_costly_passed += 1
        if self._n_costly_passed % N_AGED == 0:
            self._draft_times.age()
        kinds = [(self._costly, i) for i in range(MAX_COSTLY)]
        self._odds.fade(kinds)
        for _, drafted in known:
            drafted.odds.fade(kinds)
        self._costly_overhead.decide.add(self._clock() - began)
        self._costly_rest = self._rest_of_costly(n_seats)

    def _rest_of_costly(self, n_seats: int) -> int:
        """For how many steps not to consider the costly drafter: that takes host time, too."""
        if not self.times.knows(n_seats):
            return 0
        return self._costly_overhead.rest(1, self.times.plain_s(n_seats))
