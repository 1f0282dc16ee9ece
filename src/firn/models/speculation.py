"""Several tokens a step: who guesses, how much is tried, what came of it.

Rows whose guesses are not tried cost nothing on the device: what a drafter would have said is compared
with what the row says anyway, so the odds are known before the first draft is paid for, and a step is in
flight as ever. Drafts need the newest token on the host: a group that drafts has no step in flight. It
changes over, for an episode of such steps, when its drafts promise more than that costs.

    plain  plain  plain | wide  wide  wide | plain  plain
                  ^ read early: nothing     ^ comes late: two steps are built before it is read
                    else is in flight

    sure guesses first     tokens that are forced (a thinking budget's end), or that a grammar leaves no
                           choice about; then the drafter's

Owner: the engine thread, through the runner.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from firn.core.values import Job
from firn.models.drafters import NOTHING, Drafter, Guess
from firn.models.gate import Allowance, DraftTimes, ExpectedTokens, Odds, StepTimes, best_width
from firn.models.ragged import MAX_FEED
from firn.models.traits import TRAITS, Traits
from firn.models.verify import Verification

if TYPE_CHECKING:
    from firn.models.batch import Group, Launched, Row
    from firn.models.verify import Taken

MAX_DRAFT = MAX_FEED - 1
SURE, SURE_ODDS = -1, 0.999
"""Source and odds of guesses that can hardly be wrong."""
GRAMMAR, GRAMMAR_ODDS = -2, 0.95
"""Of text that a grammar leaves no choice about, which a model may cut into other tokens."""
EXPLORE_EVERY = 16
"""Every 16th step with drafts tries a width that may have become cheaper than it was."""
WEAK_ODDS, N_REST = 0.4, 3
MAX_CHARGE = 4.0
"""Plain steps that guesses for one step can have taken: more was the machine's doing."""
MAX_COSTLY, COMPARED_WIDTH = 8, 5
"""Guesses of the costly drafter: how many at most; at which width they are compared with free ones."""


@dataclass(eq=False, slots=True)
class RowGuesses:
    """`next` is what the drafter `source` guesses to follow the row's newest known token.

    is_ready: the costly drafter has read the row's text. rest: tokens until the free drafters are asked
    again.
    """

    odds: Odds = field(default_factory=Odds)
    next: Guess = NOTHING
    source: int = 0
    is_ready: bool = False
    rest: int = 0


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """width: tokens of a row in the next step. asks: rows that the costly drafter guesses for."""

    width: int
    asks: tuple[Row, ...] = ()


@dataclass(eq=False, slots=True)
class _Pace:
    """When a group's newest tokens were read. n_wide: steps of several tokens since the last plain one.
    drained_s: that one was read early, for drafts, and took so much longer than others."""

    read_at: float
    n_wide: int = 0
    drained_s: float | None = None


@dataclass(slots=True)
class Totals:
    """Since the start. Other threads may read it."""

    n_steps: int = 0
    n_draft_steps: int = 0
    n_row_steps: int = 0
    n_taken: int = 0
    n_drafted: int = 0
    n_accepted: int = 0

    def view(self) -> dict[str, int]:
        return {
            "steps": self.n_steps,
            "draft_steps": self.n_draft_steps,
            "row_steps": self.n_row_steps,
            "taken": self.n_taken,
            "drafted": self.n_drafted,
            "accepted": self.n_accepted,
        }


