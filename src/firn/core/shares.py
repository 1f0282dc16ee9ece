"""Divides something limited among keys: places, bytes. No key can use up what others need."""

from __future__ import annotations

from collections import Counter
from types import TracebackType


class Shares:
    """A number of units, of which a key may hold as many as it leaves free.

    So one key alone gets half of them, of two each gets a third, and a key that holds nothing always
    finds something free. Owner: whoever hands them out, on one thread.
    """

    def __init__(self, total: int) -> None:
        self.total = total
        self._held: Counter[str] = Counter()
        self.n_used = 0

    def open(self, key: str) -> Share:
        return Share(self, key)

    def held(self, key: str) -> int:
        return self._held[key]

    def take(self, key: str, n: int, *, beside: int) -> bool:
        """For `Share`. beside: what the same share holds: alone, it may grow to the total."""
        free = self.total - self.n_used
        is_alone = self.n_used == beside
        if n > free or not (is_alone or self._held[key] + n <= free - n + 1):
            return False
        self._held[key] += n
        self.n_used += n
        return True

    def give(self, key: str, n: int) -> None:
        self._held[key] -= n
        self.n_used -= n
        if not self._held[key]:
            del self._held[key]


class Share:
    """What one call, connection or body holds. Owner: that one. Closing gives everything back."""

    __slots__ = ("_key", "_shares", "n")

    def __init__(self, shares: Shares, key: str) -> None:
        self._shares = shares
        self._key = key
        self.n = 0

    def grow(self, n: int = 1) -> bool:
        """Hold `n` more; False: the key has its share, and nothing has changed."""
        if not self._shares.take(self._key, n, beside=self.n):
            return False
        self.n += n
        return True

    def shrink(self, n: int) -> None:
        self._shares.give(self._key, n)
        self.n -= n

    def close(self) -> None:
        """Idempotent."""
        if self.n:
            self.shrink(self.n)

    def __enter__(self) -> Share:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()
