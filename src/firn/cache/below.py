"""A tier below memory, seen from the engine thread: spilling, loading, and what others changed.

The engine thread makes and drops arrays; their bytes are fetched, hashed and written by the I/O threads.
Results arrive in a queue that `poll` empties between two steps, a little at a time while there are rows
to decode.

Owner: the engine thread, through the prefix cache.
"""

from __future__ import annotations

import math
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any

from firn.cache.arrays.host import Lent, from_host, lend, staged
from firn.cache.arrays.payload import Payload
from firn.cache.asking import Asked
from firn.cache.catalogue import Catalogue
from firn.cache.container import Loaded, Name
from firn.cache.estimates import FIRST_LATENCY_S, STALE_S, Samples
from firn.cache.faults import TierError, TierFault, Unwanted
from firn.cache.io import Changes, Entry, Io, Wanted
from firn.cache.live import payload_of, wait_for_row
from firn.cache.lookup import Question, search
from firn.cache.nodes import Record
from firn.cache.threads import Done
from firn.cache.tiers import Stored, Usage
from firn.cache.tree import Tree
from firn.core.ports import EngineLoad

BUSY_SHARE = 0.02
"""Spilling may take this much of the engine's time while requests run; all of it when none do."""
MAX_CREDIT_S = 0.05
PATIENCE_S = 2.0
"""So long records wait while somebody waits for a first token: that comes first."""
POLL_S = {
    EngineLoad.NONE: 0.05,
    EngineLoad.DECODING: 0.005,
    EngineLoad.PREFILLING: 0.25,
    EngineLoad.BOTH: 0.03,
}
"""Results are taken in for so long between two steps: who waits for a first token waits for them, too,
and a chunk takes longer than that."""
RESCAN_S = 10.0
MAX_BATCHES = 64
"""Of what a scan tells: so many may wait to be taken in."""
LOOK_UP_S = 0.2
"""A scan that waits looks so often whether it is to end."""


# --- what poll tells -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Arrived:
    """A record was read and verified, at this time of the cache's clock, and made into arrays."""

    record: Record
    arrays: Payload
    at: float
    array_s: float
    """What making the arrays took."""


@dataclass(frozen=True, slots=True)
class Lost:
    """A record could not be read: it is not there any more."""

    record: Record
    error: TierError


@dataclass(frozen=True, slots=True)
class Written:
    record: Record
    evicted: tuple[Name, ...]


@dataclass(frozen=True, slots=True)
class Unwritten:
    """A record was not written."""

    record: Record
    error: TierError


@dataclass(frozen=True, slots=True)
class Seen:
    """A piece of what a scan saw: records that others added or took away."""

    changes: Changes


@dataclass(frozen=True, slots=True)
class Answered:
    """What a store has of a prompt; nothing if it could not say."""

    question: Question
    entries: Sequence[Entry]


@dataclass(frozen=True, slots=True)
class Scanned:
    """A scan is over; the first has told of everything."""


News = Arrived | Lost | Written | Unwritten | Seen | Answered | Scanned
Take = Callable[[], News | None]


@dataclass(frozen=True, slots=True)
class _Lent:
    """What is being written. Its arrays must die on the engine thread."""

    payload: Lent
    stamp: float


def takes_all(record: Record) -> bool:
    return True


