"""A cache that keys share: no key sees another's entries, nor evicts those of one with fewer."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from firn.core.fair_cache import FairCache


def test_an_owner_finds_only_its_own() -> None:
    cache: FairCache[str, int] = FairCache(10)
    cache.put("a", "x", 1, 1)
    assert cache.get("a", "x") == 1
    assert cache.get("b", "x") is None


def test_one_owner_cannot_flush_another() -> None:
    cache: FairCache[int, int] = FairCache(10)
    for i in range(3):
        cache.put("b", i, i, 1)
    for i in range(1000):
        cache.put("a", i, i, 1)
    assert [cache.get("b", i) for i in range(3)] == [0, 1, 2]
    assert sum(cache.get("a", i) is not None for i in range(1000)) == 7


def test_the_least_recently_used_goes_first() -> None:
    cache: FairCache[str, int] = FairCache(2)
    cache.put("a", "x", 1, 1)
    cache.put("a", "y", 2, 1)
    cache.get("a", "x")
    cache.put("a", "z", 3, 1)
    assert [cache.get("a", key) for key in "xyz"] == [1, None, 3]


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("xyz"), st.integers(0, 12))),
)
def test_sizes_stay_within_the_limit(puts: list[tuple[str, str, int]]) -> None:
    cache: FairCache[str, int] = FairCache(10)
    sizes: dict[tuple[str, str], int] = {}
    for owner, key, size in puts:
        cache.put(owner, key, size, size)
        if size <= 10:
            sizes[owner, key] = size
        kept = {where: n for where, n in sizes.items() if cache.get(*where) is not None}
        assert cache.size == sum(kept.values()) <= 10
        assert len(cache) == len(kept)
        assert size > 10 or kept.get((owner, key)) == size or sum(kept.values()) > 10 - size
