"""One tier behind a few I/O threads: orders in, outcomes out.

    submit ─▶ reads ─────────────────────────┐           ┌─▶ reads and answers ─▶ poll
              deletes, touches, scans, notes ┼▶ threads ─┤
              writes, one at a time ─────────┘           └─▶ all others ────────▶ poll

Whatever is in an upper queue goes before what is below it. Callers never wait for a disk.
"""

from __future__ import annotations

import logging
import math
import threading
from collections import deque
from collections.abc import Callable, Mapping

from firn.cache.arrays.host import from_host, staged
from firn.cache.arrays.payload import Payload
from firn.cache.storage.container import Loaded, Name
from firn.cache.storage.faults import IoClosed, TierError
from firn.cache.storage.orders import (
    AskOrder,
    BuryOrder,
    ConfirmOrder,
    DeleteOrder,
    Order,
    Outcome,
    ReadOrder,
    ReadOver,
    ScanBatch,
    ScanOrder,
    StoreAnswered,
    TouchOrder,
    WriteOrder,
    outcome_of,
)
from firn.cache.storage.seal import Seal
from firn.cache.storage.tier_records import BATCH, TierRecords
from firn.cache.tiers import Store, Tier, TierUsage
from firn.core.clock import SYSTEM_CLOCK, Clock

log = logging.getLogger("firn.cache")

MIB = 1 << 20
MAX_DEFER_S = 2.0
"""Longest time that a write is deferred."""
MAX_BATCHES = 64
"""Outcomes that may wait for the engine before a scan waits, too."""
N_THREADS = 4
SAY_EVERY_S = 1.0
"""How often a stopping server logs how much remains to be written."""
URGENT, OTHER = 0, 1


