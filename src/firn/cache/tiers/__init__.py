"""Storage tiers: places where records live as bytes. One file each, found by its name.

A module here whose name has no leading underscore defines `open_tier(options)`, which returns a `Tier`.
The module of a store also defines SCHEMES: the URL schemes that `--tier` takes for it. The contract
tests find it by themselves.

    ssd.py           a folder: _folder.py is its layout and lock, _known.py what a process knows of it
    s3.py, redis.py  shared stores; _store.py is what they have in common: retries (_calls.py), a circuit
                     breaker (_backoff.py), a bandwidth (_bandwidth.py)

A tier knows names and bytes: no chains, no arrays, no namespaces. Checksums, encryption and headers
belong to cache/storage/io.py, which calls tiers on I/O threads. `firn cache` opens folders by itself.
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
    "WriteResult",
    "discover",
    "schemes",
]

Buffer = bytes | bytearray | memoryview
PEEK_NBYTES = 4096
"""What a scan reads of a record: the whole metadata of most records."""
AHEAD_S = 7 * 86_400
"""A stamp further in the future than this comes from a wrong clock."""
N = TypeVar("N")
"""A record's name: text in a tier, key and part above it."""


@dataclass(frozen=True, slots=True)
class TierOptions:
    """What a tier is opened with."""

    location: str
    """A folder, or a store's address."""
    limit_nbytes: int | None = None
    """None: the tier chooses."""
    write_budget_nbytes: int | None = None
    """Bytes that all processes together may write in 24 hours."""
    extra: Mapping[str, str] = field(default_factory=dict)
    """Settings of one kind of tier alone."""


@dataclass(frozen=True, slots=True)
class ScannedRecord:
    """A record that a scan found."""

    name: str
    head: Buffer
    """Its first PEEK_NBYTES, fewer where it ends; `read(name, n)` gives more."""
    nbytes: int
    """The record's length."""
    used_at: float
    """Its stamp, as a Unix time."""


@dataclass(frozen=True, slots=True)
class FoundRecord:
    """A record that a store has, of those it was asked for."""

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
    """What became of a write that did not fail."""

    nbytes: int
    """What the record takes up; 0 when nothing was written."""
    new: bool
    """False: it was there already, or is being written by someone else."""
    evicted: tuple[N, ...] = ()
    """Records that were evicted to make room. Scans do not report them."""


@dataclass(frozen=True, slots=True)
class TierStatus:
    """Whether the tier takes writes. Reads go on as far as they can in any state."""

    state: Literal["ok", "paused"] = "ok"
    reason: str = ""
    since: float = 0.0
    """Unix time of the first failure since the tier last worked."""


@dataclass(frozen=True, slots=True)
class TierUsage:
    """All numbers of a tier at one moment. Counts are since the tier was opened."""

    nbytes: int
    """Bytes on disk, including what is being written and what is in quarantine."""
    limit_nbytes: int
    status: TierStatus = TierStatus()
    n_files: Mapping[str, int] = field(default_factory=dict)
    """By part, which follows the dot in their names; as far as has been scanned."""
    part_nbytes: Mapping[str, int] = field(default_factory=dict)
    n_foreign: int = 0
    """Files that no record's name fits, or that may not be opened."""
    n_quarantined: int = 0
    """In quarantine now; `counts` has how many ever were."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """writes, bytes_written, reads, bytes_read, deletes, evictions, bytes_evicted, missing,
    quarantined, read_faults, touches, stale_temps; those that are 0 may not be there."""
    drops: Mapping[str, int] = field(default_factory=dict)
    """Records not written, by reason."""
    day_nbytes: int | None = None
    """Written in the last 24 hours, by all who share the tier; None: not counted."""
    day_limit_nbytes: int | None = None
    """The most that may be written in 24 hours; None: no limit."""


class Tier(Protocol):
    """Blocking; called on I/O threads only, by several of them at once.

    A name is 64 hexadecimal digits, a dot, and lower-case letters; the same name always means the same
    record. Every record has a stamp, the time of its last use, and the lowest stamps are evicted first.
    The caller makes sure that a record has a higher stamp than those that depend on it.
    """

    def scan(self) -> Iterator[ScannedRecord | Gone[str]]:
        """The first time everything that is stored, later what others added or removed since.

        Yields while it searches, the highest stamps first, and may take minutes. What the caller itself
        wrote or deleted, or was told by a `WriteResult`, is not reported. Raises TierFault if the tier
        cannot be listed.
        """
        ...

    def read(self, name: str, n: int | None = None) -> memoryview:
        """All of a record, or its first n bytes. Raises Missing, Damaged, TierFault."""
        ...

    def write(self, name: str, pieces: Sequence[Buffer], *, used_at: float) -> WriteResult[str]:
        """Store a record. Room is made first: the tier never exceeds its limit, not for a moment.

        Only records with a stamp of at most `used_at` are evicted for it. Raises Refused, TierFull,
        TierFault.
        """
        ...

    def touch(self, stamps: Mapping[str, float]) -> None:
        """Raise each stamp to at least this; never lower one. Records that are not there are ignored."""
        ...

    def delete(self, name: str, *, keep: bool = False) -> None:
        """Forget a record; one that is not there is no fault. Raises TierFault.

        keep: move it to quarantine, for people. It is never found or read again, even if that fails.
        """
        ...

    def usage(self) -> TierUsage:
        """Does not touch the disk or the network: may be called from any thread."""
        ...


@runtime_checkable
class Store(Tier, Protocol):
    """A tier that many servers share: too large to be scanned, so it is asked for names.

    Its `scan` yields nothing. It has no limit and evicts nothing for a write: the store itself decides
    what to delete, and when.
    """

    @property
    def deadline_s(self) -> float:
        """The longest that a call may take, and that a request waits for the store."""
        ...

    def find(self, names: Sequence[str]) -> Sequence[FoundRecord]:
        """Which of these are there. Raises TierFault."""
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
