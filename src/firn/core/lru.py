"""Values of a bounded total size; the least recently used go first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class Lru(Generic[K, V]):
    """Owner: whoever made it, on one thread or under its lock."""

    def __init__(self, limit: float) -> None:
        """limit: for all sizes together; of values whose size is not given, for their number."""
        self._limit = limit
        self._entries: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self.size = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: K) -> bool:
        return key in self._entries

    def get(self, key: K) -> V | None:
        """The value, which now is the most recently used."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        self._entries.move_to_end(key)
        return entry[0]

    def put(self, key: K, value: V, size: int = 1) -> None:
        """Keep it. One that is larger than the limit is not kept, and evicts nothing."""
        if size > self._limit:
            return
        before = self._entries.pop(key, None)
        self._entries[key] = value, size
        self.size += size - (before[1] if before else 0)
        while self.size > self._limit:
            self.evict()

    def evict(self) -> int:
        """Drop the least recently used value; returns its size."""
        _, (_, size) = self._entries.popitem(last=False)
        self.size -= size
        return size

    def clear(self) -> None:
        self._entries.clear()
        self.size = 0
