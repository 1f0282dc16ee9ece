"""Between the engine thread and the tiers: orders in one queue, results by callbacks on an I/O thread.

Here records become bytes and bytes become records: packed, sealed, checked against their names. Nothing
here waits for a disk on behalf of a caller, and writes are refused when too many bytes wait: the engine
never blocks on them.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum
from itertools import islice
from typing import Any, Protocol, TypeVar

import numpy as np

from firn.cache.container import Header, Label, Loaded, Name, Tag, pack, read_header, unpack
from firn.cache.faults import Damaged, Foreign, Locked, Missing, TierError, TierFault, Unwanted
from firn.cache.seal import Seal
from firn.cache.tiers import Gone, Seen, Stored, Tier, Usage
from firn.cache.tiers._health import Tally
from firn.core.keys import KeyTokens

log = logging.getLogger("firn.cache")
T = TypeVar("T")

MAX_DEFER_S = 2.0
N_THREADS = 4
BATCH = 256
"""Records in one order or report: small enough for others to come in between."""
Done = Callable[[Any], None]
"""Gets what the work returned, or the TierError that ended it. Called on an I/O thread."""
Wanted = Callable[[], bool]
Fetch = Callable[[], Sequence[Any]]
"""A record's bytes, a buffer for each tensor. Called on an I/O thread, one record after another."""


def _always() -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Entry:
    """A record that a scan found."""

    label: Label
    nbytes: int
    used_at: float
    """Unix time."""

    @property
    def name(self) -> Name:
        return self.label.name


Changes = Sequence[Entry | Gone[Name]]


class Io(Protocol):
    """One tier, as the tree uses it from the engine thread. No method waits but close()."""

    def try_write(
        self,
        header: Header,
        fetch: Fetch,
        *,
        used_at: float,
        done: Done,
        wanted: Wanted = _always,
    ) -> bool:
        """Hand a record over; done(Stored[Name] | TierError). False: the queue is full.

        `wanted` is asked, on an I/O thread, just before: done(Unwanted) if it is not any more.
        """
        ...

    def has_room(self, nbytes: int) -> bool:
        """Whether a write of so many bytes would be taken now."""
        ...

    def defer_writes(self, wanted: bool) -> None:
        """Begin no write, unless one has waited for long; or begin them again."""
        ...

    def read(self, name: Name, expect: KeyTokens, done: Done, *, wanted: Wanted = _always) -> None:
        """done(Loaded | TierError): every byte verified. A damaged record is set aside.

        `wanted`: as above.
        """
        ...

    def delete(self, names: Iterable[Name]) -> None: ...

    def touch(self, stamps: Mapping[Name, float]) -> None:
        """Raise each stamp to at least this."""
        ...

    def scan(self, batch: Callable[[Changes], None], done: Done) -> None:
        """What is stored or, from the second time on, what others changed; then done(None | TierError).

        `batch` is called on an I/O thread, with 256 at most, as they are found.
        """
        ...

    def usage(self) -> Usage: ...

    def close(self) -> object:
        """Write what is queued, in bounded time."""
        ...


# --- a record in a tier --------------------------------------------------------------------


def load(tier: Tier, name: Name, *, seal: Seal | None = None) -> Loaded:
    """A record, verified. Raises Missing, Foreign, Damaged, TierFault."""
    loaded = unpack(tier.read(str(name)), seal=seal)
    if loaded.header.name != name:
        raise Damaged("another record's bytes")
    return loaded


def label_of(seen: Seen, *, more: Callable[[int], Any], seal: Seal | None = None) -> Tag:
    """What a record says of itself: a Label, or only a Tag without its key. Raises Damaged, Foreign."""
    name = Name.parse(seen.name)
    if name is None:
        raise Foreign("a name of another format")
    tag = read_header(seen.head, seen.nbytes, more=more, seal=seal)
    if tag.name != name:
        raise Damaged("another record's bytes")
    return tag


# --- the threads ---------------------------------------------------------------------------


