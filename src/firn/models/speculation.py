"""Several tokens a step: who guesses, how much is tried, what came of it.

Rows whose guesses are not tried cost nothing on the device: what a drafter would have said is compared
with what the row says anyway, so the odds are known before the first draft is paid for. Drafts need the
newest token on the host, so a group that drafts has no step in flight; it changes over when its drafts
promise more than that costs.

    sure guesses first     tokens that are forced (a thinking budget's end), or that a grammar leaves no
                           choice about; then the drafter's

Owner: the engine thread, through the runner.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from firn.core.values import Job
from firn.models.drafters import NOTHING, Drafter, Guess
from firn.models.gate import Hope, Odds, StepTimes, best_width
from firn.models.ragged import MAX_FEED

if TYPE_CHECKING:
    from firn.models.batch import Group, Row
    from firn.models.verify import Taken

MAX_DRAFT = 16
SURE, SURE_ODDS = -1, 0.999
"""The kind of a guess that hardly can be wrong."""


@dataclass(eq=False, slots=True)
class Record:
    """One row's guesses. `next` is what was guessed behind its newest known token."""

    odds: Odds = field(default_factory=Odds)
    next: Guess = NOTHING


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
        drafter: Drafter,
        *,
        in_groups: bool = True,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """in_groups: whether rows that take unequal numbers of tokens can share a group."""
        self.totals = Totals()
        self.times = StepTimes()
        self._drafter = drafter
        self._in_groups = in_groups
        self._clock = clock
        self._odds = Odds()
        self._rows: dict[Row, Record] = {}
        self._heard_at: dict[int, float] = {}
        """By group: when its newest tokens came, unless something else was computed since."""

    # --- rows ------------------------------------------------------------------------------

    def open(self, row: Row, job: Job) -> None:
        self.disturbed()
        if job.speculates:
            self._rows[row] = Record()
            self._drafter.open(row, job)

    def took(self, row: Row, tokens: Sequence[int]) -> None:
        """The row's reply goes on with these: how good were the guesses, and what are the next?"""
        record = self._rows.get(row)
        if record is None:
            return
        guess = record.next
        for token, guessed, kind in zip(tokens, guess.tokens, guess.kinds, strict=False):
            if kind != SURE:
                self._odds.saw(kind, token == guessed)
                record.odds.saw(kind, token == guessed)
            if token != guessed:
                break
        self._drafter.took(row, tokens)
        record.next = self._guess(row)

    def close(self, row: Row) -> None:
        if self._rows.pop(row, None) is not None:
            self.disturbed()
            self._drafter.close(row)

    # --- steps -----------------------------------------------------------------------------

    def plan(self, group: Group, hear: Callable[[], None]) -> list[tuple[int, ...]] | None:
        """One draft for each seat, or None for a step of one token each.

        hear: has every token of the group on the host, and tells `took` of them.
        """
        n_seats = len(group.seats)
        if n_seats > 1 and not self._in_groups:
            return None
        if group.unread:
            if self._width(group) == 1:
                self.times.forgive(n_seats)
                return None
            hear()
        for row in group.rows:
            if record := self._rows.get(row):
                record.next = _within(row, self._guess(row))
        width = self._width(group)
        if width == 1:
            return None
        drafts = []
        for row in group.seats:
            record = self._rows.get(row)
            draft: tuple[int, ...] = ()
            if record is not None:
                record.next = record.next.cut(max(width - len(row.pending), 0))
                draft = record.next.tokens
            drafts.append(draft)
        return drafts if any(drafts) else None

    def heard(self, group: Group, taken: Sequence[Taken], width: int) -> None:
        """A step's tokens have come."""
        now = self._clock()
        before = self._heard_at.get(id(group))
        self._heard_at[id(group)] = now
        if before is not None:
            self.times.saw(len(group.seats), width, now - before)
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

    def disturbed(self) -> None:
        """Something else is computed: the time until the next tokens says nothing."""
        self._heard_at.clear()

    # --- guesses ---------------------------------------------------------------------------

    def _width(self, group: Group) -> int:
        hopes = []
        for row in group.rows:
            record = self._rows.get(row)
            # Of a row with a step in flight, the first guess is about that one.
            n_pending = 1 if group.unread else len(row.pending)
            odds = [] if record is None else [self._chance(record, k) for k in record.next.kinds]
            hopes.append(Hope.of(odds, n_pending=n_pending))
        return best_width(self.times, hopes, n_seats=len(group.seats))

    def _chance(self, record: Record, kind: int) -> float:
        if kind == SURE:
            return SURE_ODDS
        return record.odds.of(kind, self._odds.of(kind, self._drafter.odds(kind)))

    def _guess(self, row: Row) -> Guess:
        sure = _forced(row)
        if not sure and row.picker is not None and row.picker.constraint is not None:
            sure = row.picker.constraint.forced()
        if sure:
            tokens = tuple(sure[:MAX_DRAFT])
            return Guess(tokens, (SURE,) * len(tokens))
        if row.forced:  # soon, unless the caller thinks better of it before the row is there
            return NOTHING
        return self._drafter.guess([row], MAX_DRAFT)[0]


def _forced(row: Row) -> list[int]:
    """What is given of the row's next tokens."""
    if not row.forced:
        return []
    found, at = [], row.n_tokens + len(row.pending)
    while at in row.forced:
        found.append(row.forced[at])
        at += 1
    return found


def _within(row: Row, guess: Guess) -> Guess:
    """As much of it as the row can take: its end, its length and its grammar are not guessed over."""
    n = min(len(guess.tokens), row.limit - row.n_tokens - len(row.pending) - 1)
    n = min(n, MAX_FEED - len(row.pending))
    n = next((i for i, t in enumerate(guess.tokens[: max(n, 0)]) if t in row.ends), max(n, 0))
    constraint = row.picker.constraint if row.picker else None
    if n and constraint is not None:
        n = constraint.permitted(guess.tokens[:n])
    return guess.cut(n)
