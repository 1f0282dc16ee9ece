"""The engine's side of the tiers below memory: which record is written where, and what became of it.

    Desk       all tiers: which of them should have a record, and which one is fastest
    TierDesk   one tier: what waits to be written, what is under way, what was promised
    Stamps     what the tiers must know of the tree's order of eviction

The engine thread makes and frees arrays; a worker's threads fetch their bytes, hash them and write them.
Outcomes wait until `poll` takes them between two steps, a few at a time while rows decode.

Owner: the engine thread, through `Records`.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from firn.cache.arrays.host import PayloadBytes, to_host
from firn.cache.ledger import Ledger
from firn.cache.memory.rows import payload_of, wait_for_row
from firn.cache.parts import Part
from firn.cache.planning.estimates import FIRST_LATENCY_S, N_KEPT, STALE_S
from firn.cache.storage.catalogue import RecordCatalogue, name_of
from firn.cache.storage.container import Name
from firn.cache.storage.faults import IoClosed, NotForgotten, TierError, TierFault, Unwanted
from firn.cache.storage.orders import (
    AskOrder,
    BuryOrder,
    Confirmed,
    ConfirmOrder,
    DeleteOrder,
    Demand,
    ReadFailed,
    ReadOrder,
    ReadOver,
    RecordRead,
    RecordWritten,
    ScanBatch,
    ScanEnded,
    ScanOrder,
    StoreAnswered,
    TierEvent,
    TouchOrder,
    Worker,
    WriteFailed,
    WriteOrder,
    WriteOver,
)
from firn.cache.storage.spill import SpillQueue
from firn.cache.storage.spill_policy import EVERYTHING, SpillPolicy
from firn.cache.storage.store_search import StoreQuestion
from firn.cache.tiers import TierUsage, WriteResult
from firn.cache.tree import CheckpointKind, Record, Root, Tree
from firn.core.clock import SYSTEM_CLOCK, Clock
from firn.core.keys import Key
from firn.core.measure import Median
from firn.core.ports import EngineLoad

log = logging.getLogger("firn.cache")

POLL_S = {
    EngineLoad.NONE: 0.05,
    EngineLoad.DECODING: 0.005,
    EngineLoad.PREFILLING: 0.25,
    EngineLoad.BOTH: 0.03,
}
"""Time limit for taking outcomes between two steps. Long during prefill: the prompt being prefilled
waits for them too, and a chunk takes longer than that."""
LAVISH_SHARE = 0.75
"""Beyond this share of the day's budget, a tier writes only what conversations continue from."""
RESCAN_S = 10.0
"""Interval between scans for what other processes changed."""
FIRST_SCAN_S = 1.0
"""How long start-up waits for a tier's first scan. Most take milliseconds, so even the first
request can hit; a longer scan continues while the server runs."""
SPILL_S = 5.0
"""How long closing waits for room in the write queue."""
CLOSE_S = 2.0
"""How long closing waits for pending writes of cleared records, in order to delete them again."""


class Stamps:
    """The stamps that records are written with, and those that tiers have yet to be told of."""

    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self._raised: list[list[Mapping[Record, float]]] = []
        """By tier."""

    def add_tier(self) -> None:
        self._raised.append([])

    def of(self, record: Record) -> float:
        """The stamp to write a record with. Records it depends on are first given higher stamps."""
        stamp = self._tree.order.stamp(record)
        raised = self._tree.order.note(record, stamp)
        stamp = raised.pop(record, stamp)
        self.raised(raised)
        return stamp

    def raised(self, stamps: Mapping[Record, float]) -> None:
        """All tiers must know of these, at the next poll: a long prompt has thousands, and the engine
        has just looked at all of them."""
        for tier in range(len(self._raised)):
            self.raised_in(tier, stamps)

    def raised_in(self, tier: int, stamps: Mapping[Record, float]) -> None:
        if stamps:
            self._raised[tier].append(stamps)

    def has_raised(self, tier: int) -> bool:
        return bool(self._raised[tier])

    def take(self, tier: int) -> list[dict[Name, float]]:
        """What the tier must know of the records that it has, as Unix times."""
        due, self._raised[tier] = self._raised[tier], []
        at = self._tree.uses.stamp_of
        return [
            {name_of(r): at(stamp) for r, stamp in stamps.items() if r.is_stored(tier)}
            for stamps in due
        ]


class _Writing(NamedTuple):
    """A write that is under way."""

    order: WriteOrder
    payload: PayloadBytes
    """Its arrays must be freed on the engine thread."""
    stamp: float


