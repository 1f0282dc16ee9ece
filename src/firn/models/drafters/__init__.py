"""Drafters: each predicts what a row will say next.

An extension folder: a drafter is a class in a module here, named by the module's DRAFTER and chosen by
the module's name (`--speculation`). It is told of every row and of every token that the row takes, and
is asked for drafts when they may pay. A wrong draft costs time and never changes a text.

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
"""Drafters that need a loaded model: `assembly` makes those."""


@dataclass(frozen=True, slots=True)
class Draft:
    """What may come next. `kinds`: one small number per token, by which the drafter tells sure tokens
    from bold ones; how often each kind is right is learnt, and decides how many are tried."""

    tokens: tuple[int, ...] = ()
    kinds: tuple[int, ...] = ()

    def cut(self, n_tokens: int) -> Draft:
        return Draft(self.tokens[:n_tokens], self.kinds[:n_tokens])


NO_DRAFT = Draft()


class Drafter(Protocol):
    """Drafts for any number of rows; a row is identified by any hashable object."""

    is_free: bool
    """Drafting takes next to no time. It is then done after each token, whether tried or not."""

    def odds(self, kind: int) -> float:
        """How likely a token of this kind is to be right, before anything is learnt."""
        ...

    def open(self, row: Hashable, job: Job) -> None:
        """A row begins its reply to this job's prompt."""
        ...

    def prepare(self, row: Hashable) -> bool:
        """Get ready to draft for this row, a little at a time; True once it can."""
        ...

    def took(self, row: Hashable, tokens: Sequence[int]) -> None:
        """These tokens are now the end of the row's reply. Unknown rows are ignored."""
        ...

    def draft(self, rows: Sequence[Hashable], n_most: int) -> list[Draft]:
        """For each row, up to `n_most` tokens after all that it took; NO_DRAFT for unknown rows, or if
        it has no idea."""
        ...

    def close(self, row: Hashable) -> None:
        """The row is gone. Unknown rows are ignored."""
        ...

    def end(self) -> None:
        """The engine stops: keep what is worth keeping, free the rest."""
        ...


def discover() -> dict[str, Callable[[], Drafter]]:
    """How to make each drafter that needs no model, by its name."""
    return {
        module.name: importlib.import_module(f"{__name__}.{module.name}").DRAFTER
        for module in pkgutil.iter_modules(__path__)
        if not module.name.startswith("_") and module.name not in ON_A_MODEL
    }
