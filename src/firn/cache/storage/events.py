"""What a tier reports to the engine thread. Plain values, in the order in which things happened."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from firn.cache.arrays.payload import Payload
from firn.cache.storage.container import Name
from firn.cache.storage.faults import TierError
from firn.cache.storage.io import Changes, TierEntry
from firn.cache.storage.store_search import StoreQuestion
from firn.cache.tree import Record


@dataclass(frozen=True, slots=True)
class RecordRead:
    """A record was read, verified, and made into arrays."""

    record: Record
    arrays: Payload
    at: float
    """When the last byte was read, by the cache's clock."""
    array_s: float
    """Seconds spent on making the arrays."""


@dataclass(frozen=True, slots=True)
class ReadFailed:
    """The tier does not have the record any more, or cannot read it."""

    record: Record
    error: TierError


@dataclass(frozen=True, slots=True)
class RecordWritten:
    record: Record
    evicted: tuple[Name, ...]


@dataclass(frozen=True, slots=True)
class WriteFailed:
    record: Record
    error: TierError


@dataclass(frozen=True, slots=True)
class ScanBatch:
    """Records that a scan found, or that others added or removed since the last scan."""

    changes: Changes


@dataclass(frozen=True, slots=True)
class ScanEnded:
    """After the first scan everything that is stored has been reported."""


@dataclass(frozen=True, slots=True)
class StoreAnswered:
    """The records of a prompt that a store has."""

    question: StoreQuestion
    entries: Sequence[TierEntry]
    failed: bool = False
    """The store could not be asked: what it has is unknown."""


TierEvent = (
    RecordRead | ReadFailed | RecordWritten | WriteFailed | ScanBatch | ScanEnded | StoreAnswered
)
