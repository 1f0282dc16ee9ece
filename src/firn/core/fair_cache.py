"""A cache that keys share: each finds only what is its own, and evicts no key that has less."""

from __future__ import annotations

import math
import threading
from collections.abc import Hashable
from typing import Generic, TypeVar

from firn.core.lru import Lru

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class FairCache(Generic[K, V]):
    """Least recently used entries of the owner that holds the most go first. Thread-safe.

    An owner finds only what it has put in itself, so response times tell nothing about others.
    """

    def __init__(self, limit: int) -> None:
        """limit: for the sizes of all entries together."""
        self._limit = limit
        self._by_owner: dict[str, Lru[K, V]] = {}
        self._size = 0
        self._lock = threading.Lock()

    @property
    def size(self) -> int:
        return self._size

    def __len__(self) -> int:
        with self._lock:
            return sum(map(len, self._by_owner.values()))

    def get(self, owner: str, key: K) -> V | None:
        with self._lock:
            owned = self._by_owner.get(owner)
            return None if owned is None else owned.get(key)

    def put(self, owner: str, key: K, value: V, size: int) -> None:
        """Keep it. One that is larger than the limit is not kept."""
        with self._lock:
            if size > self._limit:
                return
            owned = self._by_owner.setdefault(owner, Lru(math.inf))
            self._size -= owned.size
            owned.put(key, value, size)
            self._size += owned.size
            while self._size > self._limit:
                name = max(self._by_owner, key=lambda name: self._by_owner[name].size)
                self._size -= self._by_owner[name].evict()
                if not self._by_owner[name]:
                    del self._by_owner[name]
