"""A key gets its share of what is limited: half alone, less beside others, and never nothing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from firn.core.shares import Share, Shares


def taken(shares: Shares, key: str) -> int:
    """How many units of one each the key can hold."""
    n = 0
    while shares.open(key).grow():
        n += 1
    return n


def test_a_key_alone_gets_half_and_leaves_something_for_every_other() -> None:
    shares = Shares(64)
    assert [taken(shares, key) for key in "abcd"] == [32, 16, 8, 4]


def test_a_share_shrinks_when_others_come() -> None:
    shares = Shares(60)
    held = [shares.open("a") for _ in range(30)]
    assert all(share.grow() for share in held)
    assert taken(shares, "b") == 15
    for share in held[:9]:
        share.close()
    assert taken(shares, "a") == 2, "23 of 60, where it had 30"


def test_what_is_alone_may_grow_to_the_whole() -> None:
    shares = Shares(100)
    with shares.open("a") as alone:
        assert alone.grow(60)
        assert alone.grow(40)
        assert not alone.grow(1)
        assert not shares.open("b").grow(1)
    assert shares.n_used == 0
    assert shares.open("b").grow(100)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 40), st.booleans())))
def test_no_more_is_held_than_there_is_and_all_comes_back(
    moves: list[tuple[str, int, bool]],
) -> None:
    shares = Shares(50)
    held: list[Share] = []
    for key, n, ends in moves:
        share = shares.open(key)
        if share.grow(n):
            held.append(share)
        if ends and held:
            held.pop(0).close()
        assert 0 <= shares.n_used == sum(share.n for share in held) <= 50
    for share in held:
        share.close()
        share.close()
    assert shares.n_used == 0
    assert not any(map(shares.held, "abc"))
