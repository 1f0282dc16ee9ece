"""Storage tiers: places where records are kept as bytes. Each is a module, found by its name.

A module here whose name has no leading underscore defines `open_tier(options)`, which returns a
`Tier`. The module of a store also defines SCHEMES: the URL schemes that `--tier` accepts for it.
The contract tests find new modules automatically.

    ssd.py           a folder: _folder.py is its layout and lock, _known.py what a process knows of it
    s3.py, redis.py  shared stores; _store.py is what they have in common: retries (_calls.py), a circuit
                     breaker (_backoff.py), a bandwidth limit (_bandwidth.py)

A tier knows names and bytes: no chains, no arrays, no namespaces. Checksums, encryption and headers
belong to cache/storage/tier_records.py, which calls tiers on I/O threads. `firn cache` opens folders
directly.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Generic, Literal, Protocol, TypeVar, runtime_checkable

from firn.cache.storage.faults import Missing, Refused, TierError, TierFault, TierFull

__all__ = [
    "AHEAD_S",
    "PEEK_NBYTES",
    "Buffer",
    "FoundRecord",
    "Gone",
    "Missing",
    "Refused",
    "ScannedRecord",
    "Store",
    "Tier",
    "TierError",
    "TierFault",
    "TierFull",
    "TierOptions",
    "TierStatus",
    "TierUsage",
    "Tombstones",
    "WriteResult",
    "discover",
    "schemes",
]

Buffer = bytes | bytearray | memoryview
PEEK_NBYTES = 4096
"""How much of a record a scan reads: enough for the whole metadata of most records."""
AHEAD_S = 7 * 86_400
"""A stamp further in the future than this comes from a wrong clock."""
N = TypeVar("N")
"""A record's name: text in a tier, key and part above it."""


@dataclass(frozen=True, slots=True)
class TierOptions:
    """The settings with which a tier is opened."""

    location: str
    """A folder, or a store's address."""
    limit_nbytes: int | None = None
    """None: the tier chooses."""
    write_budget_nbytes: int | None = None
    """Bytes that all processes together may write in 24 hours."""
    extra: Mapping[str, str] = field(default_factory=dict)
    """Settings specific to one kind of tier."""


@dataclass(frozen=True, slots=True)
class ScannedRecord:
    """A record that a scan found."""

    name: str
    head: Buffer
    """Its first PEEK_NBYTES, or all of a shorter record; `read(name, n)` returns more."""
    nbytes: int
    """The record's length."""
    used_at: float
    """Its stamp, as a Unix time."""


@dataclass(frozen=True, slots=True)
class FoundRecord:
    """A record that was looked up in a store and found."""

    name: str
    nbytes: int
    """The record's length."""
    written_at: float
    """Unix time."""


@dataclass(frozen=True, slots=True)
class Gone(Generic[N]):
    """A record that someone else has removed."""

    name: N


@dataclass(frozen=True, slots=True)
class WriteResult(Generic[N]):
    """The outcome of a write that did not fail."""

    nbytes: int
    """Bytes that the record takes up; 0 when nothing was written."""
    new: bool
    """False: it was there already, or is being written by someone else."""
    evicted: tuple[N, ...] = ()
    """Records that were evicted to make room. Scans do not report them."""


@dataclass(frozen=True, slots=True)
class TierStatus:
    """Whether the tier accepts writes. Reads continue in any state, as far as they can."""

    state: Literal["ok", "paused"] = "ok"
    reason: str = ""
    since: float = 0.0
    """Unix time when the tier was paused."""


