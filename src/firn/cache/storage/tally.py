"""Counts shared by threads: what a tier did, and which records it dropped."""

from __future__ import annotations

import threading
from collections import Counter


class Tally:
    """Counts by name, and drops by reason. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._drops: Counter[str] = Counter()

    def add(self, **counts: int) -> None:
        with self._lock:
            self._counts.update(counts)

    def drop(self, reason: str) -> None:
        with self._lock:
            self._drops[reason] += 1

    @property
    def counts(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counts)

    @property
    def drops(self) -> dict[str, int]:
        with self._lock:
            return dict(self._drops)