class TierDesk:
    def __init__(
        self,
        name: str,
        worker: Worker,
        ledger: Ledger,
        tree: Tree,
        catalogue: RecordCatalogue,
        *,
        stamps: Stamps,
        policy: SpillPolicy = EVERYTHING,
        window: int = 0,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """policy: which records belong in this tier. window: the model's, in tokens."""
        self.name = name
        self.number = ledger.add_tier(name)
        stamps.add_tier()
        self._worker = worker
        self._ledger = ledger
        self._tree = tree
        self._catalogue = catalogue
        self._stamps = stamps
        self._policy = policy
        self._clock = clock
        self._to_spill = SpillQueue(tree, window, clock.elapsed())
        self._unwritten: dict[Record, None] = {}
        """An ordered set of the records that a fault of the tier kept from being written."""
        self._writing: dict[Record, _Writing] = {}
        self._reading: dict[Record, ReadOrder] = {}
        self._promises: dict[BuryOrder | ConfirmOrder, Future[None]] = {}
        self._ask_s = Median(FIRST_LATENCY_S, kept=N_KEPT)
        self._asked_at = -math.inf
        self.processed_until = clock.elapsed()
        """The engine has processed everything that was read before this time."""
        self._last_scan = clock.elapsed()
        self.scanning = False
        self._postponed: list[TierEvent] = []
        """Events that arrived while the engine waited for a write."""

    # --- what is known -----------------------------------------------------------------------

    def has(self, record: Record) -> bool:
        return record.is_stored(self.number)

    def lacks(self, record: Record) -> bool:
        """Whether it should have the record and does not."""
        return not self.has(record) and self._policy.accepts(record)

    def is_writing(self, record: Record) -> bool:
        return record in self._writing

    def will_write(self, record: Record) -> bool:
        return record in self._to_spill

    def is_reading(self, record: Record) -> bool:
        return record in self._reading

    def usage(self) -> TierUsage:
        return self._worker.usage()

    @property
    def writes(self) -> bool:
        """Whether the tier currently accepts writes."""
        return self.usage().status.state == "ok"

    @property
    def is_store(self) -> bool:
        """Whether records here are found by looking up names, not by a scan."""
        return self._worker.is_store

    @property
    def deadline_s(self) -> float:
        """How long a request waits for this tier in total."""
        return self._worker.deadline_s

    @property
    def ask_s(self) -> float | None:
        """How long the store takes to look up a prompt; None if unknown or out of date."""
        is_stale = self._clock.elapsed() - self._asked_at > STALE_S
        return None if is_stale or not self._ask_s else self._ask_s.value

    @property
    def idle(self) -> bool:
        """Whether a poll could do nothing: nothing has happened, and none is left to be written, or the
        queue is full and the next outcome wakes us."""
        if self._postponed or self._worker.n_results or self._stamps.has_raised(self.number):
            return False
        return not self._can_spill if self._to_spill else not self._to_spill.holds_any

    @property
    def _can_spill(self) -> bool:
        return self._worker.has_room(self._to_spill.first.nbytes)

    # --- writing -----------------------------------------------------------------------------

    def spill(self, record: Record) -> None:
        """Write the record soon, or a window when it is known to be of use."""
        # Other servers may branch off anywhere.
        self._to_spill.add(record, self._clock.elapsed(), holds=not self.is_store)

    def is_worth_writing(self, record: Record) -> bool:
        """Whether a record that leaves memory should be written: what only those need who go back in a
        conversation is not, once little is left of the day's budget."""
        usage = self.usage()
        written, limit = usage.day_nbytes, usage.day_limit_nbytes
        is_short = None not in (written, limit) and (written or 0) > LAVISH_SHARE * (limit or 0)
        return not (is_short and self._to_spill.is_passed(record))

    def spill_now(self, record: Record) -> None:
        """Write a record that is about to leave memory as soon as the queue has room."""
        self._worker.defer_writes(False)  # until the next poll
        if not self._has_or_is_writing(record) and not self._write(record):
            self._to_spill.add_first(record, self._clock.elapsed())

    def _spill_next(self) -> bool:
        """Hand one record over; False when the queue is full."""
        record = self._to_spill.first
        is_here = record.arrays is not None and self._tree.is_current(record)
        if is_here and not self._has_or_is_writing(record) and not self._write(record):
            return False
        self._to_spill.drop_first()
        return True

    def _has_or_is_writing(self, record: Record) -> bool:
        return self.has(record) or record.is_being_written(self.number)

    def _write(self, record: Record) -> bool:
        self._touch_due()  # or a full tier would evict what the record needs
        if not self._worker.has_room(record.nbytes):
            return False
        payload, stamp = to_host(payload_of(record)), self._stamps.of(record)
        header = self._catalogue.header(record, payload.tensors, payload.places)
        order = WriteOrder(header, payload, self._tree.uses.stamp_of(stamp), record)
        if not self._worker.submit(order):
            return False
        self._ledger.begin_write(record, self.number)
        self._writing[record] = _Writing(order, payload, stamp)
        return True

    def _write_over(self, outcome: WriteOver) -> RecordWritten | WriteFailed:
        record, result = outcome.order.record, outcome.result
        assert record is not None
        stamp = self._writing.pop(record).stamp
        self._ledger.end_write(record, self.number, stored=isinstance(result, WriteResult))
        if isinstance(result, WriteResult):
            raised = self._tree.order.note(record, stamp)  # it may have been used since
            self._stamps.raised_in(self.number, raised)
            return RecordWritten(record, result.evicted)
        if isinstance(result, TierFault):
            self._unwritten[record] = None
        return WriteFailed(record, result)

    def give_up(self, records: Iterable[Record]) -> None:
        """Nobody wants these to be written any more."""
        for record in records:
            if record in self._writing:
                self._writing[record].order.wanted = False

    def give_up_below(self, root: Root) -> None:
        self.give_up([record for record in self._writing if record.node.root.key == root.key])

    def _retry(self) -> None:
        """Spill again what a fault held back: while the fault lasts, one record, as a trial."""
        records = [r for r in self._unwritten if r.alive and r.arrays is not None]
        records.sort(key=lambda r: r.node.start)
        n = len(records) if self.writes else 1
        self._unwritten = dict.fromkeys(records[n:])
        for record in records[:n]:
            self.spill(record)

    # --- reading and asking ------------------------------------------------------------------

    def load(self, record: Record, demand: Demand) -> None:
        """Read the record if still wanted when its turn comes. One read serves all who wait for it."""
        if record in self._reading:
            self._reading[record].demands.append(demand)
            return
        tokens = self._catalogue.tokens(record)
        order = ReadOrder(name_of(record), tokens, record, record.node.end, demands=[demand])
        self._reading[record] = order
        self._ledger.begin_read(record, self.number)
        self._worker.submit(order)

    def _read_over(self, outcome: ReadOver) -> RecordRead | ReadFailed | None:
        order, result, record = outcome.order, outcome.result, outcome.order.record
        assert record is not None
        if isinstance(result, Unwanted) and order.wanted:  # by now somebody else wants it
            self._worker.submit(order)
            return None
        del self._reading[record]
        self._ledger.end_read(record, self.number)
        if isinstance(result, Unwanted):
            return None
        if not isinstance(result, TierError):
            began = self._clock.elapsed()
            try:
                arrays = self._worker.arrays(order, result)
            except Exception as e:  # whatever it is, everyone waiting for the record must be told
                log.warning(
                    "cannot make arrays from a record, which costs a miss: %r", e, exc_info=e
                )
                result = TierError("no arrays", repr(e))
            else:
                return RecordRead(record, arrays, outcome.at, self._clock.elapsed() - began)
        self._ledger.lost(record, self.number)
        return ReadFailed(record, result)

    def ask(self, question: StoreQuestion) -> None:
        """Find out which records of a prompt the store has."""
        self._worker.submit(AskOrder(question, self._clock.elapsed()))

    def _answered(self, answer: StoreAnswered) -> StoreAnswered:
        if not answer.failed:
            self._ask_s.add(answer.took_s)
            self._asked_at = answer.at
        return answer

    def scan(self) -> None:
        """Find out what is stored, or what others changed since the last scan."""
        self.scanning = True
        self._worker.submit(ScanOrder())

    # --- forgetting --------------------------------------------------------------------------

    def delete(self, names: Sequence[Name]) -> None:
        self._worker.submit(DeleteOrder(names))

    def bury(self, root: Key, at: float) -> Future[None]:
        """Note that what was written under this root before `at` was cleared; done once no process
        can find it again."""
        return self._promise(BuryOrder(root, at))

    def deleted(self) -> Future[None]:
        """Done once everything that it was told to delete is gone."""
        return self._promise(ConfirmOrder())

    def _promise(self, order: BuryOrder | ConfirmOrder) -> Future[None]:
        """It fails with NotForgotten. A store only deletes, when it can: nothing is promised of it."""
        promise: Future[None] = Future()
        promise.set_running_or_notify_cancel()
        if self.is_store:
            promise.set_result(None)
        else:
            self._promises[order] = promise
            self._worker.submit(order)
        return promise

    def _keep(self, outcome: Confirmed) -> None:
        promise = self._promises.pop(outcome.order)
        if outcome.fault is None:
            promise.set_result(None)
        else:
            promise.set_exception(NotForgotten(self.name, outcome.fault))

    def _touch_due(self) -> None:
        for stamps in self._stamps.take(self.number):
            if stamps:
                self._worker.submit(TouchOrder(stamps))

    # --- outcomes ----------------------------------------------------------------------------

    def poll(self, load: EngineLoad) -> Iterator[TierEvent]:
        """Yield what happened in the tier, then spill as far as the engine's load allows."""
        postponed, self._postponed = self._postponed, []
        yield from postponed
        now = self._clock.elapsed()
        self._worker.defer_writes(load.prefilling and not self._ledger.leaving_nbytes)
        self._to_spill.tick(load, now, is_writing=bool(self._writing))
        self._touch_due()
        yield from self.take_events(now + POLL_S[load])
        if not self._worker.n_results:
            self.processed_until = now
        self._to_spill.release_due(now)
        while self._to_spill and self._to_spill.may_write(load, now, n_pending=len(self._writing)):
            if self._can_spill:
                wait_for_row(self._to_spill.first)
            began = self._clock.elapsed()
            if not self._spill_next():
                break
            self._to_spill.spent(self._clock.elapsed() - began)
            if load is EngineLoad.NONE and self._worker.n_results:
                break  # a request may be waiting for them: spill the rest at the next poll
        if not self.scanning and now - self._last_scan > RESCAN_S:
            self._retry()
            self.scan()

    def take_events(self, until: float, *, wait_s: float = 0.0) -> Iterator[TierEvent]:
        """Yield what can be taken before `until`. wait_s: how long to wait for the first outcome."""
        while (outcome := self._worker.poll(wait_s=wait_s)) is not None:
            wait_s = 0.0
            event: TierEvent | None = None
            match outcome:
                case WriteOver():
                    event = self._write_over(outcome)
                case ReadOver():
                    event = self._read_over(outcome)
                case StoreAnswered():
                    event = self._answered(outcome)
                case ScanBatch():
                    event = outcome
                case ScanEnded():
                    event = outcome
                    self.scanning, self._last_scan = False, self._clock.elapsed()
                case Confirmed():
                    self._keep(outcome)
            if event is not None:
                yield event
            if self._clock.elapsed() > until:
                return

    def take_writes(self, until: float) -> Iterator[TierEvent]:
        """Yield ends of writes until this time, by the system's clock. Other events are left for
        `poll`."""
        while (left := until - time.monotonic()) > 0:
            for event in self.take_events(math.inf, wait_s=left):
                if isinstance(event, RecordWritten | WriteFailed):
                    yield event
                else:
                    self._postponed.append(event)

    # --- the end -----------------------------------------------------------------------------

    def close(self) -> Iterator[TierEvent]:
        """Write what should be kept, in bounded time; yields events that arrive meanwhile."""
        self._retry()
        self._to_spill.release_all()
        # Other servers hardly need the records of the last few seconds.
        yield from self._flush(0.0 if self.is_store else SPILL_S)
        yield from self._take_outdated_writes(CLOSE_S)
        self._touch_due()
        self._worker.close()
        while (outcome := self._worker.poll()) is not None:
            if isinstance(outcome, Confirmed):
                self._keep(outcome)
        for order in list(self._promises):  # its thread hangs
            self._keep(Confirmed(order, IoClosed()))

    def _flush(self, timeout_s: float) -> Iterator[TierEvent]:
        """Spill all waiting records as the queue gets room."""
        until = time.monotonic() + timeout_s
        while self._to_spill:
            if self._spill_next():
                continue
            left = until - time.monotonic()
            if left <= 0 or not self._writing:
                return
            yield from self.take_events(self._clock.elapsed(), wait_s=left)

    def _take_outdated_writes(self, timeout_s: float) -> Iterator[TierEvent]:
        """Wait until no pending write is outdated."""
        until = time.monotonic() + timeout_s
        while any(not self._tree.is_current(r) for r in self._writing):
            left = until - time.monotonic()
            if left <= 0:
                return
            yield from self.take_events(self._clock.elapsed(), wait_s=left)


Reported = tuple[TierDesk, TierEvent]


class Desk:
    def __init__(
        self,
        ledger: Ledger,
        tree: Tree,
        catalogue: RecordCatalogue,
        *,
        window: int = 0,
        clock: Clock,
    ) -> None:
        self._ledger = ledger
        self._tree = tree
        self._window = window
        self._catalogue = catalogue
        self._clock = clock
        self._stamps = Stamps(tree)
        self._tiers: list[TierDesk] = []

    def __iter__(self) -> Iterator[TierDesk]:
        return iter(self._tiers)

    def __len__(self) -> int:
        return len(self._tiers)

    def __getitem__(self, number: int) -> TierDesk:
        return self._tiers[number]

    def add(
        self, name: str, worker: Worker, policy: SpillPolicy = EVERYTHING
    ) -> Iterator[Reported]:
        """Add a tier below the existing ones; yields what its first scan reports in time."""
        tier = TierDesk(
            name,
            worker,
            self._ledger,
            self._tree,
            self._catalogue,
            stamps=self._stamps,
            policy=policy,
            window=self._window,
            clock=self._clock,
        )
        self._tiers.append(tier)
        tier.scan()
        until = time.monotonic() + FIRST_SCAN_S
        while tier.scanning and (left := until - time.monotonic()) > 0:
            for event in tier.take_events(until, wait_s=left):
                yield tier, event
        if tier.scanning:
            log.info("%s cache: the first scan is slow; it continues in the background", name)

    # --- writing ---------------------------------------------------------------------------

    def spill(self, records: Iterable[Record]) -> None:
        """Write these records soon, to every tier that should have them."""
        for record in records:
            if record.arrays is not None:
                for tier in self.lacking(record):
                    if not record.is_being_written(tier.number):
                        tier.spill(record)

    def lacking(self, record: Record) -> list[TierDesk]:
        """The tiers that should have the record but do not."""
        if not self._tiers or not self._outlives_memory(record):
            return []
        return [tier for tier in self._tiers if tier.lacks(record)]

    def _outlives_memory(self, record: Record) -> bool:
        """Whether the record is worth writing to a tier.

        One that expires is not. A state at a prompt's end is only if no other state precedes it.
        """
        if record.node.expires_at != math.inf:
            return False
        if record.part is not Part.STATE or record.kind is not CheckpointKind.PROMPT_END:
            return True
        return not self._tree.has_state_before(record.node)

    def touch(self, stamps: Mapping[Record, float]) -> None:
        self._stamps.raised(stamps)

    def take_writes(self, timeout_s: float) -> Iterator[Reported]:
        """Yield ends of writes until time is up, or nobody asks for more."""
        until = time.monotonic() + timeout_s
        for tier in self._tiers:
            for event in tier.take_writes(until):
                yield tier, event

    # --- the rest --------------------------------------------------------------------------

    @property
    def deadline_s(self) -> float:
        """How long a request waits for tiers in total."""
        return min((tier.deadline_s for tier in self._tiers), default=math.inf)

    def fastest_with(self, record: Record) -> TierDesk:
        """The first tier that has the record; one must have it."""
        for tier in self._tiers:
            if tier.has(record):
                return tier
        raise LookupError("no tier has it")

    def delete(self, records: Sequence[Record]) -> None:
        for tier in self._tiers:
            tier.give_up(records)
            self.delete_from(tier, [r for r in records if tier.has(r)])

    def delete_from(self, tier: TierDesk, records: Iterable[Record]) -> None:
        names = [name_of(r) for r in records if not self._is_back(r, tier)]
        if names:
            tier.delete(names)

    def _is_back(self, record: Record, tier: TierDesk) -> bool:
        """Whether it was cleared and computed again, and the tier has or is writing the new one."""
        node = self._tree.find(record.node.key)
        newer = node.records.get(record.part) if node is not None else None
        if newer is None or newer is record or not self._tree.is_current(newer):
            return False
        return tier.has(newer) or newer.is_being_written(tier.number)

    def give_up_below(self, root: Root) -> None:
        """What is written below this root is not wanted any more."""
        for tier in self._tiers:
            tier.give_up_below(root)

    def deleted(self) -> list[Future[None]]:
        """For each tier: done once everything that it was told to delete is gone."""
        return [tier.deleted() for tier in self._tiers]

    @property
    def idle(self) -> bool:
        """Whether a poll could do nothing at present."""
        return all(tier.idle for tier in self._tiers)

    def close(self) -> Iterator[Reported]:
        """Write what should be kept and close the tiers; yields events that arrive meanwhile."""
        for tier in self._tiers:
            for event in tier.close():
                yield tier, event