class Results:
    """Outcomes on their way from the I/O threads to the engine thread. Thread-safe."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._changed = threading.Condition()
        self._waiting: tuple[deque[Outcome], deque[Outcome]] = deque(), deque()
        self._is_nudged = False
        self._is_closed = False

    def __len__(self) -> int:
        return sum(map(len, self._waiting))

    def put(self, outcome: Outcome) -> None:
        is_urgent = isinstance(outcome, ReadOver | StoreAnswered)
        with self._changed:
            self._waiting[URGENT if is_urgent else OTHER].append(outcome)
            self._changed.notify_all()
        self._wake()

    def put_batch(self, batch: ScanBatch) -> bool:
        """Wait for room first, so that a scan keeps to the engine's pace. False: closed."""
        with self._changed:
            self._changed.wait_for(
                lambda: len(self._waiting[OTHER]) < MAX_BATCHES or self._is_closed
            )
            if self._is_closed:
                return False
        self.put(batch)
        return True

    def take(self, wait_s: float) -> Outcome | None:
        with self._changed:
            if wait_s > 0:
                self._changed.wait_for(lambda: len(self) or self._is_nudged, wait_s)
            self._is_nudged = False
            for waiting in self._waiting:
                if waiting:
                    self._changed.notify_all()
                    return waiting.popleft()
        return None

    def nudge(self) -> None:
        """Have the engine poll: something else has happened that concerns it."""
        with self._changed:
            self._is_nudged = True
            self._changed.notify_all()
        self._wake()

    def close(self) -> None:
        """No scan waits any more."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()


def nobody() -> None:
    """Nobody has to be woken: whoever polls does so anyway."""


class TierWorker:
    """Implements orders.Worker. Any thread may submit; one polls. Owner: its creator.

    Only one thread at a time writes, in order of submission: two would be no faster, and a crash must
    not leave a record without its parent. The other threads are free for reads. Writes can be deferred
    for a bounded time, because they take processor time from prefill.
    """

    def __init__(
        self,
        tier: Tier,
        *,
        seal: Seal | None = None,
        n_threads: int = N_THREADS,
        max_write_nbytes: int = 1 << 30,
        flush_timeout_s: float = 10.0,
        wake: Callable[[], None] = nobody,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """seal: see TierRecords. wake: called on an I/O thread when there is something to poll."""
        self.is_store = isinstance(tier, Store)
        self.deadline_s = tier.deadline_s if isinstance(tier, Store) else math.inf
        self.records = TierRecords(tier, seal=seal)
        self.results = Results(wake)
        self._max_write_nbytes = max_write_nbytes
        self._flush_timeout_s = flush_timeout_s
        self._clock = clock
        lock = threading.RLock()
        self._work = threading.Condition(lock)
        """Notified when a thread may find something to do."""
        self._changed = threading.Condition(lock)
        """Notified when an order is over."""
        self._reads: deque[Order] = deque()
        self._upkeep: deque[Order] = deque()
        """At most one DeleteOrder and one TouchOrder, for all that are waiting."""
        self._writes: deque[tuple[WriteOrder, float]] = deque()
        """Each with the time when it was submitted."""
        self._running: list[Order] = []
        self._stamps: list[Mapping[Name, float]] = []
        """What is to be touched."""
        self._confirmations: list[ConfirmOrder] = []
        self._defers = False
        self._is_stopped = False
        self.closing = False
        self.write_nbytes = 0
        """Bytes queued or being written."""
        self._threads = [
            threading.Thread(target=self._run, name=f"firn-io-{i}", daemon=True)
            for i in range(n_threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def n_results(self) -> int:
        return len(self.results)

    @property
    def n_pending(self) -> int:
        """Orders queued or being carried out."""
        with self._work:
            queued = len(self._reads) + len(self._upkeep) + len(self._writes)
            return queued + len(self._running)

    # --- orders ------------------------------------------------------------------------------

    def submit(self, order: Order) -> bool:
        with self._work:
            if isinstance(order, WriteOrder):
                return self._accept(order)
            is_over = self.closing or self._is_confirmed(order)
            if not is_over:
                self._queue(order)
        if is_over:
            result = IoClosed() if self.closing else self.records.fault_of_deleting()
            self._end(order, result)
        return True

    def _accept(self, order: WriteOrder) -> bool:
        """Too many bytes are refused, but a lone record always fits."""
        nbytes = order.nbytes
        if not self.has_room(nbytes):
            self.records.tally.drop("queue full")
            return False
        self.write_nbytes += nbytes
        self._writes.append((order, self._clock.elapsed()))
        self._work.notify()
        return True

    def _is_confirmed(self, order: Order) -> bool:
        return isinstance(order, ConfirmOrder) and not self._is_at(DeleteOrder)

    def _queue(self, order: Order) -> None:
        """Only one thread at a time deletes: there may be 100,000 names, and other orders wait. Only
        one touches: of two, the one with the lower stamp could be last."""
        match order:
            case ReadOrder() | AskOrder():
                self._reads.append(order)
            case ConfirmOrder():
                self._confirmations.append(order)
                return
            case DeleteOrder():
                self.records.doom(order.names)
                if self._is_at(DeleteOrder):
                    return
                self._upkeep.append(order)
            case TouchOrder():
                self._stamps.append(order.stamps)
                if self._is_at(TouchOrder):
                    return
                self._upkeep.append(order)
            case BuryOrder():
                self.records.clear(order.root, order.at)
                self._upkeep.append(order)
            case _:
                self._upkeep.append(order)
        self._work.notify()

    def _is_at(self, kind: type[DeleteOrder | TouchOrder]) -> bool:
        """Whether an order of this kind is queued or being carried out."""
        return any(isinstance(o, kind) for queue in (self._upkeep, self._running) for o in queue)

    def has_room(self, nbytes: int) -> bool:
        with self._work:
            is_full = self.write_nbytes and self.write_nbytes + nbytes > self._max_write_nbytes
            return not is_full and not self.closing

    def defer_writes(self, defer: bool) -> None:
        if defer == self._defers:
            return
        with self._work:
            self._defers = defer
            self._work.notify_all()

    def poll(self, *, wait_s: float = 0.0) -> Outcome | None:
        return self.results.take(wait_s)

    def arrays(self, order: ReadOrder, loaded: Loaded) -> Payload:
        return from_host(loaded.header.tensors, loaded.header.places, loaded.buffers)

    def usage(self) -> TierUsage:
        return self.records.usage()

    def close(self) -> None:
        """Accept no more orders; write and delete what is queued, in bounded time, and stop the threads.

        Queued reads, and orders still queued when the time is up, end with IoClosed, so that nobody
        waits for them forever.
        """
        until = self._clock.elapsed() + self._flush_timeout_s
        self.results.close()
        with self._changed:
            self.closing = True
            self._work.notify_all()
            unread = [*self._reads]
            self._reads.clear()
        for order in unread:
            self._end(order, IoClosed())
        self._wait_for_the_rest(until)
        with self._changed:
            late = [*self._upkeep, *self._confirmations, *(order for order, _ in self._writes)]
            self.write_nbytes -= sum(order.nbytes for order, _ in self._writes)
            for queue in (self._upkeep, self._confirmations, self._writes):
                queue.clear()
            self._is_stopped = True
            self._work.notify_all()
        for order in late:
            self._end(order, IoClosed())
        for thread in self._threads:
            thread.join(timeout=max(until - self._clock.elapsed(), 0.1))

    def _wait_for_the_rest(self, until: float) -> None:
        say_at = -math.inf
        with self._changed:
            while (n_left := self.n_pending) and (now := self._clock.elapsed()) < until:
                if now >= say_at and self.write_nbytes:
                    say_at = now + SAY_EVERY_S
                    mib = self.write_nbytes // MIB
                    log.info("writing records before exit: %d left, %d MiB", n_left, mib)
                self._changed.wait(timeout=max(until - now, 0.0))

    # --- the threads -------------------------------------------------------------------------

    def _run(self) -> None:
        while (order := self._next()) is not None:
            result = self._carried_out(order)
            with self._changed:
                self._running.remove(order)
                if isinstance(order, WriteOrder):
                    self.write_nbytes -= order.nbytes
                self._go_on(order)
                self._changed.notify_all()
                self._work.notify()  # another thread may write; this one may have to read first
            self._end(order, result)
            del order, result  # an idle thread must not keep a record alive

    def _next(self) -> Order | None:
        """Wait for the next order; None: stop."""
        with self._work:
            while True:
                patience = 0.0
                order: Order | None = None
                if self._reads:
                    order = self._reads.popleft()
                elif self._upkeep:
                    order = self._upkeep.popleft()
                elif self._writes and not any(isinstance(o, WriteOrder) for o in self._running):
                    patience = self._patience_s(self._writes[0][1])
                    if patience <= 0:
                        order, _ = self._writes.popleft()
                if order is not None:
                    self._running.append(order)
                    return order
                if self._is_stopped:
                    return None
                self._work.wait(patience or None)

    def _patience_s(self, since: float) -> float:
        """How much longer a write has to wait."""
        if not self._defers or self.closing:
            return 0.0
        return since + MAX_DEFER_S - self._clock.elapsed()

    def _carried_out(self, order: Order) -> object:
        """The result, or the TierError that ended it."""
        try:
            match order:
                case ReadOrder():
                    header, buffers = self.records.read(order)
                    return Loaded(header, list(staged(buffers)))  # here, to spare the engine
                case WriteOrder():
                    return self.records.write(order)
                case AskOrder():
                    return self.records.ask(order.question)
                case DeleteOrder():
                    self._delete_some()
                case TouchOrder():
                    self._touch()
                case BuryOrder():
                    self.records.bury()
                case ScanOrder():
                    self._scan()
                case ConfirmOrder():
                    pass
        except TierError as e:
            return e.with_traceback(None)  # it would keep the bytes
        except BaseException as e:  # the outermost frame of the thread
            what = type(order).__name__
            log.warning("cache I/O: a %s failed, which costs a miss: %r", what, e, exc_info=e)
            return TierError("internal error", repr(e))
        return None

    def _delete_some(self) -> None:
        """A batch; then other orders get their turn. When it is closing, all the rest."""
        n_done = 0
        while self.records.is_any_doomed and (n_done < BATCH or self.closing):
            self.records.delete_next()
            n_done += 1

    def _touch(self) -> None:
        with self._work:
            stamps, self._stamps = self._stamps, []
        self.records.touch(stamps)

    def _go_on(self, order: Order) -> None:
        """Queue what is left, by now, of an order that stands for several."""
        is_delete = isinstance(order, DeleteOrder)
        is_left = self.records.is_any_doomed if is_delete else bool(self._stamps)
        if isinstance(order, DeleteOrder | TouchOrder) and is_left and not self._is_stopped:
            self._upkeep.append(order)
        elif is_delete:
            confirmed, self._confirmations = self._confirmations, []
            for confirmation in confirmed:
                self._end(confirmation, self.records.fault_of_deleting())

    def _scan(self) -> None:
        names = self.records.take_undeleted()
        if names:
            self.submit(DeleteOrder(names))
        for changes in self.records.scan():
            if not self.results.put_batch(ScanBatch(changes)):
                return

    def _end(self, order: Order, result: object) -> None:
        if isinstance(order, WriteOrder):
            order.content = None
        outcome = outcome_of(order, result, self._clock.elapsed())
        if outcome is not None:
            self.results.put(outcome)
