"""What lies below memory, seen from the engine thread: spilling, loading, and what others changed.

Arrays become host bytes and come back on the engine thread; hashing, files and waiting belong to the I/O
threads. Their results arrive in a queue that `poll` empties between two steps, a little at a time while
there are rows to decode.

Owner: the engine thread, through the prefix cache.
"""

from __future__ import annotations

import logging
import queue
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any
from weakref import WeakKeyDictionary

from firn.cache.codecs import Arrays
from firn.cache.codecs._host import from_host, to_host
from firn.cache.container import Header, Layers, Loaded, Name
from firn.cache.faults import TierError, TierFault
from firn.cache.index import Node, Record
from firn.cache.io import Changes, Io
from firn.cache.parts import Part
from firn.cache.tiers import Stored, Usage
from firn.core.keys import KeyTokens
from firn.core.ports import Load

log = logging.getLogger("firn.cache")

BUSY_SHARE = 0.02
"""Spilling may take this much of the engine's time while requests run; all of it when none do."""
MAX_CREDIT_S = 0.05
PATIENCE_S = 2.0
"""So long records wait while somebody waits for a first token: that comes first."""
POLL_BUSY_S = 0.01
"""Bytes turn into arrays for so long between two steps while rows decode."""
RESCAN_S = 10.0
FIRST_SCAN_S = 60.0
"""So long a start waits for the first scan; the rest of it goes on behind."""
STAMP_STEP_S = 2.0
"""A record's stamp is at least this much below its parent's, a state's below that of its pages: what
goes by age then goes from the end of a chain. As coarse as the coarsest time stamps of file systems."""
TOUCH_EVERY_S = 60.0


# --- what poll tells -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Arrived:
    """A record was read and verified."""

    record: Record
    payload: list[Arrays]


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
class Found:
    """What a scan saw: records that others added or took away."""

    changes: Changes


News = Arrived | Lost | Written | Unwritten | Found


