"""What rank 0 makes and drops, the others are told to make and drop."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest

from firn.cache.arrays.payload import stacked
from firn.ranks.cache.mirror import N_DROPPED, Mirror, number_of


class Followers:
    """Implements calls.Followers as far as a mirror needs it."""

    n_followers = 1
    is_lost = False

    def __init__(self) -> None:
        self.notes: list[tuple[Any, ...]] = []

    def tell_later(self, name: str, *args: Any) -> None:
        self.notes.append((name, *args))


def payload(n: int = 4) -> Any:
    return stacked([(mx.zeros((1, 1, n, 2)),)])


def test_what_is_let_go_of_here_is_dropped_there() -> None:
    followers = Followers()
    mirror = Mirror(followers)  # type: ignore[arg-type]
    first, second = (mirror.made(payload(), "cut", i) for i in range(2))
    assert followers.notes == [("cut", 1, 0), ("cut", 2, 1)]
    mirror.tell_dropped()
    assert len(followers.notes) == 2, "both are still held"
    del first
    mirror.tell_dropped()
    assert followers.notes[2:] == [("drop", [1])]
    mirror.tell_dropped()
    assert len(followers.notes) == 3, "once"
    assert number_of(second) == 2


def test_many_are_told_of_a_few_at_a_time() -> None:
    followers = Followers()
    mirror = Mirror(followers)  # type: ignore[arg-type]
    made = [mirror.made(payload(), "cut") for _ in range(N_DROPPED + 1)]
    del followers.notes[:], made[:]
    mirror.tell_dropped()
    assert [len(numbers) for _, numbers in followers.notes] == [N_DROPPED, 1]


def test_what_is_made_of_payloads_names_them() -> None:
    followers = Followers()
    mirror = Mirror(followers)  # type: ignore[arg-type]
    one, other = (mirror.made(payload(), "cut") for _ in range(2))
    parts = one.tokens(1, 3), one.copied(), one.joined([other])
    assert followers.notes[2:] == [("tokens", 3, 1, 1, 3), ("copied", 4, 1), ("joined", 5, [1, 2])]
    assert [number_of(part) for part in parts] == [3, 4, 5]
    with pytest.raises(TypeError, match="do not know"):
        one.joined([payload()])
