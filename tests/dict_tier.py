"""The trivial tier: bytes in a dict. It passes the tier contract, which shows that the contract
does not depend on a file system.

Several may share one dict, at the same time or one after the other, like servers before and after
a restart.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from firn.cache.tiers import (
    PEEK_NBYTES,
    Buffer,
    Gone,
    Missing,
    ScannedRecord,
    TierFull,
    TierOptions,
    TierUsage,
    WriteResult,
)


class DictTier:
    """Implements tiers.Tier. Thread-safe."""

    def __init__(self, limit_nbytes: int, records: dict[str, bytes] | None = None) -> None:
        self._limit_nbytes = limit_nbytes
        self._lock = threading.Lock()
        self._records = {} if records is None else records
        self._told = set[str]()
        self._stamps: dict[str, float] = {}
        self._counts: Counter[str] = Counter()
        self._drops: Counter[str] = Counter()

    def scan(self) -> Iterator[ScannedRecord | Gone[str]]:
        with self._lock:
            there = set(self._records)
            new, gone, self._told = there - self._told, self._told - there, there
        yield from map(Gone, gone)
        for name in new:
            raw = self._records[name]
            yield ScannedRecord(
                name, raw[:PEEK_NBYTES], len(raw), self._stamps.setdefault(name, 0.0)
            )

    def read(self, name: str, n: int | None = None) -> memoryview:
        raw = self._records.get(name)
        if raw is None:
            raise Missing
        return memoryview(raw)[:n]

    def write(self, name: str, pieces: Sequence[Buffer], *, used_at: float) -> WriteResult[str]:
        raw = b"".join(pieces)
        with self._lock:
            if name in self._records:
                return WriteResult(0, new=False)
            over = sum(map(len, self._records.values())) + len(raw) - self._limit_nbytes
            evicted: list[str] = []
            for old in sorted(self._stamps, key=self._stamps.__getitem__):
                if over > 0 and self._stamps[old] <= used_at:
                    evicted.append(old)
                    over -= len(self._records[old])
            if over > 0:
                self._drops["full"] += 1
                raise TierFull
            for old in evicted:
                del self._records[old], self._stamps[old]
            self._records[name], self._stamps[name] = raw, used_at
            self._told = (self._told - set(evicted)) | {name}
            self._counts.update(writes=1, evictions=len(evicted))
        return WriteResult(len(raw), new=True, evicted=tuple(evicted))

    def touch(self, stamps: Mapping[str, float]) -> None:
        with self._lock:
            for name, stamp in stamps.items():
                if name in self._stamps:
                    self._stamps[name] = max(self._stamps[name], stamp)

    def delete(self, name: str, *, keep: bool = False) -> None:
        with self._lock:
            self._stamps.pop(name, None)
            self._told.discard(name)
            self._counts.update(deletes=self._records.pop(name, None) is not None)

    def usage(self) -> TierUsage:
        with self._lock:
            names = Counter(name[65:] for name in self._records)
            nbytes = sum(map(len, self._records.values()))
            return TierUsage(
                nbytes,
                self._limit_nbytes,
                n_files=dict(names),
                counts=dict(self._counts),
                drops=dict(self._drops),
            )


def open_tier(options: TierOptions) -> DictTier:
    return DictTier(1 << 30 if options.limit_nbytes is None else options.limit_nbytes)
