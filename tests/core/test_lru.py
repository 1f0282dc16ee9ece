"""The least recently used values go first, and sizes stay within the limit."""

from __future__ import annotations

from firn.core.lru import Lru


def test_what_was_used_last_stays() -> None:
    kept: Lru[str, int] = Lru(2)
    kept.put("a", 1)
    kept.put("b", 2)
    assert kept.get("a") == 1
    kept.put("c", 3)
    assert [kept.get(key) for key in "abc"] == [1, None, 3]


def test_a_value_that_is_replaced_counts_once() -> None:
    kept: Lru[str, str] = Lru(10)
    kept.put("a", "small", 4)
    kept.put("a", "larger", 6)
    kept.put("b", "beside it", 4)
    assert (kept.size, len(kept)) == (10, 2)
    assert kept.get("a") == "larger"


def test_what_is_larger_than_the_limit_evicts_nothing() -> None:
    kept: Lru[str, str] = Lru(10)
    kept.put("a", "fits", 10)
    kept.put("b", "does not", 11)
    assert kept.get("a") == "fits"
    assert kept.get("b") is None
    kept.clear()
    assert (kept.size, len(kept)) == (0, 0)
