"""The cache's I/O threads: one queue in three classes, read before delete before write.

Nothing here waits for the disk on behalf of a caller. Writes are bounded by their bytes and refused when
there are too many: the engine never blocks on them. Results come by callbacks, on an I/O thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from firn.cache.container import Header, Loaded
from firn.cache.faults import TierError, Unwanted
from firn.cache.tiers import Entry, Gone, Name, Tier, Usage
from firn.core.keys import KeyTokens

log = logging.getLogger("firn.cache")

MAX_DEFER_S = 2.0
Done = Callable[[Any], None]
"""Gets what the work returned, or the TierError that ended it. Called on an I/O thread."""


class Kind(Enum):
    """In the order in which they are served; first in, first out among equals."""

    READ = "reads"
    DELETE = "deletes"
    WRITE = "writes"


@dataclass(eq=False, slots=True)
class Job:
    kind: Kind
    work: Callable[[], Any]
    done: Done
    nbytes: int = 0
    since: float = 0.0


@dataclass(frozen=True, slots=True)
class IoCounts:
    n_queued: Mapping[str, int]
    n_running: Mapping[str, int]
    n_finished: Mapping[str, int]
    n_failed: Mapping[str, int]
    n_refused: int
    """Writes that found the queue full."""
    n_cancelled: int
    n_dropped: int
    """Writes that a stop left undone."""
    write_nbytes: int
    """Queued or being written."""
    n_callback_faults: int


@dataclass(frozen=True, slots=True)
class Flushed:
    n_done: int
    n_dropped: int
    seconds: float


class Closed(TierError):
    def __init__(self) -> None:
        super().__init__("closed")


def _nothing() -> None:
    """What is left of a job's work when it is done."""


