"""How likely drafted tokens are to be right, and so how many tokens a step with drafts should yield.

Owner: the engine thread, through the speculation.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

MEMORY = 300.0
"""Drafted tokens of each kind that are remembered: what came before them counts for less and less."""
PRIOR_WEIGHT = 8.0
"""As many drafted tokens as what a drafter promises counts for."""
Kind = tuple[int, int]
"""Which drafter, and which of its kinds of drafted tokens."""


@dataclass(eq=False, slots=True)
class Odds:
    """How often drafted tokens were right, by kind."""

    _right: dict[Kind, float] = field(default_factory=dict)
    _all: dict[Kind, float] = field(default_factory=dict)

    def observe(self, kind: Kind, is_right: bool) -> None:
        n = self._all.get(kind, 0.0)
        fading = min(1.0, MEMORY / (n + 1.0))
        self._all[kind] = n * fading + 1.0
        self._right[kind] = self._right.get(kind, 0.0) * fading + is_right

    def age(self, source: int) -> None:
        """This drafter was not tried for a while: what is known of it counts half."""
        for kind in self._all:
            if kind[0] == source:
                self._all[kind] /= 2
                self._right[kind] /= 2

    def of(self, kind: Kind, prior: float) -> float:
        right, n = self._right.get(kind, 0.0), self._all.get(kind, 0.0)
        return (right + PRIOR_WEIGHT * prior) / (n + PRIOR_WEIGHT)


@dataclass(frozen=True, slots=True)
class ExpectedTokens:
    """How many tokens one row is expected to take in one step.

    n_pending: tokens that the row must be fed in any case. gains[k]: tokens it takes if k are drafted.
    """

    n_pending: int = 1
    gains: tuple[float, ...] = (1.0,)

    @classmethod
    def of(cls, odds: Iterable[float], *, n_pending: int = 1) -> ExpectedTokens:
        """odds: the probability that each drafted token is right, if those before it are."""
        gains, chance = [1.0], 1.0
        for p in odds:
            chance *= p
            gains.append(gains[-1] + chance)
        return cls(n_pending, tuple(gains))

    def tokens(self, width: int) -> float:
        """Expected tokens from a step of this width."""
        n_drafted = min(max(width - self.n_pending, 0), len(self.gains) - 1)
        return self.gains[n_drafted]
