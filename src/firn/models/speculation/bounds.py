"""What may be drafted for a row: tokens that can hardly be wrong, and where a draft must end.

Tokens can hardly be wrong if they are forced (the end of a thinking budget), or if a grammar leaves no
choice about them. These two are asked before all drafters.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

from firn.models.decode.batch import Row
from firn.models.decode.ragged import MAX_FEED
from firn.models.speculation.drafters import NO_DRAFT, Draft, Drafter


def is_bound(row: Row) -> bool:
    """Whether something other than the model decides its next tokens."""
    return bool(row.forced) or (row.picker is not None and row.picker.constraint is not None)


class DecidedText(Drafter):
    """Drafts what is decided without the model. Its rows are the runner's own."""

    is_free = True

    def __init__(self, odds: float, decided: Callable[[Row], Sequence[int]]) -> None:
        """decided: the next tokens of a row, as far as they are."""
        self._odds, self._decided = odds, decided

    def odds(self, kind: int) -> float:
        return self._odds

    def prepare(self, row: Hashable) -> bool:
        return True

    def draft(self, rows: Sequence[Hashable], n_most: int) -> list[Draft]:
        tokens = [self._decided(row)[:n_most] if isinstance(row, Row) else () for row in rows]
        return [Draft(tuple(t), (0,) * len(t)) for t in tokens]


def forced_by_grammar(row: Row) -> Sequence[int]:
    """Text that a grammar leaves no choice about. The model may split it into other tokens."""
    constraint = row.picker.constraint if row.picker is not None else None
    return () if constraint is None else constraint.forced(MAX_FEED - 1)


def forced_next(row: Row) -> list[int]:
    """The row's next tokens, as far as they are forced."""
    if not row.forced:
        return []
    tokens, at = [], row.n_tokens + len(row.pending)
    while at in row.forced:
        tokens.append(row.forced[at])
        at += 1
    return tokens


DECIDED = (DecidedText(0.999, forced_next), DecidedText(0.95, forced_by_grammar))
"""Asked before all other drafters."""


def within(row: Row, draft: Draft) -> Draft:
    """The draft, cut before an end token and to the row's limit and grammar.

    The row may just have picked its end token, before the engine sees it. Anything it computed
    after that would keep the end of the reply from being stored.
    """
    if row.pending and row.pending[-1] in row.ends:
        return NO_DRAFT
    n = min(len(draft.tokens), row.limit - row.n_tokens - len(row.pending) - 1)
    n = max(min(n, MAX_FEED - len(row.pending)), 0)
    n = next((i for i, t in enumerate(draft.tokens[:n]) if not _can_continue(row, t)), n)
    constraint = row.picker.constraint if row.picker else None
    if n and constraint is not None:
        n = constraint.permitted(draft.tokens[:n])
    return draft.cut(n)


def _can_continue(row: Row, token: int) -> bool:
    """Whether the row may continue after this token. Predictions and prompts may hold ids that the
    model lacks, such as a picture's placeholder: MLX would read past the end of the embedding
    table."""
    has_token = row.picker is None or 0 <= token < row.picker.vocab_size
    return has_token and token not in row.ends
