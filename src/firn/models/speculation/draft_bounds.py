"""What may be drafted for a row: tokens that are forced, and where a draft must end. Pure."""

from __future__ import annotations

from firn.models.decode.batch import Row
from firn.models.decode.ragged import MAX_FEED
from firn.models.speculation.drafters import NO_DRAFT, Draft


def is_bound(row: Row) -> bool:
    """Whether something other than the model decides its next tokens."""
    return bool(row.forced) or (row.picker is not None and row.picker.constraint is not None)


def forced_next(row: Row) -> list[int]:
    """The row's next tokens, as far as they are forced."""
    if not row.forced:
        return []
    tokens, at = [], row.n_tokens + len(row.pending)
    while at in row.forced:
        tokens.append(row.forced[at])
        at += 1
    return tokens


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