class Kind(Enum):
    """In the order in which they are served; first in, first out among equals."""

    READ = "read"
    DELETE = "delete"
    WRITE = "write"


@dataclass(eq=False, slots=True)
class Job:
    kind: Kind
    work: Callable[[], Any]
    done: Done
    nbytes: int = 0
    tier: object = None
    since: float = 0.0


class Closed(TierError):
    def __init__(self) -> None:
        super().__init__("closed")


def _nothing() -> None:
    """What is left of a job's work when it is done."""


class IoThreads:
    """One queue for all tiers. Any thread may call; only close() waits. Owner: whoever built it.

    One thread at a time writes to a tier, in the order of the orders: two are no faster, and a crash
    then leaves no record without its parent. The others are free for reads. Writes can be deferred,
    for a bounded time: they take processor time from whoever computes.
    """

    def __init__(
        self,
        n_threads: int = N_THREADS,
        *,
        max_write_nbytes: int = 1 << 30,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._max_write_nbytes = max_write_nbytes
        self._clock = clock
        lock = threading.RLock()
        self._work = threading.Condition(lock)
        """There may be something for a thread to do."""
        self._changed = threading.Condition(lock)
        """Something is done."""
        self._deferred = False
        self._queues: dict[Kind, deque[Job]] = {kind: deque() for kind in Kind}
        self._n_running = 0
        self._written_to: set[object] = set()
        """Tiers that a thread is writing to."""
        self._stopped = False
        self.closing = False
        self.write_nbytes = 0
        """Queued or being written."""
        self.n_callback_faults = 0
        self._threads = [
            threading.Thread(target=self._run, name=f"firn-io-{i}", daemon=True)
            for i in range(n_threads)
        ]
        for thread in self._threads:
            thread.start()

    # --- orders ------------------------------------------------------------------------------

    def read(self, work: Callable[[], Any], done: Done) -> None:
        self._submit(Job(Kind.READ, work, done))

    def delete(self, work: Callable[[], Any], done: Done = lambda result: None) -> None:
        """Also for other upkeep that may not wait for the writes."""
        self._submit(Job(Kind.DELETE, work, done))

    def try_write(
        self, work: Callable[[], Any], done: Done, *, nbytes: int, tier: object = None
    ) -> bool:
        """False, and nothing happens, when as many bytes wait as may. One record always fits."""
        job = Job(Kind.WRITE, work, done, nbytes, tier, self._clock())
        with self._work:
            if not self.has_room(nbytes):
                return False
            self.write_nbytes += nbytes
            self._queues[Kind.WRITE].append(job)
            self._work.notify()
            return True

    def has_room(self, nbytes: int) -> bool:
        with self._work:
            is_full = self.write_nbytes and self.write_nbytes + nbytes > self._max_write_nbytes
            return not is_full and not self.closing

    def defer_writes(self, wanted: bool) -> None:
        if wanted == self._deferred:
            return
        with self._work:
            self._deferred = wanted
            self._work.notify_all()

    @property
    def n_pending(self) -> int:
        """Orders that wait or run."""
        with self._work:
            return sum(len(q) for q in self._queues.values()) + self._n_running

    def close(
        self,
        *,
        timeout_s: float = 10.0,
        progress: Callable[[int, int], None] = lambda n_left, nbytes_left: None,
    ) -> None:
        """Take no more; write what is queued, within `timeout_s`, and stop the threads.

        Queued reads are answered with Closed, for nobody should wait on them for ever, and so is what is
        not done in time. `progress(n_left, nbytes_left)` is called here whenever something is done.
        """
        until = self._clock() + timeout_s
        with self._changed:
            self.closing = True
            self._work.notify_all()
            unread = self._take(Kind.READ)
        self._answer(unread)
        with self._changed:
            left = self.n_pending
            while left and self._clock() < until:
                self._changed.wait(timeout=max(until - self._clock(), 0.0))
                if self.n_pending != left:
                    left = self.n_pending
                    progress(left, self.write_nbytes)
            late = self._take(Kind.DELETE) + self._take(Kind.WRITE)
            self._stopped = True
            self._work.notify_all()
        self._answer(late)
        for thread in self._threads:
            thread.join(timeout=max(until - self._clock(), 0.1))

    # --- the threads -------------------------------------------------------------------------

    def _submit(self, job: Job) -> None:
        with self._work:
            if not self.closing:
                self._queues[job.kind].append(job)
                self._work.notify()
                return
        self._answer([job])

    def _run(self) -> None:
        while (job := self._next()) is not None:
            try:
                result = job.work()
            except TierError as e:
                result = e
            except BaseException as e:  # the outermost frame of the thread
                log.warning("a %s failed: %r", job.kind.value, e, exc_info=e)
                result = TierError("internal error", repr(e))
            with self._changed:
                self._n_running -= 1
                self.write_nbytes -= job.nbytes
                job.work = _nothing  # its bytes may go now
                self._changed.notify_all()
                if job.kind is Kind.WRITE:
                    self._written_to.discard(job.tier)
                    self._work.notify()  # this thread may have to read first
            self._tell(job, result)
            del job, result  # an idle thread must not keep a record alive

    def _next(self) -> Job | None:
        with self._work:
            while True:
                job = self._first(Kind.READ) or self._first(Kind.DELETE) or self._next_write()
                patience = 0.0 if job is None else self._patience_s(job)
                if job is not None and patience <= 0:
                    self._queues[job.kind].remove(job)
                    self._n_running += 1
                    if job.kind is Kind.WRITE:
                        self._written_to.add(job.tier)
                    return job
                if self._stopped:
                    return None
                self._work.wait(patience or None)

    def _first(self, kind: Kind) -> Job | None:
        return next(iter(self._queues[kind]), None)

    def _next_write(self) -> Job | None:
        return next((j for j in self._queues[Kind.WRITE] if j.tier not in self._written_to), None)

    def _patience_s(self, job: Job) -> float:
        """How much longer it is to wait."""
        if job.kind is not Kind.WRITE or not self._deferred or self.closing:
            return 0.0
        return job.since + MAX_DEFER_S - self._clock()

    def _tell(self, job: Job, result: Any) -> None:
        try:
            job.done(result)
        except Exception as e:
            self.n_callback_faults += 1
            log.warning("the callback of a %s failed: %r", job.kind.value, e, exc_info=e)

    def _answer(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            self._tell(job, Closed())

    def _take(self, kind: Kind) -> list[Job]:
        """Empty a queue; its jobs will not run."""
        jobs = list(self._queues[kind])
        self._queues[kind].clear()
        self.write_nbytes -= sum(j.nbytes for j in jobs)
        return jobs


class TierIo:
    """Implements Io: a tier behind I/O threads. Owner: the cache, on the engine thread."""

    def __init__(
        self,
        tier: Tier,
        threads: IoThreads,
        *,
        seal: Seal | None = None,
        flush_timeout_s: float = 10.0,
        progress: Callable[[int, int], None] = lambda n_left, nbytes_left: None,
    ) -> None:
        """seal: encrypts what is written; what another key encrypted is a miss."""
        self.threads = threads
        self._tier = tier
        self._seal = seal
        self._flush_timeout_s = flush_timeout_s
        self._progress = progress
        self._foreign: set[str] = set()
        """Of another version, or encrypted with another key: such a record gives way to ours."""
        self._tally = Tally()

    def try_write(
        self,
        header: Header,
        fetch: Fetch,
        *,
        used_at: float,
        done: Done,
        wanted: Wanted = _always,
    ) -> bool:
        nbytes = sum(spec.nbytes for spec in header.specs)
        is_taken = self.threads.try_write(
            lambda: self._write(header, fetch, used_at, wanted), done, nbytes=nbytes, tier=self
        )
        if not is_taken:
            self._tally.drop("queue full")
        return is_taken

    def has_room(self, nbytes: int) -> bool:
        return self.threads.has_room(nbytes)

    def defer_writes(self, wanted: bool) -> None:
        self.threads.defer_writes(wanted)

    def read(self, name: Name, expect: KeyTokens, done: Done, *, wanted: Wanted = _always) -> None:
        self.threads.read(lambda: self._read(name, expect, wanted), done)

    def delete(self, names: Iterable[Name]) -> None:
        for some in _batches(names):
            self.threads.delete(lambda some=some: self._delete(some))  # type: ignore[misc]

    def touch(self, stamps: Mapping[Name, float]) -> None:
        if stamps:
            named = {str(name): stamp for name, stamp in stamps.items()}
            self.threads.delete(lambda: self._tier.touch(named))

    def scan(self, batch: Callable[[Changes], None], done: Done) -> None:
        self.threads.delete(lambda: self._scan(batch), done)

    def usage(self) -> Usage:
        usage = self._tier.usage()
        return replace(
            usage,
            n_foreign=usage.n_foreign + len(self._foreign),
            counts={**usage.counts, **self._tally.counts},
            drops={**usage.drops, **self._tally.drops},
        )

    def close(self) -> None:
        self.threads.close(timeout_s=self._flush_timeout_s, progress=self._progress)

    # --- on an I/O thread --------------------------------------------------------------------

    def _write(self, header: Header, fetch: Fetch, used_at: float, wanted: Wanted) -> Stored[Name]:
        if not wanted():
            raise Unwanted
        name = str(header.name)
        packed = pack(header, fetch(), seal=self._seal)
        if name in self._foreign:
            self._tier.delete(name)
            self._foreign.discard(name)
        stored = self._tier.write(name, packed.pieces, used_at=used_at)
        self._foreign.difference_update(stored.evicted)
        return Stored(stored.nbytes, stored.new, tuple(_parsed(stored.evicted)))

    def _read(self, name: Name, expect: KeyTokens, wanted: Wanted) -> Loaded:
        if not wanted():
            raise Unwanted
        try:
            loaded = load(self._tier, name, seal=self._seal)
            if not np.array_equal(loaded.header.tokens, expect):
                raise Damaged("another record's bytes", "tokens differ")
        except Foreign as e:
            self._foreign.add(str(name))
            raise Missing(e.reason) from e
        except Damaged as e:
            self._set_aside(str(name), e)
            raise
        return loaded

    def _delete(self, names: Iterable[Name]) -> None:
        fault = None
        for name in names:
            try:
                self._tier.delete(str(name))
            except TierFault as e:
                fault = e
        if fault is not None:
            raise fault

    def _scan(self, batch: Callable[[Changes], None]) -> None:
        for some in _batches(self._changes()):
            if self.threads.closing:
                return
            batch(some)

    def _changes(self) -> Iterator[Entry | Gone[Name]]:
        for change in self._tier.scan():
            if isinstance(change, Gone):
                self._foreign.discard(change.name)
                yield from map(Gone, _parsed([change.name]))
            elif (entry := self._entry(change)) is not None:
                yield entry

    def _entry(self, seen: Seen) -> Entry | None:
        """None: not a record that can be read here."""
        try:
            tag = label_of(seen, more=lambda n: self._tier.read(seen.name, n), seal=self._seal)
            if not isinstance(tag, Label):
                raise Locked
            return Entry(tag, seen.nbytes, seen.used_at)
        except Foreign:
            self._foreign.add(seen.name)
        except Damaged as e:
            self._set_aside(seen.name, e)
        except Missing:  # since it was seen
            pass
        return None

    def _set_aside(self, name: str, why: Damaged) -> None:
        self._tally.add(damaged=1)
        log.warning("a damaged record is set aside: %s (%s)", name, why.message)
        with suppress(TierFault):  # the tier will not read it again, whether or not it can move it
            self._tier.delete(name, keep=True)


def _parsed(names: Iterable[str]) -> Iterator[Name]:
    return (name for name in map(Name.parse, names) if name is not None)


def _batches(items: Iterable[T]) -> Iterator[tuple[T, ...]]:
    left = iter(items)
    while some := tuple(islice(left, BATCH)):
        yield some
