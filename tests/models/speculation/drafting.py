"""Drafters that are always, never or sometimes right, used whether or not that pays."""

from __future__ import annotations

import random
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from firn.core.values import Job
from firn.models.decode.batch import Group
from firn.models.decode.step_profile import PLAIN_PROFILE, StepProfile
from firn.models.speculation.drafters import NO_DRAFT, Draft, Drafter
from firn.models.speculation.gate import Unlimited
from firn.models.speculation.speculator import DraftPlan, Speculation

Replies = Mapping[tuple[tuple[int, ...], int], Sequence[int]]
"""Replies by prompt and choice number."""


class KnownReplies:
    """Knows every reply beforehand, and drafts each token right with probability `right`."""

    is_free = True

    def __init__(self, replies: Replies, *, right: float, vocab_size: int, seed: int = 0) -> None:
        self._replies = replies
        self._right = right
        self._vocab_size = vocab_size
        self._rng = random.Random(seed)
        self._known: dict[Hashable, tuple[Sequence[int], int]] = {}
        self._n_choices: dict[str, int] = {}

    def odds(self, kind: int) -> float:
        return 0.5

    def open(self, row: Hashable, job: Job) -> None:
        choice = self._n_choices.get(job.id, 0)
        self._n_choices[job.id] = choice + 1
        reply = self._replies.get((tuple(job.prompt.ids.tolist()), choice), ())
        self._known[row] = reply, 0

    def prepare(self, row: Hashable) -> bool:
        return True

    def extend(self, row: Hashable, tokens: Sequence[int]) -> None:
        if row in self._known:
            reply, n = self._known[row]
            self._known[row] = reply, n + len(tokens)

    def draft(self, rows: Sequence[Hashable], n_most: int) -> list[Draft]:
        return [self._draft(row, n_most) for row in rows]

    def _draft(self, row: Hashable, n_most: int) -> Draft:
        if row not in self._known:
            return NO_DRAFT
        reply, n = self._known[row]
        tokens = [
            t if self._rng.random() < self._right else (t + 1) % self._vocab_size
            for t in reply[n : n + n_most]
        ]
        return Draft(tuple(tokens), (0,) * len(tokens))

    def close(self, row: Hashable) -> None:
        self._known.pop(row, None)

    def end(self) -> None:
        self._known.clear()


class Tireless(Speculation):
    """Drafts whatever is lost by it."""

    def __init__(self, *drafters: Drafter, **options: Any) -> None:
        super().__init__(*drafters, allowance=Unlimited, **options)


class AnyWidth(Tireless):
    """Tries drafts of random length, whether or not that pays."""

    def __init__(
        self,
        drafter: Drafter,
        *,
        seed: int = 0,
        least: int = 1,
        most: int = 12,
        profile: StepProfile = PLAIN_PROFILE,
    ) -> None:
        super().__init__(drafter, profile=profile)
        self._rng = random.Random(seed)
        self._least, self._most = least, most

    def _plan(self, group: Group, *, step_in_flight: bool = False) -> DraftPlan:
        return DraftPlan(self._rng.randint(self._least, self._most))