@dataclass(frozen=True, slots=True)
class TierUsage:
    """A snapshot of a tier's numbers. Counts start when the tier is opened."""

    nbytes: int
    """Bytes on disk, including what is being written and what is in quarantine."""
    limit_nbytes: int
    status: TierStatus = TierStatus()
    n_files: Mapping[str, int] = field(default_factory=dict)
    """Files by part, which follows the dot in their names; only those scanned so far."""
    part_nbytes: Mapping[str, int] = field(default_factory=dict)
    n_foreign: int = 0
    """Files that are not used: no record's name, no permission, another version, another key."""
    n_quarantined: int = 0
    """Now in quarantine; `counts` has how many were put there."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """writes, bytes_written, reads, bytes_read, deletes, evictions, bytes_evicted, missing,
    damaged, quarantined, read_faults, touches, stale_temps, and for stores finds, names_asked,
    names_found; those that are 0 may be absent."""
    drops: Mapping[str, int] = field(default_factory=dict)
    """Records not written, by reason."""
    day_nbytes: int | None = None
    """Written in the last 24 hours by all processes that share the tier; None: not counted."""
    day_limit_nbytes: int | None = None
    """The most that may be written in 24 hours; None: no limit."""


class Tier(Protocol):
    """Blocking; called only on I/O threads, on several of them concurrently.

    A name is 64 hexadecimal digits, a dot, and lower-case letters; the same name always means the same
    record. Every record has a stamp, the time of its last use, and the lowest stamps are evicted first.
    The caller makes sure that a record has a higher stamp than those that depend on it.
    """

    def scan(self) -> Iterator[ScannedRecord | Gone[str]]:
        """Yield everything stored the first time, then what others added or removed since.

        Yields while it searches, the highest stamps first, and may take minutes. What the caller
        itself wrote or deleted, or learned from a `WriteResult`, is not reported. Raises TierFault
        if the tier cannot be listed.
        """
        ...

    def read(self, name: str, n: int | None = None) -> memoryview:
        """All of a record, or its first n bytes. Raises Missing, Damaged, TierFault."""
        ...

    def write(self, name: str, pieces: Sequence[Buffer], *, used_at: float) -> WriteResult[str]:
        """Store a record. Room is made first: the tier never exceeds its limit, not even briefly.

        Only records with a stamp of at most `used_at` are evicted for it. Raises Refused, TierFull,
        TierFault.
        """
        ...

    def touch(self, stamps: Mapping[str, float]) -> None:
        """Raise each stamp to at least the given one; never lower it. Ignores missing records."""
        ...

    def delete(self, name: str, *, keep: bool = False) -> None:
        """Delete a record; a missing one is no fault. Raises TierFault.

        keep: move it to quarantine, for people. It is never found or read again, even if that fails.
        """
        ...

    def usage(self) -> TierUsage:
        """Does not touch the disk or the network: may be called from any thread."""
        ...


@runtime_checkable
class Store(Tier, Protocol):
    """A tier that many servers share: too large to be scanned, so names are looked up in it.

    Its `scan` yields nothing. It has no limit and evicts nothing for a write: the store itself decides
    what to delete, and when.
    """

    @property
    def deadline_s(self) -> float:
        """The longest time that a call may take, and that a request waits for the store."""
        ...

    def find(self, names: Sequence[str]) -> Sequence[FoundRecord]:
        """The records among these that are stored. Raises TierFault."""
        ...


@runtime_checkable
class Tombstones(Tier, Protocol):
    """A tier that notes, before anything is deleted, what must never be found again.

    Deleting a namespace takes a while, and a process may be killed meanwhile. Its note stays, for the
    next process and for others that share the tier.
    """

    def bury(self, root: str, at: float) -> None:
        """Note that records under this root (64 hexadecimal digits) were cleared at this Unix time.

        When it returns the note outlives the process. A later time is never lowered. Raises TierFault.
        """
        ...

    def buried(self) -> Mapping[str, float]:
        """The time of the last clearing of each root, by any process. Raises TierFault."""
        ...


OpenTier = Callable[[TierOptions], Tier]


def discover() -> dict[str, OpenTier]:
    """How to open each kind of tier."""
    return {name: module.open_tier for name, module in _modules()}


def schemes() -> dict[str, str]:
    """The kind of store that each URL scheme stands for."""
    return {
        scheme: name for name, module in _modules() for scheme in getattr(module, "SCHEMES", ())
    }


def _modules() -> Iterator[tuple[str, ModuleType]]:
    for module in pkgutil.iter_modules(__path__):
        if not module.name.startswith("_"):
            yield module.name, importlib.import_module(f"{__name__}.{module.name}")
