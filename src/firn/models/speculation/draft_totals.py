"""How much was drafted since the start, and how much of it was right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from firn.models.decode.batch import TakenTokens


@dataclass(slots=True)
class DraftTotals:
    """Owner: the engine thread; other threads may read it."""

    n_steps: int = 0
    n_draft_steps: int = 0
    n_row_steps: int = 0
    n_taken: int = 0
    n_drafted: int = 0
    n_accepted: int = 0

    def count_step(self, taken: Sequence[TakenTokens]) -> None:
        self.n_steps += 1
        self.n_draft_steps += any(each.n_drafted for each in taken)

    def count_row(self, taken: TakenTokens) -> None:
        """For a row that has not left in the meantime."""
        self.n_row_steps += 1
        self.n_taken += len(taken.tokens)
        self.n_drafted += taken.n_drafted
        self.n_accepted += taken.n_right

    def view(self) -> dict[str, int]:
        return {name.removeprefix("n_"): n for name, n in asdict(self).items()}
