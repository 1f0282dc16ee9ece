"""The I/O threads: one queue for the orders of all tiers, callbacks for the results.

Callers never wait for a disk. Writes are refused when too many bytes are queued.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from firn.cache.storage.faults import TierError

log = logging.getLogger("firn.cache")

MAX_DEFER_S = 2.0
"""Longest time that a write is deferred."""
N_THREADS = 4
T = TypeVar("T")
Done = Callable[[T | TierError], None]
"""Called on an I/O thread with what the work returned, or the TierError that it raised; with
IoClosed, on the thread that submits the order or closes the threads."""


class JobKind(Enum):
    """In order of priority. Jobs of one kind are served in order of arrival."""

    READ = "read"
    UPKEEP = "scan, touch or delete"
    WRITE = "write"


@dataclass(eq=False, slots=True)
class IoJob:
    kind: JobKind
    work: Callable[[], Any]
    done: Done[Any]
    nbytes: int = 0
    tier: object = None
    since: float = 0.0


class IoClosed(TierError):
    """The threads were closed before they reached the order."""

    def __init__(self) -> None:
        super().__init__("closed")


def _nothing() -> None:
    """Replaces a job's work once it is done."""


class IoThreads:
    """One queue for all tiers. Any thread may call; only close() waits. Owner: its creator.

    Only one thread at a time writes to a tier, in order of submission: two would be no faster, and
    a crash must not leave a record without its parent. The other threads are free for reads. Writes
    can be deferred for a bounded time, because they take processor time from prefill.
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
        """Notified when a thread may find something to do."""
        self._changed = threading.Condition(lock)
        """Notified when a job is done."""
        self._deferred = False
        self._queues: dict[JobKind, deque[IoJob]] = {kind: deque() for kind in JobKind}
        self._n_running = 0
        self._written_to: set[object] = set()
        """Tiers that a thread is currently writing to."""
        self._stopped = False
        self.closing = False
        self.write_nbytes = 0
        """Bytes queued or being written."""
        self._threads = [
            threading.Thread(target=self._run, name=f"firn-io-{i}", daemon=True)
            for i in range(n_threads)
        ]
        for thread in self._threads:
            thread.start()

    # --- orders ------------------------------------------------------------------------------

    def read(self, work: Callable[[], T], done: Done[T]) -> None:
        self._submit(IoJob(JobKind.READ, work, done))

    def upkeep(self, work: Callable[[], T], done: Done[T] = lambda result: None) -> None:
        """Scans, touches and deletes, which should not wait for writes."""
        self._submit(IoJob(JobKind.UPKEEP, work, done))

    def try_write(
        self, work: Callable[[], T], done: Done[T], *, nbytes: int, tier: object = None
    ) -> bool:
        """False: too many bytes are queued, or it is closing. A lone record always fits."""
        job = IoJob(JobKind.WRITE, work, done, nbytes, tier, self._clock())
        with self._work:
            if not self.has_room(nbytes):
                return False
            self.write_nbytes += nbytes
            self._queues[JobKind.WRITE].append(job)
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
        """Jobs queued or running."""
        with self._work:
            return sum(len(q) for q in self._queues.values()) + self._n_running

    def close(
        self,
        *,
        timeout_s: float = 10.0,
        progress: Callable[[int, int], None] = lambda n_left, nbytes_left: None,
    ) -> None:
        """Accept no more orders; write what is queued, within `timeout_s`, and stop the threads.

        Queued reads, and orders still queued when the time is up, end with IoClosed, so that nobody
        waits for them forever. `progress(n_left, nbytes_left)` is called as jobs finish.
        """
        until = self._clock() + timeout_s
        with self._changed:
            self.closing = True
            self._work.notify_all()
            unread = self._take(JobKind.READ)
        self._end_unrun(unread)
        with self._changed:
            left = self.n_pending
            while left and self._clock() < until:
                self._changed.wait(timeout=max(until - self._clock(), 0.0))
                if self.n_pending != left:
                    left = self.n_pending
                    progress(left, self.write_nbytes)
            late = self._take(JobKind.UPKEEP) + self._take(JobKind.WRITE)
            self._stopped = True
            self._work.notify_all()
        self._end_unrun(late)
        for thread in self._threads:
            thread.join(timeout=max(until - self._clock(), 0.1))

    # --- the threads -------------------------------------------------------------------------

    def _submit(self, job: IoJob) -> None:
        with self._work:
            if not self.closing:
                self._queues[job.kind].append(job)
                self._work.notify()
                return
        self._end_unrun([job])

    def _run(self) -> None:
        while (job := self._next()) is not None:
            try:
                result = job.work()
            except TierError as e:
                result = e
            except BaseException as e:  # the outermost frame of the thread
                log.warning(
                    "cache I/O: a %s failed, which costs a miss: %r", job.kind.value, e, exc_info=e
                )
                result = TierError("internal error", repr(e))
            with self._changed:
                self._n_running -= 1
                self.write_nbytes -= job.nbytes
                job.work = _nothing  # free its bytes
                self._changed.notify_all()
                if job.kind is JobKind.WRITE:
                    self._written_to.discard(job.tier)
                    self._work.notify()  # another thread may write; this one may have to read first
            self._tell(job, result)
            del job, result  # an idle thread must not keep a record alive

    def _next(self) -> IoJob | None:
        with self._work:
            while True:
                job = self._first(JobKind.READ) or self._first(JobKind.UPKEEP) or self._next_write()
                patience = 0.0 if job is None else self._patience_s(job)
                if job is not None and patience <= 0:
                    self._queues[job.kind].remove(job)
                    self._n_running += 1
                    if job.kind is JobKind.WRITE:
                        self._written_to.add(job.tier)
                    return job
                if self._stopped:
                    return None
                self._work.wait(patience or None)

    def _first(self, kind: JobKind) -> IoJob | None:
        return next(iter(self._queues[kind]), None)

    def _next_write(self) -> IoJob | None:
        return next(
            (j for j in self._queues[JobKind.WRITE] if j.tier not in self._written_to), None
        )

    def _patience_s(self, job: IoJob) -> float:
        """How much longer the job has to wait."""
        if job.kind is not JobKind.WRITE or not self._deferred or self.closing:
            return 0.0
        return job.since + MAX_DEFER_S - self._clock()

    def _tell(self, job: IoJob, result: Any) -> None:
        try:
            job.done(result)
        except Exception as e:
            log.warning("cache I/O: the callback of a %s failed: %r", job.kind.value, e, exc_info=e)

    def _end_unrun(self, jobs: Sequence[IoJob]) -> None:
        for job in jobs:
            self._tell(job, IoClosed())

    def _take(self, kind: JobKind) -> list[IoJob]:
        """Empty a queue without running its jobs."""
        jobs = list(self._queues[kind])
        self._queues[kind].clear()
        self.write_nbytes -= sum(j.nbytes for j in jobs)
        return jobs
