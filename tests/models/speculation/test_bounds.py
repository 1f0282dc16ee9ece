"""How much of a draft a row can take."""

from __future__ import annotations

import pytest

from firn.models.decode.batch import Row
from firn.models.decode.ragged import MAX_FEED
from firn.models.speculation.bounds import forced_next, within
from firn.models.speculation.drafters import NO_DRAFT, Draft

END = 2


def row(*, pending: list[int], n_tokens: int = 10, limit: int = 1000) -> Row:
    return Row([], n_tokens, pending=pending, ends=frozenset({END}), limit=limit)


def draft(*tokens: int) -> Draft:
    return Draft(tokens, tuple(range(len(tokens))))


@pytest.mark.parametrize(
    ("pending", "drafted", "taken"),
    [
        ([5], (7, 8, 9), (7, 8, 9)),
        ([5, 6], (7, 8, 9), (7, 8, 9)),
        ([END], (7, 8, 9), ()),
        ([5, END], (7, 8, 9), ()),
        ([END, 5], (7, 8, 9), (7, 8, 9)),
        ([5], (7, END, 9), (7,)),
        ([5], (END,), ()),
        ([5], (), ()),
    ],
)
def test_nothing_follows_an_end_token(
    pending: list[int], drafted: tuple[int, ...], taken: tuple[int, ...]
) -> None:
    assert within(row(pending=pending), draft(*drafted)).tokens == taken


def test_a_draft_ends_one_before_the_limit() -> None:
    """The step picks one token more than were drafted."""
    tokens = draft(*range(10, 30))
    for n_left in range(1, 6):
        within_limit = within(row(pending=[5], n_tokens=50, limit=51 + n_left), tokens)
        assert len(within_limit.tokens) == n_left - 1
        assert within_limit.kinds == tokens.kinds[: n_left - 1]
    assert within(row(pending=[5], n_tokens=50, limit=40), tokens) == NO_DRAFT


def test_a_step_feeds_a_row_so_many_tokens_at_most() -> None:
    tokens = draft(*range(10, 10 + 2 * MAX_FEED))
    assert len(within(row(pending=[5]), tokens).tokens) == MAX_FEED - 1
    assert len(within(row(pending=[5, 6, 7]), tokens).tokens) == MAX_FEED - 3


def test_what_is_forced_next_ends_at_the_first_free_position() -> None:
    bound = row(pending=[5])
    bound.forced = {11: 20, 12: 21, 14: 23}
    assert forced_next(bound) == [20, 21]
    assert forced_next(row(pending=[5])) == []