class Below:
    def __init__(
        self,
        name: str,
        io: Io,
        tree: Tree,
        catalogue: Catalogue,
        *,
        stamp: Callable[[Record], float],
        wake: Callable[[], None],
        takes: Callable[[Record], bool] = takes_all,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """stamp: what a record is to be written with. takes: whether it is to be written here at all.

        `wake` is called from an I/O thread when there is something to poll.
        """
        self.name = name
        self.number = tree.add_tier()
        self._io = io
        self._asked = io if isinstance(io, Asked) else None
        self._tree = tree
        self._catalogue = catalogue
        self._stamp = stamp
        self._wake = wake
        self.takes = takes
        self._clock = clock
        self._ask_s = Samples(FIRST_LATENCY_S)
        self._asked_at = -math.inf
        self._results: queue.PriorityQueue[tuple[int, int, Take]] = queue.PriorityQueue()
        """To be called on the engine thread: reads first, for somebody waits for them. The rest in its
        order: what a scan saw before a write is not true after it."""
        self._serial = count()
        self._room = threading.Semaphore(MAX_BATCHES)
        """For what a scan tells: it may be faster than the engine has time to hear of it."""
        self._closing = False
        self._to_spill: deque[tuple[Record, float]] = deque()
        """With the time since when it waits."""
        self._unwritten: dict[Record, None] = {}
        """In their order; a fault of the tier stood in their way."""
        self._lent: dict[Record, _Lent] = {}
        self._loading: dict[Record, list[Wanted]] = {}
        """With those who want it."""
        self._credit_s = MAX_CREDIT_S
        self._last_poll = clock()
        self._last_scan = clock()
        self.scanning = False
        self.received: Callable[[Name, Payload], Payload] = lambda name, arrays: arrays
        """What was read, as memory is to hold it."""

    # --- orders ----------------------------------------------------------------------------

    def spill(self, record: Record) -> None:
        """Write the record soon."""
        self._to_spill.append((record, self._clock()))

    def spill_now(self, record: Record) -> None:
        """Write a record that is about to leave memory, as soon as the queue has room."""
        if not self._is_on_its_way(record) and not self._write(record):
            self._to_spill.appendleft((record, self._clock() - PATIENCE_S))

    def load(self, record: Record, wanted: Wanted) -> None:
        """Read the record, if it is still wanted when its turn comes; `poll` will tell.

        One that is being read already is not read twice.
        """
        askers = self._loading.setdefault(record, [])
        askers.append(wanted)
        if len(askers) == 1:
            self._read(record)

    @property
    def asks(self) -> bool:
        """Whether records here are found by asking for them."""
        return self._asked is not None

    @property
    def ask_s(self) -> float | None:
        """How long a store takes to say what it has of a prompt; None: not known, or not any more."""
        is_stale = self._clock() - self._asked_at > STALE_S
        return None if is_stale or not self._ask_s.known else self._ask_s.value

    def ask(self, question: Question) -> None:
        """Find out what a store has of a prompt; `poll` will tell."""
        assert self._asked is not None
        take = partial(self._was_asked, question, self._clock())
        self._asked.ask(partial(search, question), self._done(take, is_urgent=True))

    def _read(self, record: Record) -> None:
        askers = self._loading[record]
        self._io.read(
            name_of(record),
            self._catalogue.tokens(record),
            self._done(partial(self._was_read, record), is_urgent=True),
            wanted=lambda: any(wanted() for wanted in list(askers)),
        )

    def forget(self, names: Iterable[Name]) -> None:
        self._io.delete(names)

    def touch(self, stamps: Mapping[Record, float]) -> None:
        """Raise the stamps of those that are stored here."""
        self._io.touch({name_of(r): stamp for r, stamp in stamps.items() if self.has(r)})

    def has(self, record: Record) -> bool:
        return bool(record.stored >> self.number & 1)

    def usage(self) -> Usage:
        return self._io.usage()

    @property
    def writes(self) -> bool:
        """Whether the tier takes writes just now."""
        return self._io.usage().status.state == "ok"

    def take_ended(self, timeout_s: float) -> Iterator[News]:
        """What becomes of writes that nobody wants any more; for so long at most."""
        until = time.monotonic() + timeout_s
        while any(not self._tree.is_current(r) for r in self._lent):
            left = until - time.monotonic()
            if left <= 0:
                return
            yield from self.take_results(self._clock(), wait_s=left)

    def close(self) -> None:
        self._closing = True
        self._retry()
        while self._to_spill and self._spill_next():
            pass
        self._io.close()

    # --- results ---------------------------------------------------------------------------

    def poll(self, load: EngineLoad) -> Iterator[News]:
        """What happened below, and a share of the spilling. A fraction of both under load."""
        now, busy = self._clock(), load is not EngineLoad.NONE
        self._io.defer_writes(load.prefilling and not self._tree.leaving_nbytes)
        elapsed, self._last_poll = now - self._last_poll, now
        self._credit_s = min(self._credit_s + BUSY_SHARE * elapsed, MAX_CREDIT_S)
        yield from self.take_results(now + POLL_S[load])
        while self._to_spill and (not busy or self._may_spill(load, now)):
            if not self.idle:
                wait_for_row(self._to_spill[0][0])
            began = self._clock()
            if not self._spill_next():
                break
            self._credit_s -= self._clock() - began
            if not busy and not self._results.empty():
                break  # someone waits: the rest comes with the next poll
        if not self.scanning and now - self._last_scan > RESCAN_S:
            self._retry()
            self.scan()

    def scan(self) -> None:
        """Look at what is stored, or at what others changed since. `poll` tells."""
        self.scanning = True

        def batch(changes: Changes) -> None:
            while not self._closing:
                if self._room.acquire(timeout=LOOK_UP_S):
                    break
            self._put(lambda: self._was_seen(changes))

        self._io.scan(batch, self._done(self._was_scanned))

    def take_results(self, until: float, *, wait_s: float = 0.0) -> Iterator[News]:
        """What the I/O threads are done with. wait_s: for the first of it."""
        while True:
            try:
                *_, take = self._results.get(wait_s > 0, wait_s or None)
            except queue.Empty:
                return
            wait_s = 0.0
            news = take()
            if news is not None:
                yield news
            if self._clock() > until:
                if not self._results.empty():
                    self._wake()
                return

    @property
    def idle(self) -> bool:
        """Nothing can be spilled now: none is left, or the queue is full and a write will wake us."""
        return not self._to_spill or not self._io.has_room(self._to_spill[0][0].nbytes)

    # --- inside ----------------------------------------------------------------------------

    def _was_read(self, record: Record, result: Any, at: float) -> News | None:
        askers = self._loading.pop(record, [])
        if isinstance(result, Loaded):
            began = self._clock()
            header = result.header
            arrays = from_host(header.tensors, header.places, result.buffers)
            arrays = self.received(name_of(record), arrays)
            return Arrived(record, arrays, at, self._clock() - began)
        if isinstance(result, Unwanted):
            if any(wanted() for wanted in askers):
                self._loading[record] = askers
                self._read(record)  # somebody asked for it meanwhile
            return None
        self._tree.set_gone(record, self.number)
        return Lost(record, result)

    def _was_asked(self, question: Question, began: float, result: Any, at: float) -> News:
        if isinstance(result, TierError):
            return Answered(question, ())
        self._ask_s.see(at - began)
        self._asked_at = at
        return Answered(question, result)

    def _was_written(self, record: Record, result: Any, at: float) -> News:
        lent = self._lent.pop(record)
        if isinstance(result, Stored):
            self._tree.set_stored(record, self.number)
            self.touch(self._tree.stamped(record, lent.stamp))  # it may have been used since
            return Written(record, result.evicted)
        self._tree.set_writing(record, self.number, on=False)
        if isinstance(result, TierFault):
            self._unwritten[record] = None
        return Unwritten(record, result)

    def _was_seen(self, changes: Changes) -> News:
        self._room.release()
        return Seen(changes)

    def _was_scanned(self, result: Any, at: float) -> News:
        self.scanning = False
        self._last_scan = self._clock()
        return Scanned()

    def _retry(self) -> None:
        """Spill again what a fault kept back; while the fault lasts, one record, to find out."""
        ours = [r for r in self._unwritten if r.alive and r.arrays is not None]
        ours.sort(key=lambda r: r.node.start)
        n = len(ours) if self.writes else 1
        self._unwritten = dict.fromkeys(ours[n:])
        for record in ours[:n]:
            self.spill(record)

    def _may_spill(self, load: EngineLoad, now: float) -> bool:
        if load.prefilling and now - self._to_spill[0][1] < PATIENCE_S:
            return False
        return self._credit_s > 0

    def _is_on_its_way(self, record: Record) -> bool:
        return bool((record.stored | record.writing) >> self.number & 1)

    def _spill_next(self) -> bool:
        """Queue one record; False when the write queue is full."""
        record, since = self._to_spill.popleft()
        gone = record.arrays is None or not self._tree.is_current(record)
        if gone or self._is_on_its_way(record):
            return True
        if self._write(record):
            return True
        self._to_spill.appendleft((record, since))
        return False

    def _write(self, record: Record) -> bool:
        if not self._io.has_room(record.nbytes):
            return False
        lent, stamp = lend(payload_of(record)), self._stamp(record)
        accepted = self._io.try_write(
            self._catalogue.header(record, lent.tensors, lent.places),
            lent.fetch,
            used_at=stamp,
            done=self._done(partial(self._was_written, record)),
            wanted=lambda: self._tree.is_current(record),
        )
        if accepted:
            self._tree.set_writing(record, self.number, on=True)
            self._lent[record] = _Lent(lent, stamp)
        return accepted

    def _done(self, take: Callable[[Any, float], News | None], *, is_urgent: bool = False) -> Done:
        """Called on an I/O thread: what became of an order is for the engine thread to take."""

        def done(result: Any) -> None:
            if isinstance(result, Loaded):
                result = Loaded(result.header, list(staged(result.buffers)))
            at = self._clock()
            self._put(lambda: take(result, at), is_urgent=is_urgent)

        return done

    def _put(self, take: Take, *, is_urgent: bool = False) -> None:
        self._results.put((not is_urgent, next(self._serial), take))
        self._wake()


def name_of(record: Record) -> Name:
    return Name(record.node.key, record.part)
