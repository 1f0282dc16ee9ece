"""A cache that keys share: each finds only what is its own, and evicts no key that has less."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class FairCache(Generic[K, V]):
    """Least recently used entries of the owner that holds the most go first. Thread-safe.

    An owner finds only what it has put in itself, so response times tell nothing about others.
    """

    def __init__(self, limit: int) -> None:
        """limit: for the sizes of all entries together."""
        self._limit = limit
        self._by_owner: dict[str, _Owned[K, V]] = {}
        self._size = 0
        self._lock = threading.Lock()

    @property
    def size(self) -> int:
        return self._size

    def __len__(self) -> int:
        return sum(len(owned.entries) for owned in self._by_owner.values())

    def get(self, owner: str, key: K) -> V | None:
        with self._lock:
            owned = self._by_owner.get(owner)
            if owned is None or key not in owned.entries:
                return None
            owned.entries.move_to_end(key)
            return owned.entries[key][0]

    def put(self, owner: str, key: K, value: V, size: int) -> None:
        """Keep it. One that is larger than the limit is not kept."""
        with self._lock:
            if size > self._limit:
                return
            owned = self._by_owner.setdefault(owner, _Owned())
            self._size += owned.put(key, value, size)
            while self._size > self._limit:
                name = max(self._by_owner, key=lambda name: self._by_owner[name].size)
                self._size -= self._by_owner[name].evict()
                if not self._by_owner[name].entries:
                    del self._by_owner[name]


class _Owned(Generic[K, V]):
    """One owner's entries with their sizes, the least recently used first."""

    def __init__(self) -> None:
        self.entries: OrderedDict[K, tuple[V, int]] = OrderedDict()
        self.size = 0

    def put(self, key: K, value: V, size: int) -> int:
        """How much larger they are now."""
        before = self.entries.pop(key, None)
        grown = size - (before[1] if before else 0)
        self.entries[key] = value, size
        self.size += grown
        return grown

    def evict(self) -> int:
        _, (_, size) = self.entries.popitem(last=False)
        self.size -= size
        return size
