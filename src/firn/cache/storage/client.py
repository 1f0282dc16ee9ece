"""One tier as the engine thread uses it: orders go out, events come back.

The engine thread makes and frees arrays; I/O threads fetch their bytes, hash them and write them.
Results wait in a queue until `poll` takes them between two steps, a few at a time while rows decode.

Owner: the engine thread, through `TierSet`.
"""

from __future__ import annotations

import logging
import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from functools import partial
from itertools import count
from typing import NamedTuple, Protocol, TypeVar, runtime_checkable

from firn.cache.arrays.host import PayloadBytes, from_host, staged, to_host
from firn.cache.arrays.payload import Payload
from firn.cache.ledger import Ledger
from firn.cache.memory.rows import payload_of, wait_for_row
from firn.cache.planning.estimates import FIRST_LATENCY_S, N_KEPT, STALE_S
from firn.cache.storage.catalogue import RecordCatalogue, name_of
from firn.cache.storage.container import Loaded, Name
from firn.cache.storage.events import (
    ReadFailed,
    RecordRead,
    RecordWritten,
    ScanBatch,
    ScanEnded,
    StoreAnswered,
    TierEvent,
    WriteFailed,
)
from firn.cache.storage.faults import NotForgotten, TierError, TierFault, Unwanted
from firn.cache.storage.held import HeldWindows
from firn.cache.storage.io import (
    Changes,
    Forgetting,
    Io,
    ReadOrder,
    TierEntry,
    Wanted,
    WriteOrder,
)
from firn.cache.storage.pace import WritePace
from firn.cache.storage.store_io import Searchable
from firn.cache.storage.store_search import StoreQuestion, search
from firn.cache.storage.threads import Done
from firn.cache.tiers import TierUsage, WriteResult
from firn.cache.tree import Record, Tree
from firn.core.keys import Key
from firn.core.measure import Median
from firn.core.ports import EngineLoad

log = logging.getLogger("firn.cache")

BUSY_SHARE = 0.02
"""Share of the engine's time that spilling may take while requests run."""
MAX_CREDIT_S = 0.05
"""Cap on how much unused spilling time may be saved up."""
MAX_PENDING_WRITES = 2
"""Pending writes while rows decode: one is being written, the next one is ready."""
PATIENCE_S = 2.0
"""How long a record waits to be spilled while a request waits for its first token."""
POLL_S = {
    EngineLoad.NONE: 0.05,
    EngineLoad.DECODING: 0.005,
    EngineLoad.PREFILLING: 0.25,
    EngineLoad.BOTH: 0.03,
}
"""Time limit for taking results between two steps. Long during prefill: the prompt being prefilled
waits for them too, and a chunk takes longer than that."""
LAVISH_SHARE = 0.75
"""Beyond this share of the day's budget, a tier writes only what conversations continue from."""
RESCAN_S = 10.0
"""Interval between scans for what other processes changed."""
MAX_BATCHES = 64
"""Batches of a scan that may be queued for the engine."""
SCAN_CHECK_S = 0.2
"""How often a scan that waits for the engine checks whether the tier is being closed."""

T = TypeVar("T")
TakeResult = Callable[[], TierEvent | None]
"""Turns the result of an order into an event. Called on the engine thread."""


class _PendingWrite(NamedTuple):
    """A write that is under way. Its arrays must be freed on the engine thread."""

    payload: PayloadBytes
    stamp: float


@runtime_checkable
class Receiving(Protocol):
    """An `Io` that must be told what becomes of each record read."""

    def received(self, name: Name, make: Callable[[], Payload]) -> Payload:
        """Called on the engine thread; returns the payload that memory keeps.

        make: makes it from the bytes read. What it raises is raised here.
        """
        ...


def accepts_all(record: Record) -> bool:
    return True


