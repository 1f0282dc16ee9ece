"""A tier in a store that many servers share, over a network: what S3 and Redis have in common.

An `ObjectClient` makes the store's five calls, one attempt each. `StoreTier` adds a deadline,
retries, a circuit breaker, a bandwidth limit and counters. A store is never listed: names, which
follow from a prompt's tokens, are looked up in it (`find`). The store itself decides what to
delete, and when: by a lifecycle rule, a time to live, maxmemory. So it has no limit here, and
evicts nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from firn.cache.storage.faults import Missing, Refused, TierFault
from firn.cache.storage.tally import Tally
from firn.cache.tiers import (
    Buffer,
    FoundRecord,
    Gone,
    ScannedRecord,
    TierOptions,
    TierUsage,
    WriteResult,
)
from firn.cache.tiers._backoff import CircuitBreaker
from firn.cache.tiers._bandwidth import Bandwidth
from firn.cache.tiers._calls import RetriedCalls
from firn.core.errors import SetupError
from firn.core.units import MIB

DEADLINE_S, WRITE_MB_PER_S = 5.0, 64.0
TOO_LARGE = 1e12
"""Settings that are numbers must be below this."""
N_BAD = 1 << 12
"""Cap on the names of damaged records that are remembered."""


class ObjectClient(Protocol):
    """Each call is one attempt in bounded time.

    Raises Missing, Damaged, Refused, TierFault, PermanentFault.
    """

    def get(self, name: str, n: int | None) -> memoryview: ...

    def find(self, names: Sequence[str]) -> Iterable[FoundRecord]:
        """The records that are there, in any order."""
        ...

    def put(self, name: str, pieces: Sequence[Buffer], *, replace: bool) -> bool:
        """False: the record is there already, and nothing was written."""
        ...

    def touch(self, names: Sequence[str]) -> None: ...

    def delete(self, name: str) -> bool:
        """Whether the record was there, as far as the store can tell."""
        ...


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """The settings that every store has, from the query string of its address."""

    deadline_s: float = DEADLINE_S
    write_mb_per_s: float = WRITE_MB_PER_S

    @classmethod
    def of(cls, options: TierOptions, own: Iterable[str]) -> StoreSettings:
        """own: settings that only this kind of store has. Raises SetupError."""
        known = {"deadline_s", "write_mb_per_s", "spill", *own}
        if unknown := sorted(set(options.extra) - known):
            raise SetupError(
                f"--tier: unknown setting {unknown[0]}; valid settings: {', '.join(sorted(known))}"
            )
        return cls(
            number(options, "deadline_s", DEADLINE_S, low=0.1),
            number(options, "write_mb_per_s", WRITE_MB_PER_S, low=0),
        )


def first_line(error: Exception) -> str:
    """The first line of a library's error message, shortened: some messages fill a page."""
    text = str(error).partition("\n")[0]
    return text if len(text) <= 160 else f"{text[:160]}..."


def number(options: TierOptions, name: str, default: float, *, low: float) -> float:
    """Raises SetupError."""
    text = options.extra.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        raise SetupError(f"--tier: {name}={text} is not a number") from None
    if not low <= value < TOO_LARGE:
        raise SetupError(f"--tier: {name}={text} must be at least {low:g} and below {TOO_LARGE:g}")
    return value


class StoreTier:
    """Implements tiers.Store. Thread-safe."""

    def __init__(
        self,
        client: ObjectClient,
        settings: StoreSettings,
        breaker: CircuitBreaker,
        *,
        bandwidth: Bandwidth | None = None,
    ) -> None:
        self.deadline_s = settings.deadline_s
        self._client = client
        self._calls = RetriedCalls(breaker, deadline_s=settings.deadline_s)
        self._bandwidth = bandwidth or Bandwidth(settings.write_mb_per_s * MIB)
        self._tally = Tally()
        self._lock = threading.Lock()
        self._bad: dict[str, None] = {}
        """Names of damaged records that may still be there: not read until written again."""
        self._nbytes = 0

    def scan(self) -> Iterator[ScannedRecord | Gone[str]]:
        """Yields nothing: there may be a million records, of other models and other tenants."""
        return iter(())

    def find(self, names: Sequence[str]) -> list[FoundRecord]:
        asked = [name for name in names if name not in self._bad]
        if not asked:
            return []
        records = self._calls.run(lambda: list(self._client.find(asked)))
        self._tally.add(finds=1, names_asked=len(asked), names_found=len(records))
        return records

    def read(self, name: str, n: int | None = None) -> memoryview:
        if name in self._bad:
            raise Missing
        try:
            data = self._calls.run(lambda: self._client.get(name, n))
        except Missing:
            self._tally.add(missing=1)
            raise
        except TierFault:
            self._tally.add(read_faults=1)
            raise
        self._tally.add(reads=1, bytes_read=len(data))
        return data

    def write(self, name: str, pieces: Sequence[Buffer], *, used_at: float) -> WriteResult[str]:
        nbytes = sum(memoryview(piece).nbytes for piece in pieces)
        is_bad = name in self._bad
        try:
            if self._calls.breaker.status.state == "ok":
                self._bandwidth.take(nbytes)
            is_new = self._calls.run(lambda: self._client.put(name, pieces, replace=is_bad))
        except (Refused, TierFault) as e:
            self._tally.drop(e.reason)
            raise
        with self._lock:
            self._bad.pop(name, None)
            self._nbytes += nbytes if is_new else 0
        if not is_new:
            return WriteResult(0, new=False)
        self._tally.add(writes=1, bytes_written=nbytes)
        return WriteResult(nbytes, new=True)

    def touch(self, stamps: Mapping[str, float]) -> None:
        try:
            self._calls.run(lambda: self._client.touch(list(stamps)))
        except TierFault:
            return  # the breaker has counted it; a stamp that is too low costs a miss at worst
        self._tally.add(touches=len(stamps))

    def delete(self, name: str, *, keep: bool = False) -> None:
        """keep: the record is deleted all the same, because a store has no quarantine."""
        if keep:
            with self._lock:
                self._bad[name] = None
                while len(self._bad) > N_BAD:
                    del self._bad[next(iter(self._bad))]
            self._tally.add(quarantined=1)
        if self._calls.run(lambda: self._client.delete(name)):
            self._tally.add(deletes=1)

    def usage(self) -> TierUsage:
        """nbytes: what this process has written. How full the store is remains unknown here."""
        return TierUsage(
            self._nbytes,
            0,
            status=self._calls.breaker.status,
            n_quarantined=len(self._bad),
            counts=self._tally.counts,
            drops=self._tally.drops,
        )
