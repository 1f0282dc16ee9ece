"""The engine as other threads see it: an inbox, and a thread that owns everything else.

Other threads put calls into the inbox, and the engine thread runs them between two steps. If that
thread dies, every waiting client is told immediately and `on_death` is called.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Generic, TypeVar

from firn.core.errors import EngineDead, FirnError, QueueFull, ShuttingDown
from firn.core.ports import EngineHealth, Publish
from firn.core.values import Job, ModelInfo, RequestId
from firn.engine.loop import Loop
from firn.engine.parts import EngineParts
from firn.engine.sequence import ForcedTokens

log = logging.getLogger("firn.engine")
T = TypeVar("T")
P = TypeVar("P", bound=EngineParts)

IDLE_TICK_S = 0.5
"""How often an idle engine ticks the cache."""
LOAD_TICK_S = 0.005
"""How often it does so while requests wait for a load."""
START_FAILED_S = 10.0
"""How long a thread whose parts could not be built may take to end."""
TASKS = Path("/proc/self/task")
"""Linux lists the threads of a process here."""
UNSEEN_END_S = 0.05
"""Elsewhere, a thread's end cannot be seen: how long one that has left Python may take to end."""
END_POLL_S = 0.001
"""How often to check whether it has ended: nothing signals it, and the exit waits."""


class Engine(Generic[P]):
    """Implements core.ports.Engine. Its thread builds the parts (`P`), and only it touches them."""

    def __init__(
        self,
        build: Callable[[], P],
        publish: Publish,
        *,
        on_death: Callable[[], None] = lambda: None,
    ) -> None:
        self._build = build
        self._publish = publish
        self._on_death = on_death
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._ready: Future[ModelInfo] = Future()
        self._thread = threading.Thread(target=self._main, name="firn-engine", daemon=True)
        self._lock = threading.Lock()
        self._n_queued = 0
        self._stopping = False
        self._alive = False
        self._last_step = time.monotonic()
        # From here on: owned by the engine thread.
        self._parts: P
        self._loop: Loop

    # --- any thread ------------------------------------------------------------------------

    def start(self) -> ModelInfo:
        """Start the thread and wait for the model. Raises what building the parts raised."""
        self._thread.start()
        try:
            return self._ready.result()
        except BaseException:
            if self._ready.done():  # else a signal ended the wait, and the thread is still loading
                _await_end(self._thread, START_FAILED_S)
            raise

    @property
    def model(self) -> ModelInfo:
        return self._ready.result()

    def submit(self, job: Job) -> None:
        with self._lock:
            if self._stopping:
                raise ShuttingDown
            if not self._alive:
                raise EngineDead
            # Checked here: once a stream has begun, a refusal can no longer set the status.
            self._parts.budget.need_nbytes(job)
            if self._n_queued >= self._queue_room():
                raise QueueFull
            self._n_queued += 1
            # Under the lock, so that no job arrives after the inbox was emptied for the last time.
            self._inbox.put(lambda: self._loop.accept(job))

    def _queue_room(self) -> int:
        """Requests may wait up to the limit; those that get a free row at the next step do not count."""
        limits = self._parts.limits
        return max(limits.max_queue, limits.max_rows - self._loop.inflight.n_admitted)

    def cancel(self, request: RequestId) -> None:
        self._inbox.put(lambda: self._loop.cancel(request))

    def stop_choice(self, request: RequestId, choice: int) -> None:
        self._inbox.put(lambda: self._loop.stop_choice(request, choice))

    def force(self, request: RequestId, choice: int, tokens: Iterable[int], *, at: int) -> None:
        forced = ForcedTokens(at, tuple(tokens))
        self._inbox.put(lambda: self._loop.force(request, choice, forced))

    def wake(self) -> None:
        """Make the engine tick the cache, which has something to do."""
        self._inbox.put(lambda: None)

    def call(self, function: Callable[[P], T]) -> Future[T]:
        """Run a function on the engine thread between two steps."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return  # the caller has cancelled it
            try:
                future.set_result(function(self._parts))
            except Exception as e:  # the caller handles the faults of its own function
                self._loop.inflight.absorbed(e)
                future.set_exception(e)

        with self._lock:
            if self._alive:
                self._inbox.put(run)
                return future
        future.set_exception(EngineDead())
        return future

    @property
    def parts(self) -> P:
        """For counters that may be read from any thread; everything else goes through `call`."""
        self._ready.result()
        return self._parts

    def health(self) -> EngineHealth:
        inflight = self._loop.inflight if self._alive else None
        return EngineHealth(
            alive=self._alive,
            last_step_age_s=time.monotonic() - self._last_step,
            n_waiting=self._n_queued,
            n_prefilling=len(inflight.tasks) if inflight else 0,
            n_decoding=len(inflight.rows) if inflight else 0,
        )

    def stop(self, *, timeout_s: float = 10.0) -> None:
        """End the thread. Requests still open are told that the server is shutting down."""
        with self._lock:
            self._stopping = True
        self._inbox.put(lambda: None)
        _await_end(self._thread, timeout_s)

    # --- the engine thread -----------------------------------------------------------------

    def _main(self) -> None:
        try:
            self._parts = self._build()
            self._loop = Loop(
                self._parts,
                self._publish,
                left_queue=self._leave_queue,
                rejoined_queue=self._rejoin_queue,
            )
        except BaseException as e:
            self._ready.set_exception(e)
            return
        self._alive = True
        self._ready.set_result(self._parts.runner.info)
        try:
            while not self._stopping:
                self._drain()
                self._loop.step()
                self._last_step = time.monotonic()
            self._end_all(ShuttingDown())
        except BaseException:
            log.critical("the engine thread died: every open request fails", exc_info=True)
            try:
                self._end_all(EngineDead())
            except Exception:
                log.critical("could not notify open requests that the engine died", exc_info=True)
            self._on_death()
        finally:
            self._parts.cache.close()
            self._parts.preparer.close()
            self._parts.runner.close()

    def _drain(self) -> None:
        """Do what is in the inbox. If there is nothing to compute, wait for the next entry."""
        try:
            if not self._loop.busy:
                self._loop.inflight.flush()
                wait_s = IDLE_TICK_S if self._parts.cache.settled else 0.0
                if self._loop.inflight.tasks:  # which wait for a load that ends soon
                    wait_s = min(wait_s, LOAD_TICK_S)
                self._inbox.get(timeout=wait_s)()
            while True:
                self._inbox.get_nowait()()
        except queue.Empty:
            pass

    def _leave_queue(self) -> None:
        with self._lock:
            self._n_queued -= 1

    def _rejoin_queue(self) -> None:
        with self._lock:
            self._n_queued += 1

    def _end_all(self, error: FirnError) -> None:
        """Tell every client, including those whose job is still in the inbox."""
        with self._lock:
            self._alive = False
        self._loop.end_all(error)
        while not self._inbox.empty():  # new jobs, and cancels of requests that are gone
            self._inbox.get_nowait()()
        self._loop.end_all(error)
        with self._lock:
            self._n_queued = 0
        self._loop.inflight.flush()


def _await_end(thread: threading.Thread, timeout_s: float) -> None:
    """Wait until the operating system has ended the thread, too.

    MLX frees what it keeps for a thread after the thread's last line of Python, and takes the GIL for
    that: a process that exits at that moment is aborted.
    """
    until = time.monotonic() + timeout_s
    thread.join(timeout_s)
    if not TASKS.exists():
        time.sleep(UNSEEN_END_S)
    while (TASKS / str(thread.native_id)).exists() and time.monotonic() < until:
        time.sleep(END_POLL_S)