class TierClient:
    def __init__(
        self,
        name: str,
        io: Io,
        ledger: Ledger,
        tree: Tree,
        catalogue: RecordCatalogue,
        *,
        stamp: Callable[[Record], float],
        wake: Callable[[], None],
        accepts: Callable[[Record], bool] = accepts_all,
        window: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """stamp: returns the stamp to write a record with.

        wake: called on an I/O thread when there is something to poll.
        accepts: whether a record belongs in this tier. window: the model's, in tokens.
        """
        self.name = name
        self.number = ledger.add_tier(name)
        self._io = io
        self._store = io if isinstance(io, Searchable) else None
        self._ledger = ledger
        self._tree = tree
        self._catalogue = catalogue
        self._stamp = stamp
        self._wake = wake
        self.accepts = accepts
        self._clock = clock
        self._ask_s = Median(FIRST_LATENCY_S, kept=N_KEPT)
        self._asked_at = -math.inf
        self._results: queue.PriorityQueue[tuple[int, int, TakeResult]] = queue.PriorityQueue()
        """Reads and store answers first, because requests wait for them. Everything else in order
        of arrival: what a scan saw before a write is outdated after it."""
        self._serial = count()
        self._scan_room = threading.Semaphore(MAX_BATCHES)
        """Throttles a scan to the pace at which the engine takes its batches."""
        self._closing = False
        self._to_spill: deque[tuple[Record, float]] = deque()
        """Each record with the time from which its wait is counted."""
        self._held = HeldWindows(tree, window)
        self._unwritten: dict[Record, None] = {}
        """An ordered set of the records that a fault of the tier kept from being written."""
        self._pending_writes: dict[Record, _PendingWrite] = {}
        self._to_touch: list[Mapping[Record, float]] = []
        self._loading: dict[Record, list[Wanted]] = {}
        """Each record being read, with the `wanted` of every caller."""
        self._credit_s = MAX_CREDIT_S
        self._pace = WritePace()
        self._last_poll = clock()
        self.processed_until = clock()
        """The engine has processed everything that was read before this time."""
        self._last_scan = clock()
        self.scanning = False

    # --- writing ---------------------------------------------------------------------------

    def spill(self, record: Record) -> None:
        """Write the record soon, or a window when it is known to be of use."""
        if self._held.takes(record) and not self.is_store:  # other servers may branch off anywhere
            self._held.add(record, self._clock())
        else:
            self._to_spill.append((record, self._clock()))

    def is_worth_writing(self, record: Record) -> bool:
        """Whether a record that leaves memory should be written: what only those need who go back in a
        conversation is not, once little is left of the day's budget."""
        usage = self._io.usage()
        written, limit = usage.day_nbytes, usage.day_limit_nbytes
        is_short = None not in (written, limit) and (written or 0) > LAVISH_SHARE * (limit or 0)
        return not (is_short and self._held.is_passed(record))

    def spill_now(self, record: Record) -> None:
        """Write a record that is about to leave memory as soon as the queue has room."""
        self._io.defer_writes(False)  # until the next poll
        if not self._has_or_is_writing(record) and not self._write(record):
            self._to_spill.appendleft((record, self._clock() - PATIENCE_S))

    def _spill_next(self) -> bool:
        """Hand one record to the I/O threads; False when their queue is full."""
        record, since = self._to_spill.popleft()
        gone = record.arrays is None or not self._tree.is_current(record)
        if gone or self._has_or_is_writing(record):
            return True
        if self._write(record):
            return True
        self._to_spill.appendleft((record, since))
        return False

    def _has_or_is_writing(self, record: Record) -> bool:
        return record.is_stored(self.number) or record.is_being_written(self.number)

    def _write(self, record: Record) -> bool:
        self._touch_due()  # or a full tier would evict what the record needs
        if not self._io.has_room(record.nbytes):
            return False
        payload, stamp = to_host(payload_of(record)), self._stamp(record)
        order = WriteOrder(
            self._catalogue.header(record, payload.tensors, payload.places),
            payload.fetch,
            self._tree.uses.stamp_of(stamp),
            wanted=lambda: self._tree.is_current(record),
        )
        accepted = self._io.try_write(order, self._done(partial(self._was_written, record)))
        if accepted:
            self._ledger.begin_write(record, self.number)
            self._pending_writes[record] = _PendingWrite(payload, stamp)
        return accepted

    def _was_written(
        self, record: Record, result: WriteResult[Name] | TierError, at: float
    ) -> TierEvent:
        write = self._pending_writes.pop(record)
        self._ledger.end_write(record, self.number, stored=isinstance(result, WriteResult))
        if isinstance(result, WriteResult):
            self.touch(self._tree.order.note(record, write.stamp))  # it may have been used since
            return RecordWritten(record, result.evicted)
        if isinstance(result, TierFault):
            self._unwritten[record] = None
        return WriteFailed(record, result)

    def _retry(self) -> None:
        """Spill again what a fault held back: while the fault lasts, one record, as a trial."""
        records = [r for r in self._unwritten if r.alive and r.arrays is not None]
        records.sort(key=lambda r: r.node.start)
        n = len(records) if self.writes else 1
        self._unwritten = dict.fromkeys(records[n:])
        for record in records[:n]:
            self.spill(record)

    @property
    def writes(self) -> bool:
        """Whether the tier currently accepts writes."""
        return self._io.usage().status.state == "ok"

    @property
    def idle(self) -> bool:
        """Whether a poll could do nothing: none is left, or the queue is full and a write wakes us."""
        if self._to_touch:
            return False
        if not self._to_spill:
            return not self._held
        return not self._io.has_room(self._to_spill[0][0].nbytes)

    # --- reading ---------------------------------------------------------------------------

    def load(self, record: Record, wanted: Wanted) -> None:
        """Read the record if still wanted when its turn comes. One read serves all callers."""
        wanters = self._loading.setdefault(record, [])
        wanters.append(wanted)
        if len(wanters) == 1:
            self._read(record)

    def is_writing(self, record: Record) -> bool:
        return record in self._pending_writes

    def will_write(self, record: Record) -> bool:
        return any(waiting is record for waiting, _ in self._to_spill)

    def is_reading(self, record: Record) -> bool:
        return record in self._loading

    def _read(self, record: Record) -> None:
        wanters = self._loading[record]
        self._ledger.begin_read(record, self.number)
        order = ReadOrder(
            name_of(record),
            self._catalogue.tokens(record),
            wanted=lambda: any(wanted() for wanted in list(wanters)),
        )
        done = self._done(partial(self._was_read, record), is_urgent=True)
        self._io.read(order, lambda result: done(_staged(result)))

    def _was_read(self, record: Record, result: Loaded | TierError, at: float) -> TierEvent | None:
        wanters = self._loading.pop(record, [])
        self._ledger.end_read(record, self.number)
        if isinstance(result, Loaded):
            began = self._clock()
            try:
                arrays = self._arrays(record, result)
            except Exception as e:  # whatever it is, everyone waiting for the record must be told
                log.warning(
                    "cannot make arrays from a record, which costs a miss: %r", e, exc_info=e
                )
                result = TierError("no arrays", repr(e))
            else:
                return RecordRead(record, arrays, at, self._clock() - began)
        if isinstance(result, Unwanted):
            if any(wanted() for wanted in wanters):  # another caller wants it by now
                self._loading[record] = wanters
                self._read(record)
            return None
        self._ledger.lost(record, self.number)
        return ReadFailed(record, result)

    def _arrays(self, record: Record, loaded: Loaded) -> Payload:
        header = loaded.header
        make = partial(from_host, header.tensors, header.places, loaded.buffers)
        if not isinstance(self._io, Receiving):
            return make()
        return self._io.received(name_of(record), make)

    # --- asking a store --------------------------------------------------------------------

    @property
    def is_store(self) -> bool:
        """Whether records here are found by looking up names, not by a scan."""
        return self._store is not None

    @property
    def deadline_s(self) -> float:
        """How long a request waits for this tier in total."""
        return math.inf if self._store is None else self._store.deadline_s

    @property
    def ask_s(self) -> float | None:
        """How long the store takes to look up a prompt; None if unknown or out of date."""
        is_stale = self._clock() - self._asked_at > STALE_S
        return None if is_stale or not self._ask_s else self._ask_s.value

    def ask(self, question: StoreQuestion) -> None:
        """Find out which records of a prompt the store has."""
        assert self._store is not None
        take = partial(self._was_asked, question, self._clock())
        self._store.ask(partial(search, question), self._done(take, is_urgent=True))

    def _was_asked(
        self,
        question: StoreQuestion,
        began: float,
        result: list[TierEntry] | TierError,
        at: float,
    ) -> TierEvent:
        if isinstance(result, TierError):
            return StoreAnswered(question, (), failed=True)
        self._ask_s.add(at - began)
        self._asked_at = at
        return StoreAnswered(question, result)

    # --- forgetting ------------------------------------------------------------------------

    def bury(self, root: Key, at: float) -> Future[None]:
        """Note that what was written under this root before `at` was cleared; done once no process
        can find it again."""
        return self._promise(lambda io, done: io.bury(root, at, done))

    def deleted(self) -> Future[None]:
        """Done once everything that it was told to delete is gone."""
        return self._promise(lambda io, done: io.when_deleted(done))

    def _promise(self, order: Callable[[Forgetting, Done[None]], None]) -> Future[None]:
        """It fails with NotForgotten. A store only deletes, when it can: nothing is promised of it."""
        kept: Future[None] = Future()
        kept.set_running_or_notify_cancel()

        def done(result: TierError | None) -> None:
            if result is None:
                kept.set_result(None)
            else:
                kept.set_exception(NotForgotten(self.name, result))

        if isinstance(self._io, Forgetting) and not self.is_store:
            order(self._io, done)
        else:
            kept.set_result(None)
        return kept

    # --- other orders ----------------------------------------------------------------------

    def delete(self, names: Iterable[Name]) -> None:
        self._io.delete(names)

    def touch(self, stamps: Mapping[Record, float]) -> None:
        """Raise the stamps of those records that are stored here, at the next poll: a long prompt has
        thousands, and the engine has just looked at all of them."""
        if stamps:
            self._to_touch.append(stamps)

    def _touch_due(self) -> None:
        due, self._to_touch = self._to_touch, []
        at = self._tree.uses.stamp_of
        for stamps in due:
            self._io.touch({name_of(r): at(stamp) for r, stamp in stamps.items() if self.has(r)})

    def has(self, record: Record) -> bool:
        return record.is_stored(self.number)

    def usage(self) -> TierUsage:
        return self._io.usage()

    def scan(self) -> None:
        """Find out what is stored, or what others changed since the last scan."""
        self.scanning = True

        def batch(changes: Changes) -> None:
            while not self._closing:
                if self._scan_room.acquire(timeout=SCAN_CHECK_S):
                    break
            self._put(lambda: self._was_found(changes))

        self._io.scan(batch, self._done(self._was_scanned))

    def _was_found(self, changes: Changes) -> TierEvent:
        self._scan_room.release()
        return ScanBatch(changes)

    def _was_scanned(self, result: TierError | None, at: float) -> TierEvent:
        self.scanning = False
        self._last_scan = self._clock()
        return ScanEnded()

    def flush(self, timeout_s: float) -> Iterator[TierEvent]:
        """Spill all waiting records as the queue gets room; yields events that arrive meanwhile."""
        self._retry()
        self._to_spill.extend(self._held.take_all())
        until = time.monotonic() + timeout_s
        while self._to_spill:
            if self._spill_next():
                continue
            left = until - time.monotonic()
            if left <= 0 or not self._pending_writes:
                return
            yield from self.take_results(self._clock(), wait_s=left)

    def close(self) -> None:
        self._closing = True
        self._touch_due()
        self._retry()
        self._to_spill.extend(self._held.take_all())
        while self._to_spill and self._spill_next():
            pass
        self._io.close()

    # --- results ---------------------------------------------------------------------------

    def poll(self, load: EngineLoad) -> Iterator[TierEvent]:
        """Yield what happened in the tier, then spill as far as the engine's load allows."""
        now, busy = self._clock(), load is not EngineLoad.NONE
        self._io.defer_writes(load.prefilling and not self._ledger.leaving_nbytes)
        elapsed, self._last_poll = now - self._last_poll, now
        self._credit_s = min(self._credit_s + BUSY_SHARE * elapsed, MAX_CREDIT_S)
        if load is EngineLoad.DECODING:
            self._pace.tick(now, is_writing=bool(self._pending_writes))
        else:
            self._pace.disturbed()
        self._touch_due()
        yield from self.take_results(now + POLL_S[load])
        if self._results.empty():
            self.processed_until = now
        self._to_spill.extend(self._held.take_due(now))
        while self._to_spill and (not busy or self._may_spill(load, now)):
            if not self.idle:
                wait_for_row(self._to_spill[0][0])
            began = self._clock()
            if not self._spill_next():
                break
            self._credit_s -= self._clock() - began
            if not busy and not self._results.empty():
                break  # a request may be waiting for them: spill the rest at the next poll
        if not self.scanning and now - self._last_scan > RESCAN_S:
            self._retry()
            self.scan()

    def _may_spill(self, load: EngineLoad, now: float) -> bool:
        waited_s = now - self._to_spill[0][1]
        if self._credit_s <= 0:
            return False
        if load.prefilling:
            return waited_s >= PATIENCE_S
        return len(self._pending_writes) < MAX_PENDING_WRITES and self._pace.may_write(waited_s)

    def take_results(self, until: float, *, wait_s: float = 0.0) -> Iterator[TierEvent]:
        """Yield the results of the I/O threads that can be taken before `until`.

        wait_s: how long to wait for the first one.
        """
        while True:
            try:
                *_, take = self._results.get(wait_s > 0, wait_s or None)
            except queue.Empty:
                return
            wait_s = 0.0
            event = take()
            if event is not None:
                yield event
            if self._clock() > until:
                if not self._results.empty():
                    self._wake()
                return

    def take_outdated_writes(self, timeout_s: float) -> Iterator[TierEvent]:
        """Yield events until no pending write is outdated, for at most `timeout_s`."""
        until = time.monotonic() + timeout_s
        while any(not self._tree.is_current(r) for r in self._pending_writes):
            left = until - time.monotonic()
            if left <= 0:
                return
            yield from self.take_results(self._clock(), wait_s=left)

    def _done(
        self,
        take: Callable[[T | TierError, float], TierEvent | None],
        *,
        is_urgent: bool = False,
    ) -> Done[T]:
        """The callback of an order: on an I/O thread, it queues the result for the engine thread."""

        def done(result: T | TierError) -> None:
            at = self._clock()
            self._put(lambda: take(result, at), is_urgent=is_urgent)

        return done

    def _put(self, take: TakeResult, *, is_urgent: bool = False) -> None:
        self._results.put((not is_urgent, next(self._serial), take))
        self._wake()


def _staged(result: Loaded | TierError) -> Loaded | TierError:
    """Move bytes to where the device reads them fastest; on I/O threads, to spare the engine."""
    if isinstance(result, TierError):
        return result
    return Loaded(result.header, list(staged(result.buffers)))