class Store:
    def __init__(
        self,
        io: Io,
        header_of: Callable[[Record, Layers], Header],
        tokens_of: Callable[[Record], KeyTokens],
        *,
        wake: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`wake` is called from an I/O thread when there is something to poll."""
        self._io = io
        self._header_of = header_of
        self._tokens_of = tokens_of
        self._wake = wake
        self._clock = clock
        self._results: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
        self._to_spill: deque[tuple[Record, float]] = deque()
        """With the time since when it waits."""
        self._unwritten: dict[Record, None] = {}
        """In their order; a fault of the disk stood in their way."""
        self._stamps: WeakKeyDictionary[Node, float] = WeakKeyDictionary()
        """What nodes below were last stamped with."""
        self._lent: dict[Record, Sequence[memoryview]] = {}
        """Bytes that are being written. They may be an array's own: it must die on this thread."""
        self._loading: set[Record] = set()
        self._credit_s = MAX_CREDIT_S
        self._last_poll = clock()
        self._last_scan = clock()
        self._scanning = False

    # --- orders ----------------------------------------------------------------------------

    def spill(self, record: Record) -> None:
        """Write the record soon."""
        self._to_spill.append((record, self._clock()))

    def spill_now(self, record: Record) -> bool:
        """Write a record that is about to leave memory; False when the queue is full."""
        return record.writing or self._write(record)

    def load(self, record: Record) -> None:
        """Read the record; `poll` will tell. One that is being read already is not read twice."""
        if record in self._loading:
            return
        self._loading.add(record)
        self._io.read(_name(record), self._tokens_of(record), self._done(record))

    def forget(self, records: Iterable[Record]) -> None:
        self._io.delete([_name(r) for r in records])

    def touch(self, records: Iterable[Record]) -> None:
        """These were used, and so was all that leads to them: a parent is never older than its child."""
        used = {r for r in records if r.stored}
        if not used:
            return
        leaf, now = max((r.node for r in used), key=lambda n: n.end), time.time()
        path = list(leaf.path())
        if now - STAMP_STEP_S * 2 * len(path) - self._stamps.get(leaf, 0.0) < TOUCH_EVERY_S:
            return
        stamps: dict[Name, float] = {}
        for depth, node in zip(count(len(path), -1), path):
            stored = [r for r in node.records.values() if r.stored]
            main = [r for r in stored if r.part is Part.PAGES] or stored
            self.saw(node, now - STAMP_STEP_S * 2 * depth)
            for record in {*main, *used.intersection(stored)}:
                stamps[_name(record)] = self._stamps[node] - _below(record)
        self._io.touch(stamps)

    def saw(self, node: Node, stamp: float) -> None:
        """What a record of the node is stamped with."""
        self._stamps[node] = max(self._stamps.get(node, 0.0), stamp)

    def _stamp(self, record: Record) -> float:
        """For a new record: not above that of the node it hangs on."""
        node = record.node
        above = self._stamps.get(node.parent) if node.parent is not None else None
        stamp = time.time() - STAMP_STEP_S * 2 * sum(1 for _ in node.path())
        if above is not None:
            stamp = min(stamp, above - 2 * STAMP_STEP_S)
        self.saw(node, stamp)
        return stamp - _below(record)

    def usage(self) -> Usage:
        return self._io.usage()

    def close(self) -> None:
        self._retry()
        while self._to_spill and self._spill_next():
            pass
        self._io.close()

    def first_scan(self) -> Iterator[Changes]:
        """What is stored. Blocks, for the start only; what takes too long is told by `poll`."""
        self._scan()
        until = time.monotonic() + FIRST_SCAN_S
        while self._scanning:
            try:
                _, result = self._results.get(timeout=max(until - time.monotonic(), 0.0))
            except queue.Empty:
                log.warning("the cache is still being scanned; what is not found yet is computed")
                return
            news = self._news(None, result)
            if isinstance(result, TierError):
                raise result
            if isinstance(news, Found):
                yield news.changes

    def _scan(self) -> None:
        self._scanning = True
        self._io.scan(self._done(None), self._done(None))

    # --- results ---------------------------------------------------------------------------

    def poll(self, load: Load) -> Iterator[News]:
        """What happened below, and a share of the spilling. A fraction of both under load."""
        now, busy = self._clock(), load is not Load.NONE
        self._io.defer_writes(load is Load.PREFILLING)
        elapsed, self._last_poll = now - self._last_poll, now
        self._credit_s = min(self._credit_s + BUSY_SHARE * elapsed, MAX_CREDIT_S)
        yield from self._take_results(now + POLL_BUSY_S if busy else float("inf"))
        while self._to_spill and (not busy or self._may_spill(load, now)):
            began = self._clock()
            if not self._spill_next():
                break
            self._credit_s -= self._clock() - began
            if not busy and not self._results.empty():
                break  # someone waits: the rest comes with the next poll
        if not self._scanning and now - self._last_scan > RESCAN_S:
            self._retry()
            self._scan()

    def _retry(self) -> None:
        """Spill again what a fault kept back; while the fault lasts, one record, to find out."""
        ours = [r for r in self._unwritten if r.alive and r.payload is not None]
        ours.sort(key=lambda r: r.node.start)
        n = len(ours) if self._io.usage().status.state == "ok" else 1
        self._unwritten = dict.fromkeys(ours[n:])
        for record in ours[:n]:
            self.spill(record)

    def _may_spill(self, load: Load, now: float) -> bool:
        if load is Load.PREFILLING and now - self._to_spill[0][1] < PATIENCE_S:
            return False
        return self._credit_s > 0

    @property
    def idle(self) -> bool:
        """Nothing can be spilled now: none is left, or the queue is full and a write will wake us."""
        return not self._to_spill or not self._io.has_room(self._to_spill[0][0].nbytes)

    def _take_results(self, until: float) -> Iterator[News]:
        while True:
            try:
                record, result = self._results.get_nowait()
            except queue.Empty:
                return
            news = self._news(record, result)
            if news is not None:
                yield news
            if self._clock() > until:
                if not self._results.empty():
                    self._wake()
                return

    def _news(self, record: Record | None, result: Any) -> News | None:
        if record is None:
            if result is not None and not isinstance(result, TierError):
                return Found(result)
            self._scanning = False
            self._last_scan = self._clock()
            return None
        self._lent.pop(record, None)
        if isinstance(result, Stored):
            record.writing, record.stored = False, True
            return Written(record, result.evicted)
        if isinstance(result, Loaded):
            self._loading.discard(record)
            return Arrived(record, from_host(result.header.layers, result.buffers))
        if record.writing:
            record.writing = False
            if isinstance(result, TierFault):
                self._unwritten[record] = None
            return Unwritten(record, result)
        self._loading.discard(record)
        record.stored = False
        return Lost(record, result)

    def _spill_next(self) -> bool:
        """Queue one record; False when the write queue is full."""
        record, since = self._to_spill.popleft()
        if record.payload is None or record.stored or record.writing or not record.alive:
            return True
        if self._write(record):
            return True
        self._to_spill.appendleft((record, since))
        return False

    def _write(self, record: Record) -> bool:
        if not self._io.has_room(record.nbytes):
            return False
        layers, buffers = to_host(record.payload)
        accepted = self._io.try_write(
            self._header_of(record, layers),
            buffers,
            used_at=self._stamp(record),
            done=self._done(record),
        )
        if accepted:
            record.writing, self._lent[record] = True, buffers
        return accepted

    def _done(self, record: Record | None) -> Callable[[Any], None]:
        def done(result: Any) -> None:
            self._results.put((record, result))
            self._wake()

        return done


def _below(record: Record) -> float:
    return 0.0 if record.part is Part.PAGES else STAMP_STEP_S


def _name(record: Record) -> Name:
    return Name(record.node.key, record.part)
