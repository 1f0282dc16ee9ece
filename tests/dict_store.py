"""The trivial store: a dict that several servers share, which lists records only when asked."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

from firn.cache.storage.faults import TierFault
from firn.cache.tiers import Buffer, FoundRecord, Gone, ScannedRecord, WriteResult
from tests.dict_tier import DictTier


class DictStore(DictTier):
    """Implements tiers.Store. `rounds`: the names of each call of `find`."""

    def __init__(self, records: dict[str, bytes] | None = None) -> None:
        super().__init__(1 << 40, records)
        self.rounds: list[list[str]] = []
        self.written: list[str] = []
        self.gate: threading.Event | None = None
        """If set, `find` waits for it."""
        self.is_down = False
        self.deadline_s = 60.0

    def scan(self) -> Iterator[ScannedRecord | Gone[str]]:
        return iter(())

    def find(self, names: Sequence[str]) -> list[FoundRecord]:
        self.rounds.append(list(names))
        if self.gate is not None:
            self.gate.wait(60)
        self._check()
        there = ((name, self._records.get(name)) for name in names)
        return [FoundRecord(name, len(raw), time.time()) for name, raw in there if raw is not None]

    def read(self, name: str, n: int | None = None) -> memoryview:
        self._check()
        return super().read(name, n)

    def write(self, name: str, pieces: Sequence[Buffer], *, used_at: float) -> WriteResult[str]:
        self._check()
        self.written.append(name)
        return super().write(name, pieces, used_at=used_at)

    def _check(self) -> None:
        if self.is_down:
            raise TierFault("unreachable")