class IoThreads:
    """Owner: whoever built it. Every method may be called from any thread; none waits but close().

    One thread writes at a time, in the order of the orders: a record is refused below while its parent
    is not there, so a child must not overtake it. The other threads are free for reads. Writes can be
    deferred, for a bounded time: they take processor time from whoever computes.
    """

    def __init__(
        self,
        n_threads: int,
        *,
        max_write_nbytes: int,
        clock: Callable[[], float] = time.monotonic,
        name: str = "firn-io",
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
        self._running: Counter[Kind] = Counter()
        self._finished: Counter[Kind] = Counter()
        self._failed: Counter[Kind] = Counter()
        self._n_refused = self._n_cancelled = self._n_dropped = self._n_callback_faults = 0
        self._write_nbytes = 0
        self._closing = False
        self._stopped = False
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{i}", daemon=True)
            for i in range(n_threads)
        ]
        for thread in self._threads:
            thread.start()

    # --- orders ------------------------------------------------------------------------------

    def read(self, work: Callable[[], Any], done: Done) -> Job:
        return self._submit(Job(Kind.READ, work, done))

    def delete(self, work: Callable[[], Any], done: Done = lambda result: None) -> Job:
        """Also for other small upkeep that may not wait for the writes."""
        return self._submit(Job(Kind.DELETE, work, done))

    def try_write(self, work: Callable[[], Any], done: Done, *, nbytes: int) -> bool:
        """False, and nothing happens, when as many bytes wait as may. One record always fits."""
        with self._changed:
            is_full = self._write_nbytes and self._write_nbytes + nbytes > self._max_write_nbytes
            if is_full or self._closing:
                self._n_refused += 1
                return False
            self._write_nbytes += nbytes
            self._queues[Kind.WRITE].append(Job(Kind.WRITE, work, done, nbytes, self._clock()))
            self._work.notify()
            return True

    def defer_writes(self, wanted: bool) -> None:
        """Begin no write, unless one has waited for long; or begin them again."""
        if wanted == self._deferred:
            return
        with self._work:
            self._deferred = wanted
            if self._queues[Kind.WRITE]:
                self._work.notify()

    def has_room(self, nbytes: int) -> bool:
        """Whether a write of so many bytes would be taken now."""
        with self._changed:
            is_full = self._write_nbytes and self._write_nbytes + nbytes > self._max_write_nbytes
            return not is_full and not self._closing

    def cancel(self, job: Job) -> bool:
        """Take back a job that waits; its callback is not called. False: it runs, or has run."""
        with self._changed:
            try:
                self._queues[job.kind].remove(job)
            except ValueError:
                return False
            self._n_cancelled += 1
            self._write_nbytes -= job.nbytes
            self._changed.notify_all()
            return True

    def counts(self) -> IoCounts:
        with self._changed:
            return IoCounts(
                n_queued={kind.value: len(q) for kind, q in self._queues.items()},
                n_running={kind.value: self._running[kind] for kind in Kind},
                n_finished={kind.value: self._finished[kind] for kind in Kind},
                n_failed={kind.value: self._failed[kind] for kind in Kind},
                n_refused=self._n_refused,
                n_cancelled=self._n_cancelled,
                n_dropped=self._n_dropped,
                write_nbytes=self._write_nbytes,
                n_callback_faults=self._n_callback_faults,
            )

    def close(
        self,
        *,
        flush: bool = True,
        timeout_s: float = 10.0,
        progress: Callable[[int, int], None] = lambda n_left, nbytes_left: None,
    ) -> Flushed:
        """Take no more; end what waits, within `timeout_s`, and stop the threads.

        flush: write what is queued. Queued reads are answered with Closed, for nobody should wait
        on them for ever. `progress(n_left, nbytes_left)` is called here whenever one is done.
        """
        start = self._clock()
        with self._changed:
            self._closing = True
            self._work.notify_all()
            unread = self._take(Kind.READ)
            undone = [] if flush else self._take(Kind.WRITE) + self._take(Kind.DELETE)
            n_before = sum(self._finished.values())
        self._answer(unread + undone)
        with self._changed:
            left = self._n_left()
            while left and self._clock() - start < timeout_s:
                self._changed.wait(timeout=max(timeout_s - (self._clock() - start), 0.0))
                if self._n_left() != left:
                    left = self._n_left()
                    progress(left, self._write_nbytes)
            late = self._take(Kind.WRITE) + self._take(Kind.DELETE)
            self._stopped = True
            self._work.notify_all()
            n_done = sum(self._finished.values()) - n_before
        self._answer(late)
        for thread in self._threads:
            thread.join(timeout=max(timeout_s - (self._clock() - start), 0.1))
        return Flushed(n_done, len(late) + len(undone), self._clock() - start)

    # --- the threads -------------------------------------------------------------------------

    def _submit(self, job: Job) -> Job:
        with self._changed:
            if not self._closing:
                self._queues[job.kind].append(job)
                self._work.notify()
                return job
        self._answer([job])
        return job

    def _run(self) -> None:
        while (job := self._next()) is not None:
            try:
                result = job.work()
                failed = False
            except TierError as e:
                result, failed = e, True
            except BaseException as e:  # the outermost frame of the thread
                log.warning("%s failed: %r", job.kind.value, e, exc_info=e)
                result, failed = TierError("internal error", repr(e)), True
            with self._changed:
                self._running[job.kind] -= 1
                self._finished[job.kind] += 1
                self._failed[job.kind] += failed
                self._write_nbytes -= job.nbytes
                job.work = _nothing  # its bytes may go now
                self._changed.notify_all()
                if job.kind is Kind.WRITE and self._queues[Kind.WRITE]:
                    self._work.notify()  # this thread may have to read first
            self._tell(job, result)
            del job, result  # an idle thread must not keep a record alive

    def _next(self) -> Job | None:
        with self._work:
            while True:
                patience = None
                for kind, waiting in self._queues.items():
                    if not waiting:
                        continue
                    if kind is Kind.WRITE:
                        if self._running[kind]:
                            continue
                        patience = self._patience_s(waiting[0])
                        if patience > 0:
                            continue
                    self._running[kind] += 1
                    return waiting.popleft()
                if self._stopped:
                    return None
                self._work.wait(patience)

    def _patience_s(self, write: Job) -> float:
        """How much longer a write is to wait."""
        if not self._deferred or self._closing:
            return 0.0
        return write.since + MAX_DEFER_S - self._clock()

    def _tell(self, job: Job, result: Any) -> None:
        try:
            job.done(result)
        except Exception as e:
            with self._changed:
                self._n_callback_faults += 1
            log.warning("the callback of %s failed: %r", job.kind.value, e, exc_info=e)

    def _answer(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            self._tell(job, Closed())

    def _take(self, kind: Kind) -> list[Job]:
        """Empty a queue; its jobs will not run."""
        jobs = list(self._queues[kind])
        self._queues[kind].clear()
        if kind is Kind.WRITE:
            self._n_dropped += len(jobs)
            self._write_nbytes -= sum(j.nbytes for j in jobs)
        return jobs

    def _n_left(self) -> int:
        return sum(len(q) for q in self._queues.values()) + sum(self._running.values())


class TierIo:
    """A tier behind I/O threads. Owner: the cache; its methods belong on the engine thread."""

    def __init__(
        self,
        tier: Tier,
        *,
        n_threads: int = 4,
        max_write_nbytes: int = 1 << 30,
        flush_timeout_s: float = 10.0,
        progress: Callable[[int, int], None] = lambda n_left, nbytes_left: None,
    ) -> None:
        self._tier = tier
        self._flush_timeout_s = flush_timeout_s
        self._progress = progress
        self.threads = IoThreads(n_threads, max_write_nbytes=max_write_nbytes)

    def try_write(
        self, header: Header, buffers: Sequence[Any], *, used_at: float, done: Done
    ) -> bool:
        nbytes = sum(spec.nbytes for spec in header.specs)
        return self.threads.try_write(
            lambda: self._tier.write(header, buffers), done, nbytes=nbytes
        )

    def has_room(self, nbytes: int) -> bool:
        return self.threads.has_room(nbytes)

    def defer_writes(self, wanted: bool) -> None:
        self.threads.defer_writes(wanted)

    def read(
        self, name: Name, expect: KeyTokens, done: Done, *, wanted: Callable[[], bool]
    ) -> None:
        def work() -> Loaded:
            if not wanted():
                raise Unwanted
            return self._tier.read(name, expect)

        self.threads.read(work, done)

    def delete(self, names: Iterable[Name]) -> None:
        for name in names:
            self.threads.delete(lambda name=name: self._tier.delete(name))  # type: ignore[misc]

    def touch(self, stamps: Mapping[Name, float]) -> None:
        if stamps:
            self.threads.delete(lambda: self._tier.touch(stamps))

    def scan(self, batch: Callable[[Sequence[Entry | Gone]], None], done: Done) -> None:
        def work() -> None:
            seen = list(self._tier.scan())
            for at in range(0, len(seen), 256):
                batch(seen[at : at + 256])

        self.threads.delete(work, done)

    def usage(self) -> Usage:
        usage = self._tier.usage()
        n_refused = self.threads.counts().n_refused
        return replace(usage, drops={**usage.drops, "queue full": n_refused})

    def close(self) -> Flushed:
        """Write what is queued, in bounded time."""
        return self.threads.close(timeout_s=self._flush_timeout_s, progress=self._progress)