class Speculation:
    def __init__(
        self,
        *drafters: Drafter,
        in_groups: bool = True,
        traits: Traits = TRAITS["cpu"],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """drafters: at most one that is not free. in_groups: whether rows that take unequal numbers of
        tokens can share a group. traits: of the device."""
        self.totals = Totals()
        self.traits = traits
        self.times = StepTimes(traits)
        self.allowance = Allowance()
        self._drafters = drafters
        self._free = [i for i, d in enumerate(drafters) if d.is_free]
        self._costly = next((i for i, d in enumerate(drafters) if not d.is_free), None)
        self._max_draft = min(traits.widths[-1] - 1, MAX_DRAFT)
        self.in_groups = in_groups
        self._clock = clock
        self._odds = Odds()
        self._rows: dict[Row, RowGuesses] = {}
        self._draft_times = DraftTimes()
        self._paces: dict[int, _Pace] = {}
        """By group; without those for which the device has computed something else since."""
        self._drains = False

    # --- rows ------------------------------------------------------------------------------

    def open(self, row: Row, job: Job) -> None:
        self.disturbed()
        if job.speculates:
            self._rows[row] = RowGuesses()
            for drafter in self._drafters:
                drafter.open(row, job)

    def took(self, row: Row, tokens: Sequence[int]) -> None:
        """The row's reply goes on with these tokens: judge its guesses by them, and make new ones."""
        guessed = self._rows.get(row)
        if guessed is None:
            return
        guess, source = guessed.next, guessed.source
        for token, expected, kind in zip(tokens, guess.tokens, guess.kinds, strict=False):
            if source != SURE:
                self._odds.saw((source, kind), token == expected)
                guessed.odds.saw((source, kind), token == expected)
            if token != expected:
                break
        for drafter in self._drafters:
            drafter.took(row, tokens)
        guessed.next, guessed.source = NOTHING, 0
        if guessed.rest:
            guessed.rest -= 1
        else:
            self._look(row, guessed)
            guessed.rest = self._rest(row, guessed)

    def close(self, row: Row) -> None:
        if self._rows.pop(row, None) is not None:
            self.disturbed()
            for drafter in self._drafters:
                drafter.close(row)

    def end(self) -> None:
        """The engine stops."""
        self._rows.clear()
        for drafter in self._drafters:
            drafter.end()

    # --- steps -----------------------------------------------------------------------------

    def plan(self, group: Group, read_all: Callable[[], None]) -> list[tuple[int, ...]] | None:
        """One draft for each seat, or None for a step of one token each.

        read_all: brings every token of the group to the host, and calls `count` for each step.
        """
        if len(group.seats) > 1 and not self.in_groups:
            return None
        known = [(row, self._rows[row]) for row in group.rows if row in self._rows]
        # An empty cache has no form yet that could be set back.
        if not known or not all(row.n_tokens for row in group.seats):
            return None
        self._prepare(known)
        if group.unread:
            if self._width(group, flows=True).width == 1:
                self._pass_over(group, known)
                return None
            with self._draining():
                read_all()
        for row, guessed in known:
            self._look(row, guessed)
            guessed.next = _within(row, guessed.next)
        best = self._width(group)
        if best.width == 1:
            return None
        if best.asks:
            self._ask(best)
        drafts: list[tuple[int, ...]] = []
        for row in group.seats:
            found = self._rows.get(row)
            if found is None:
                drafts.append(())
                continue
            n = max(best.width - len(row.pending), 0)
            found.next = found.next.cut(n)
            drafts.append(found.next.tokens)
        return drafts if any(drafts) else None

    def count(self, group: Group, taken: Sequence[Taken], step: Launched | Verification) -> None:
        """A step's tokens were read: learn what the step took and how good its guesses were."""
        self._time(group, taken, step)
        totals = self.totals
        totals.n_steps += 1
        totals.n_draft_steps += any(t.n_drafted for t in taken)
        for each in taken:
            if each.row.group is group:
                totals.n_row_steps += 1
                totals.n_taken += len(each.tokens)
                totals.n_drafted += each.n_drafted
                totals.n_accepted += each.n_right
                self.took(each.row, each.tokens)

    def _time(self, group: Group, taken: Sequence[Taken], step: Launched | Verification) -> None:
        """What the step took, from the tokens before it on."""
        now, n_rows = self._clock(), len(group.seats)
        pace = self._paces.get(id(group))
        if pace is None:
            self._paces[id(group)] = _Pace(now)
            return
        seconds, pace.read_at = now - pace.read_at, now
        if isinstance(step, Verification):
            pace.n_wide += 1
            price = self.times.saw_wide(n_rows, step.width, seconds)
            if price is not None:
                n_taken = sum(len(t.tokens) for t in taken if t.row.group is group)
                self.allowance.settle(n_taken / max(len(group.rows), 1) - price)
            return
        self.allowance.earn()
        has_changed = pace.n_wide or pace.drained_s is not None
        if has_changed and self.times.knows(n_rows):
            extra_s = (pace.drained_s or 0.0) + seconds - self.times.plain_s(n_rows)
            self.allowance.settle(-self.times.saw_episode(n_rows, pace.n_wide, extra_s))
        elif self._drains and self.times.knows(n_rows):
            pace.drained_s = seconds - self.times.plain_s(n_rows)
            return
        elif step.flows:
            self.times.saw_plain(n_rows, seconds)
        pace.n_wide, pace.drained_s = 0, None

    @contextmanager
    def _draining(self) -> Iterator[None]:
        """Steps that are read within are read early, so that drafts can follow."""
        self._drains = True
        try:
            yield
        finally:
            self._drains = False

    def disturbed(self) -> None:
        """The device computes something else: the time until the next tokens says nothing."""
        self._paces.clear()

    # --- guesses ---------------------------------------------------------------------------

    def _look(self, row: Row, guessed: RowGuesses) -> None:
        """Guess what comes next, with whatever costs nothing."""
        sure, source = _forced(row), SURE
        if not sure and row.picker is not None and row.picker.constraint is not None:
            sure, source = row.picker.constraint.forced(), GRAMMAR
        if sure:
            tokens = tuple(sure[:MAX_DRAFT])
            guessed.next, guessed.source = Guess(tokens, (0,) * len(tokens)), source
            return
        guessed.next, guessed.source = NOTHING, 0
        if row.forced:  # soon, unless the caller thinks better of it before the row is there
            return
        for i in self._free:
            guess = self._drafters[i].guess([row], self._max_draft)[0]
            if guess.tokens:
                guessed.next, guessed.source = guess, i
                return

    def _rest(self, row: Row, guessed: RowGuesses) -> int:
        """Guessing takes the host's time: rows whose guesses are weak do it every few tokens only."""
        is_bound = row.forced or (row.picker is not None and row.picker.constraint is not None)
        return N_REST if self._free and not is_bound and self._is_weak(guessed) else 0

    def _is_weak(self, guessed: RowGuesses) -> bool:
        kinds = guessed.next.kinds
        return not kinds or self._chance(guessed, guessed.source, kinds[0]) < WEAK_ODDS

    def _prepare(self, known: Sequence[tuple[Row, RowGuesses]]) -> None:
        """Let one row that is not ready read on. Only one: the others wait meanwhile."""
        if self._costly is None:
            return
        late = [(row, guessed) for row, guessed in known if not guessed.is_ready]
        if late:
            row, guessed = late[self.totals.n_steps % len(late)]
            with self._aside():
                guessed.is_ready = self._drafters[self._costly].prepare(row)

    def _ask(self, best: DraftPlan) -> None:
        """Have the costly drafter guess for the rows that gain by it."""
        assert self._costly is not None
        n = best.width - 1
        began = self._clock()
        with self._aside():
            guesses = self._drafters[self._costly].guess(best.asks, n)
        took_s = self._clock() - began
        for row, guess in zip(best.asks, guesses, strict=True):
            guessed = self._rows[row]
            guessed.is_ready = bool(guess.tokens)
            guessed.next, guessed.source = guess, self._costly
            guessed.next = _within(row, guess)
        group = best.asks[0].group
        n_seats = len(group.seats) if group else 0
        if self._draft_times.saw(len(best.asks), took_s / max(n, 1)) and self.times.knows(n_seats):
            self.allowance.settle(-min(took_s / self.times.plain_s(n_seats), MAX_CHARGE))

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """What is done within does not count as a step's time."""
        began = self._clock()
        yield
        took_s = self._clock() - began
        for pace in self._paces.values():
            pace.read_at += took_s

    def _width(self, group: Group, *, flows: bool = False) -> DraftPlan:
        """The best width of the next step, with free guesses alone or with the costly drafter's.

        flows: a step is in flight, whose token nobody has read.
        """
        if self._costly is None and not any(
            self._rows[r].next.tokens for r in group.rows if r in self._rows
        ):
            return DraftPlan(1)
        n_seats, free, asks = len(group.seats), [], []
        mixed: list[ExpectedTokens] = []
        for row in group.rows:
            guessed = self._rows.get(row)
            # Of a row with a step in flight, the first guess is about that one.
            n_pending = 1 if group.unread else len(row.pending)
            expected = self._expected_of_free(guessed, n_pending)
            free.append(expected)
            costly = self._expected_of_costly(row, guessed, n_pending)
            if costly is not None and costly.tokens(COMPARED_WIDTH) > expected.tokens(
                COMPARED_WIDTH
            ):
                asks.append(row)
                expected = costly
            mixed.append(expected)
        choose = partial(
            best_width,
            self.times,
            n_seats=n_seats,
            widths=self.traits.widths,
            flows=flows,
            explores=self.totals.n_draft_steps % EXPLORE_EVERY == EXPLORE_EVERY - 1,
            allowance=self.allowance,
        )
        best = choose(free)
        if asks:
            per_token = self._draft_times.of(len(asks))
            with_costly = choose(mixed, draft_s=lambda width: per_token * (width - 1))
            if with_costly.width > 1 and with_costly.rate > best.rate:
                return DraftPlan(with_costly.width, tuple(asks))
        return DraftPlan(best.width)

    def _expected_of_free(self, guessed: RowGuesses | None, n_pending: int) -> ExpectedTokens:
        if guessed is None:
            return ExpectedTokens(n_pending)
        if guessed.source == SURE:
            return ExpectedTokens.of([SURE_ODDS] * len(guessed.next.tokens), n_pending=n_pending)
        kinds = guessed.next.kinds
        odds = {kind: self._chance(guessed, guessed.source, kind) for kind in set(kinds)}
        return ExpectedTokens.of([odds[kind] for kind in kinds], n_pending=n_pending)

    def _expected_of_costly(
        self, row: Row, guessed: RowGuesses | None, n_pending: int
    ) -> ExpectedTokens | None:
        if self._costly is None or guessed is None or not guessed.is_ready or row.forced:
            return None
        if guessed.source < 0 and guessed.next.tokens:
            return None
        odds = [self._chance(guessed, self._costly, i) for i in range(MAX_COSTLY)]
        return ExpectedTokens.of(odds, n_pending=n_pending)

    def _chance(self, guessed: RowGuesses, source: int, kind: int) -> float:
        prior = GRAMMAR_ODDS if source == GRAMMAR else self._drafters[source].odds(kind)
        return guessed.odds.of((source, kind), self._odds.of((source, kind), prior))

    def _pass_over(self, group: Group, known: Sequence[tuple[Row, RowGuesses]]) -> None:
        if self._costly is not None or any(guessed.next.tokens for _, guessed in known):
            self.times.passed_over(len(group.seats))
        if self._costly is not None:
            self._draft_times.forgive()
            kinds = [(self._costly, i) for i in range(MAX_COSTLY)]
            self._odds.fade(kinds)
            for _, guessed in known:
                guessed.odds.fade(kinds)


def _forced(row: Row) -> list[int]:
    """The row's next tokens, as far as they are forced."""
    if not row.forced:
        return []
    found, at = [], row.n_tokens + len(row.pending)
    while at in row.forced:
        found.append(row.forced[at])
        at += 1
    return found


def _within(row: Row, guess: Guess) -> Guess:
    """As much of it as the row can take: no guesses past its end token, its limit or its grammar."""
    n = min(len(guess.tokens), row.limit - row.n_tokens - len(row.pending) - 1)
    n = min(n, MAX_FEED - len(row.pending))
    n = next((i for i, t in enumerate(guess.tokens[: max(n, 0)]) if t in row.ends), max(n, 0))
    constraint = row.picker.constraint if row.picker else None
    if n and constraint is not None:
        n = constraint.permitted(guess.tokens[:n])
    return guess.cut(n)
