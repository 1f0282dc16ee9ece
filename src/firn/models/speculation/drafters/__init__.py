"""Drafters: each predicts the next tokens of a row.

An extension folder: a drafter is a class in a module here, named by the module's DRAFTER and chosen
by the module's name (`--speculation`). It is notified of every row and of every token that the row
takes, and asked for drafts when they may pay off. A wrong draft costs time and never changes a
text.

Engine thread only.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Protocol

from firn.core.values import Job

ON_A_MODEL = frozenset({"model", "mtp"})
"""Drafters that need a loaded model: `assembly` creates those."""
MAX_CHAIN = 8
"""The most tokens that a drafter which is not free is asked for: each takes a pass of its model."""


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens that may come next. `kinds`: one small number per token, by which the drafter
    distinguishes safe tokens from bold ones; how often each kind is right is learnt, and decides
    how many are tried."""

    tokens: tuple[int, ...] = ()
    kinds: tuple[int, ...] = ()

    def cut(self, n_tokens: int) -> Draft:
        return Draft(self.tokens[:n_tokens], self.kinds[:n_tokens])


NO_DRAFT = Draft()


class Drafter(Protocol):
    """Drafts for any number of rows; a row is identified by any hashable object. One that derives from
    this class may leave out what it does not need to know."""

    is_free: bool
    """Whether drafting takes next to no time. It is then done after each token, whether or not the
    draft is tried."""

    def odds(self, kind: int) -> float:
        """The prior probability that a token of this kind is right, before anything is learnt."""
        ...

    def open(self, row: Hashable, job: Job) -> None:
        """A row begins its reply to this job's prompt."""
        return

    def prepare(self, row: Hashable) -> bool:
        """Get ready to draft for this row, a little per call; True once it can."""
        ...

    def extend(self, row: Hashable, tokens: Sequence[int]) -> None:
        """These tokens are now the end of the row's reply. Unknown rows are ignored."""
        return

    def draft(self, rows: Sequence[Hashable], n_most: int) -> list[Draft]:
        """For each row, up to `n_most` tokens after all that it took; NO_DRAFT for unknown rows, or if
        there is nothing to suggest."""
        ...

    def close(self, row: Hashable) -> None:
        """The row is gone. Unknown rows are ignored."""
        return

    def end(self) -> None:
        """The engine is stopping: keep what is worth keeping, free the rest."""
        return


def discover() -> dict[str, Callable[[], Drafter]]:
    """The constructors of the drafters that need no model, by name."""
    return {
        module.name: importlib.import_module(f"{__name__}.{module.name}").DRAFTER
        for module in pkgutil.iter_modules(__path__)
        if not module.name.startswith("_") and module.name not in ON_A_MODEL
    }
