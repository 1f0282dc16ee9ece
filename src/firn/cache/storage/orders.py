"""What the engine thread orders of a tier, and what comes back: plain values in both directions.

    cache ◀── events ── desk ── submit(order) ──▶ worker ── read, write, delete ──▶ tier
                         ◀── poll(): outcomes ────┘         (I/O threads)

The desk speaks of records and arrays, a worker of names and bytes. An order that has not begun may be
given up: the engine thread writes that into the order itself, and the I/O thread looks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from firn.cache.arrays.payload import Payload
from firn.cache.storage.container import Header, Loaded, Name, TierEntry
from firn.cache.storage.faults import TierError
from firn.cache.storage.store_search import StoreQuestion
from firn.cache.tiers import Buffer, Gone, TierUsage, WriteResult
from firn.cache.tree import Record
from firn.core.keys import Key
from firn.core.values import KeyTokens

# --- orders --------------------------------------------------------------------------------


class RecordBytes(Protocol):
    """The bytes of a record that is to be written."""

    def fetch(self) -> Sequence[Buffer]:
        """One buffer for each tensor. Called on an I/O thread."""
        ...


class Demand(Protocol):
    """What a request still needs of the records that are read for it. Written on the engine thread."""

    front: int
    """Tokens before this are computed."""
    over: bool
    """It needs nothing any more."""


@dataclass(eq=False, slots=True)
class WriteOrder:
    """The only order that may be refused: when too many bytes are queued."""

    header: Header
    content: RecordBytes | None
    """The worker lets go of it when the order is over. It holds arrays, which die on the engine thread:
    whoever made it keeps it until then."""
    used_at: float
    """The record's stamp, as a Unix time."""
    record: Record | None = None
    """What the engine wrote it for."""
    wanted: bool = True

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.header.tensors)


@dataclass(eq=False, slots=True)
class ReadOrder:
    name: Name
    tokens: KeyTokens
    """The tokens that the record must name; if it names others, it counts as damaged."""
    record: Record | None = None
    end: int = 0
    """Where the record's tokens end in the prompt."""
    demands: list[Demand] = field(default_factory=list)
    """Who waits for it; empty: somebody who will not give it up."""

    @property
    def wanted(self) -> bool:
        demands = list(self.demands)
        return not demands or any(not d.over and self.end > d.front for d in demands)


@dataclass(eq=False, slots=True)
class AskOrder:
    """Which records of a prompt does a store have?"""

    question: StoreQuestion
    at: float = 0.0
    """When it was asked."""


@dataclass(eq=False, slots=True)
class ScanOrder:
    """What is stored or, from the second scan on, what others changed since?"""


@dataclass(eq=False, slots=True)
class DeleteOrder:
    """Has no outcome: see ConfirmOrder. What cannot be deleted is tried again with each scan."""

    names: Sequence[Name]


@dataclass(eq=False, slots=True)
class TouchOrder:
    """Raise each record's stamp to at least the given one. Has no outcome."""

    stamps: Mapping[Name, float]


@dataclass(eq=False, slots=True)
class BuryOrder:
    """Note that what was written under this root before `at` was cleared; nothing is deleted. If that
    fails it is tried again with each scan. Scans report such notes of all processes."""

    root: Key
    at: float


@dataclass(eq=False, slots=True)
class ConfirmOrder:
    """Confirmed when nothing is left to be deleted, or with a fault if something cannot be."""


Order = (
    WriteOrder
    | ReadOrder
    | AskOrder
    | ScanOrder
    | DeleteOrder
    | TouchOrder
    | BuryOrder
    | ConfirmOrder
)


# --- outcomes ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RootCleared:
    """Records under this root that were written before this Unix time must not be used."""

    root: Key
    at: float


Changes = Sequence[TierEntry | Gone[Name] | RootCleared]


@dataclass(frozen=True, slots=True)
class WriteOver:
    order: WriteOrder
    result: WriteResult[Name] | TierError


@dataclass(frozen=True, slots=True)
class ReadOver:
    order: ReadOrder
    result: Loaded | TierError
    """Every byte is verified. A damaged record was set aside."""
    at: float
    """When the last byte was read, by the worker's clock."""


@dataclass(frozen=True, slots=True)
class StoreAnswered:
    """The records of a prompt that a store has."""

    question: StoreQuestion
    entries: Sequence[TierEntry] = ()
    at: float = 0.0
    took_s: float = 0.0
    failed: bool = False
    """The store could not be asked: what it has is unknown."""


@dataclass(frozen=True, slots=True)
class ScanBatch:
    """Records that a scan found, or that others added or removed since the last scan."""

    changes: Changes


@dataclass(frozen=True, slots=True)
class ScanEnded:
    """After the first scan everything that is stored has been reported, unless there is a fault."""

    fault: TierError | None = None


@dataclass(frozen=True, slots=True)
class Confirmed:
    order: BuryOrder | ConfirmOrder
    fault: TierError | None


Outcome = WriteOver | ReadOver | StoreAnswered | ScanBatch | ScanEnded | Confirmed


def outcome_of(order: Order, result: Any, at: float) -> Outcome | None:
    """How an order ends with what came of it, a TierError or not."""
    match order:
        case WriteOrder():
            return WriteOver(order, result)
        case ReadOrder():
            return ReadOver(order, result, at)
        case AskOrder():
            question, took_s = order.question, at - order.at
            if isinstance(result, TierError):
                return StoreAnswered(question, at=at, took_s=took_s, failed=True)
            return StoreAnswered(question, result, at, took_s)
        case ScanOrder():
            return ScanEnded(result)
        case BuryOrder() | ConfirmOrder():
            return Confirmed(order, result)
        case DeleteOrder() | TouchOrder():
            return None


class Worker(Protocol):
    """One tier, as the engine thread uses it. Only close() waits, and poll() as long as it is told."""

    @property
    def is_store(self) -> bool:
        """Whether its records are found by asking, not by a scan."""
        ...

    @property
    def deadline_s(self) -> float:
        """No request waits longer than this for the tier."""
        ...

    @property
    def n_results(self) -> int:
        """How much is waiting to be polled."""
        ...

    def submit(self, order: Order) -> bool:
        """False: it is a write, and the queue is full. All others are accepted, and end with an
        outcome."""
        ...

    def has_room(self, nbytes: int) -> bool:
        """Whether a write of this many bytes would be accepted now."""
        ...

    def defer_writes(self, defer: bool) -> None:
        """Start or stop deferring writes. Writes that have waited long begin nevertheless."""
        ...

    def poll(self, *, wait_s: float = 0.0) -> Outcome | None:
        """The next outcome; reads and answers first, because requests wait for them. The others in
        order of arrival: what a scan saw before a write is outdated after it."""
        ...

    def arrays(self, order: ReadOrder, loaded: Loaded) -> Payload:
        """The payload that memory keeps of what was read. Called once for each such outcome; what it
        raises costs a miss."""
        ...

    def usage(self) -> TierUsage: ...

    def close(self) -> None:
        """Write what is queued, in bounded time. What is left then ends with IoClosed."""
        ...


# --- what the desk reports to the cache ----------------------------------------------------


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


TierEvent = (
    RecordRead | ReadFailed | RecordWritten | WriteFailed | ScanBatch | ScanEnded | StoreAnswered
)
