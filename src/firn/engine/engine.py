"""The engine thread: it owns the runner, the cache and every sequence.

    drain the inbox -> plan -> launch a decode step -> dispatch one prefill chunk
    -> read the tokens -> publish -> settle the chunk, commit what it finished

A request that fails ends alone. A step that fails takes its rows back to their tokens: each is read
again by itself, and only one that fails alone is given up. If the thread dies, every waiting client is
told at once and `on_death` is called.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from firn.core.errors import (
    EngineDead,
    FirnError,
    InvalidValue,
    QueueFull,
    ShuttingDown,
    StepFailed,
)
from firn.core.events import (
    ChoiceDone,
    EngineEvent,
    JobDone,
    JobFailed,
    Prefilled,
    Token,
)
from firn.core.ports import (
    Delivery,
    EngineHealth,
    PrefixCache,
    Publish,
    Restored,
    Runner,
    Trail,
)
from firn.core.values import Job, ModelInfo, Prompt, RequestId
from firn.engine.budget import Budget
from firn.engine.scheduler import Plan, Prefilling, View, Waiting, chunk_end, plan
from firn.engine.sequence import Choice, Forced, Sequence, Task

log = logging.getLogger("firn.engine")
T = TypeVar("T")

IDLE_TICK_S = 0.5
MAX_RESCUES = 1
CALIBRATE_EVERY = 64
"""Steps between two looks at how much memory the decoding rows really take."""


@dataclass(frozen=True, slots=True)
class Limits:
    max_rows: int
    max_queue: int
    prefill_chunk: int


@dataclass(frozen=True, slots=True)
class Parts:
    """What the engine thread builds for itself at its start."""

    runner: Runner
    cache: PrefixCache
    budget: Budget
    limits: Limits
    embedder: Any = None
    """`models.embedder.TextEmbedder`, where the model is one; the engine itself has no use for it."""


class Engine:
    """Implements core.ports.Engine. Its thread is the only one that touches the parts."""

    def __init__(
        self,
        build: Callable[[], Parts],
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
        # From here on: the engine thread's alone.
        self._parts: Parts
        self._sequences: dict[RequestId, Sequence] = {}
        self._waiting: list[Sequence] = []
        self._tasks: dict[int, Task] = {}
        self._rows: dict[Any, Choice] = {}
        self._n_tasks = 0
        self._n_steps = 0
        self._turn = 0
        self._out: list[Delivery] = []

    # --- any thread ------------------------------------------------------------------------

    def start(self) -> ModelInfo:
        """Start the thread and wait for the model; raises what building the parts raised."""
        self._thread.start()
        return self._ready.result()

    @property
    def model(self) -> ModelInfo:
        return self._ready.result()

    def submit(self, job: Job) -> None:
        with self._lock:
            if self._stopping:
                raise ShuttingDown
            if not self._alive:
                raise EngineDead
            if self._n_queued >= self._parts.limits.max_queue:
                raise QueueFull(self._n_queued)
            self._n_queued += 1
            # Under the lock: a job must not slip in after the last look into the inbox.
            self._inbox.put(lambda: self._accept(job))

    def cancel(self, request: RequestId) -> None:
        self._inbox.put(lambda: self._cancel(request))

    def stop_choice(self, request: RequestId, choice: int) -> None:
        self._inbox.put(lambda: self._stop_choice(request, choice))

    def force(self, request: RequestId, choice: int, tokens: Iterable[int], *, at: int) -> None:
        forced = Forced(at, tuple(tokens))
        self._inbox.put(lambda: self._force(request, choice, forced))

    def wake(self) -> None:
        """There is something for the cache's next tick."""
        self._inbox.put(lambda: None)

    def call(self, function: Callable[[Parts], T]) -> Future[T]:
        """Run a function on the engine thread between two steps: how others ask about the cache."""
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return  # nobody waits for it any more
            try:
                future.set_result(function(self._parts))
            except Exception as e:  # the caller's function: its faults are the caller's
                future.set_exception(e)

        with self._lock:
            if self._alive:
                self._inbox.put(run)
                return future
        future.set_exception(EngineDead())
        return future

    @property
    def parts(self) -> Parts:
        """For counters that may be read from any thread; everything else goes through `call`."""
        self._ready.result()
        return self._parts

    def health(self) -> EngineHealth:
        decoding = len(self._rows)
        return EngineHealth(
            alive=self._alive,
            last_step_age_s=time.monotonic() - self._last_step,
            n_waiting=self._n_queued,
            n_prefilling=len(self._tasks),
            n_decoding=decoding,
        )

    def stop(self, *, timeout_s: float = 10.0) -> None:
        """End the thread. Requests still open are told that the server is shutting down."""
        with self._lock:
            self._stopping = True
        self._inbox.put(lambda: None)
        self._thread.join(timeout_s)

    # --- the engine thread -----------------------------------------------------------------

    def _main(self) -> None:
        try:
            self._parts = self._build()
        except BaseException as e:
            self._ready.set_exception(e)
            return
        self._alive = True
        self._ready.set_result(self._parts.runner.info)
        try:
            while not self._stopping:
                self._step()
            self._end_all(ShuttingDown())
        except BaseException:
            log.critical("the engine died", exc_info=True)
            try:
                self._end_all(EngineDead())
            except Exception:
                log.critical("nobody could be told", exc_info=True)
            self._on_death()
        finally:
            self._parts.cache.close()
            self._parts.runner.close()

    def _step(self) -> None:
        self._drain()
        self._parts.cache.tick(busy=bool(self._tasks or self._rows))
        todo = self._plan()
        for request in todo.admit:
            self._admit(self._sequences[request])
        if todo.decode:
            self._launch()
        task = self._tasks.get(todo.prefill) if todo.prefill is not None else None
        if task is not None:
            task = self._dispatch_chunk(task)
        if todo.decode:
            self._collect(keep_in_flight=0 if task else 1)
        self._flush()
        if task is not None:
            self._settle_chunk(task)
        self._n_steps += 1
        if self._rows and self._n_steps % CALIBRATE_EVERY == 0:
            self._calibrate()
        self._last_step = time.monotonic()

    def _calibrate(self) -> None:
        """Compare what admission thought the decoding rows would take with what they take."""
        budget = self._parts.budget
        estimated = sum(budget.cost.of(row.n_tokens) for row in self._rows)
        budget.learn(estimated_nbytes=estimated, used_nbytes=self._parts.runner.live_nbytes())

    def _drain(self) -> None:
        """Take what is in the inbox; with nothing else to do, wait for it."""
        busy = bool(self._tasks or self._rows) or any(s.trail.ready for s in self._waiting)
        try:
            if not busy:
                self._flush()
                wait = IDLE_TICK_S if self._parts.cache.settled else 0.0
                self._inbox.get(timeout=wait)()
            while True:
                self._inbox.get_nowait()()
        except queue.Empty:
            pass

    def _plan(self) -> Plan:
        waiting = tuple(
            Waiting(s.job.id, s.job.n, s.need_nbytes, s.trail.ready) for s in self._waiting
        )
        prefilling = tuple(Prefilling(t.number, t.n_left) for t in self._tasks.values())
        n_rows = sum(len(s.open_choices) for s in self._sequences.values() if s.admitted)
        return plan(
            View(
                waiting=waiting,
                prefilling=prefilling,
                n_rows=n_rows,
                max_rows=self._parts.limits.max_rows,
                n_decoding=len(self._rows),
                free_nbytes=self._parts.budget.free_nbytes(),
                turn=self._turn,
            )
        )

    # --- arrivals and departures -----------------------------------------------------------

    def _accept(self, job: Job) -> None:
        try:
            if job.n > self._parts.limits.max_rows:
                raise InvalidValue(
                    "n", f"{job.n} replies are over the limit of {self._parts.limits.max_rows}"
                )
            need = self._parts.budget.need_nbytes(job)
            trail = self._parts.cache.open(job.prompt, job.namespace, job.cache)
        except Exception as e:
            self._leave_queue()
            self._say(job.id, JobFailed(_named(job, e)))
            return
        sequence = Sequence(job, trail, need_nbytes=need)
        self._sequences[job.id] = sequence
        self._waiting.append(sequence)

    def _admit(self, sequence: Sequence) -> None:
        self._waiting.remove(sequence)
        self._leave_queue()
        sequence.admitted = True
        self._parts.budget.admit(sequence.job, sequence.need_nbytes)
        self._parts.cache.set_room(self._parts.budget.free_nbytes())
        task = self._guard(sequence, lambda: self._open_task(sequence))
        if task is None:
            return
        self._say(sequence.job.id, sequence.trail.found)
        if task.n_left == 0:
            self._begin_decode(task)

    def _open_task(self, sequence: Sequence) -> Task:
        """Restore what the cache has of the prompt into a new row."""
        restored = self._parts.cache.restore(sequence.trail)
        row = self._restore(sequence, restored) if restored else None
        if row is None:
            row = self._parts.runner.start(None)
        prompt, trail = sequence.job.prompt, sequence.trail
        return self._add_task(sequence, prompt, sequence.choices, trail, row)

    def _restore(self, sequence: Sequence, restored: Restored) -> Any | None:
        """A row with a past. If that fails it is a miss, and this request leaves the cache alone."""
        try:
            return self._parts.runner.start(restored)
        except Exception as e:
            log.warning("restoring %d tokens failed: %r", restored.n_tokens, e, exc_info=e)
            self._parts.cache.close_trail(sequence.trail, None)
            sequence.trail = self._parts.cache.blank()
            return None

    def _add_task(
        self, sequence: Sequence, prompt: Prompt, choices: list[Choice], trail: Trail, row: Any
    ) -> Task:
        self._n_tasks += 1
        task = Task(self._n_tasks, sequence, prompt, choices, trail, row)
        self._tasks[task.number] = task
        return task

    def _cancel(self, request: RequestId) -> None:
        sequence = self._sequences.get(request)
        if sequence is not None:
            self._retire(sequence)

    def _stop_choice(self, request: RequestId, index: int) -> None:
        sequence = self._sequences.get(request)
        if sequence is not None and not sequence.choices[index].done:
            self._finish_choice(sequence.choices[index])

    def _force(self, request: RequestId, index: int, forced: Forced) -> None:
        sequence = self._sequences.get(request)
        if sequence is None or sequence.choices[index].done:
            return
        choice = sequence.choices[index]
        if choice.force(forced) and choice.row is not None:
            self._force_row(choice)

    def _force_row(self, choice: Choice) -> None:
        rest = choice.forced.rest(choice.n_picked)
        n_prompt = len(choice.sequence.job.prompt)
        self._parts.runner.force(choice.row, rest.tokens, at=n_prompt + rest.at)

    def _leave_queue(self) -> None:
        with self._lock:
            self._n_queued -= 1

    def _retire(self, sequence: Sequence) -> None:
        """Drop all of a sequence's rows; the blocks done so far stay in the cache."""
        if sequence in self._waiting:
            self._waiting.remove(sequence)
            self._leave_queue()
        for task in [t for t in self._tasks.values() if t.sequence is sequence]:
            self._drop_task(task)
        for choice in sequence.open_choices:
            self._drop_row(choice)
            choice.done = True
        self._parts.cache.close_trail(sequence.trail, None)
        if sequence.admitted:
            self._parts.budget.release(sequence.job)
            self._parts.cache.set_room(self._parts.budget.free_nbytes())
        self._sequences.pop(sequence.job.id, None)

    def _drop_task(self, task: Task) -> None:
        del self._tasks[task.number]
        self._parts.cache.close_trail(task.trail, task.row)
        self._parts.runner.leave([task.row])

    def _drop_row(self, choice: Choice) -> None:
        if choice.row is None:
            return
        if choice.trail is not None:
            self._parts.cache.close_trail(choice.trail, choice.row)
        self._rows.pop(choice.row, None)
        self._parts.runner.leave([choice.row])
        choice.row = choice.trail = None

    # --- prefill ---------------------------------------------------------------------------

    def _dispatch_chunk(self, task: Task) -> Task | None:
        self._turn += 1
        ahead = self._parts.cache.advance(task.trail, task.row.n_tokens)
        if ahead is not None:
            row = self._restore(task.sequence, ahead)
            task.trail = task.sequence.trail
            if row is not None:
                self._parts.runner.leave([task.row])
                task.row = row
            if task.n_left == 0:
                self._begin_decode(task)
                return None
        end = chunk_end(
            task.row.n_tokens,
            task.n_total,
            chunk=self._parts.limits.prefill_chunk,
            stops=self._parts.cache.stops(task.trail),
            unbroken=task.prompt.unbroken,
        )
        run = self._parts.runner.prefill
        task.chunk_start, task.chunk_began = task.row.n_tokens, time.perf_counter()
        return self._guard(task.sequence, lambda: (run(task.row, task.prompt, end), task)[1])

    def _settle_chunk(self, task: Task) -> None:
        if task.number not in self._tasks:  # cancelled while it ran
            return
        settled = self._guard(task.sequence, lambda: self._commit_chunk(task))
        if settled is None:
            return
        self._say(task.sequence.job.id, Prefilled(task.row.n_tokens, len(task.prompt)))
        if task.n_left == 0:
            self._begin_decode(task)

    def _commit_chunk(self, task: Task) -> Task:
        self._parts.runner.settle(task.row)
        took = time.perf_counter() - task.chunk_began
        self._parts.cache.saw_prefill(task.chunk_start, task.row.n_tokens, took)
        self._parts.cache.commit(task.trail, task.row)
        return task

    def _begin_decode(self, task: Task) -> None:
        """The prompt is read but for its last token: its choices join the decode batch."""
        del self._tasks[task.number]
        self._guard(task.sequence, lambda: self._join(task))

    def _join(self, task: Task) -> None:
        last = int(task.prompt.ids[-1])
        fresh = [c for c in task.choices if not c.done]
        rows = self._parts.runner.choices(task.row, task.sequence.job, [c.index for c in fresh])
        for choice, row in zip(fresh, rows, strict=True):
            if choice.n_rescues:
                row.resume(choice.tokens)
            choice.row, choice.trail = row, self._parts.cache.fork(task.trail, choice.tokens)
            self._parts.runner.join(row, last)
            self._rows[row] = choice
            if choice.forced.tokens:
                self._force_row(choice)
        self._parts.cache.close_trail(task.trail, None)

    # --- decode ----------------------------------------------------------------------------

    def _groups(self) -> Iterator[list[Any]]:
        """The decode groups, less the rows that a fault in an earlier one took along."""
        for rows in self._parts.runner.groups():
            if live := [row for row in rows if row in self._rows]:
                yield live

    def _launch(self) -> None:
        for rows in self._groups():
            try:
                self._parts.runner.launch(rows)
            except Exception as e:
                self._rescue(rows, e)

    def _collect(self, *, keep_in_flight: int) -> None:
        for rows in self._groups():
            try:
                picked = self._parts.runner.collect(rows, keep_in_flight=keep_in_flight)
            except Exception as e:
                self._rescue(rows, e)
                continue
            for p in picked:
                choice = self._rows.get(p.row)
                if choice is None or choice.done:
                    continue
                if p.fault is not None:
                    self._fail(choice.sequence, p.fault)
                else:
                    forced = choice.forced.at <= len(choice.tokens) < choice.forced.end
                    self._take_token(choice, Token(choice.index, p.token, p.logprob, forced))

    def _take_token(self, choice: Choice, token: Token) -> None:
        job = choice.sequence.job
        ended = token.id in job.eos
        choice.tokens.append(token.id)
        self._say(job.id, token)
        if ended or len(choice.tokens) >= job.max_tokens:
            self._say(job.id, ChoiceDone(choice.index, "stop" if ended else "length"))
            self._finish_choice(choice)
        elif choice.trail is not None and choice.trail.wants(choice.row.n_tokens):
            self._parts.cache.commit(choice.trail, choice.row)

    def _finish_choice(self, choice: Choice) -> None:
        self._drop_row(choice)
        choice.done = True
        for task in [t for t in self._tasks.values() if all(c.done for c in t.choices)]:
            self._drop_task(task)
        if not choice.sequence.open_choices:
            self._retire(choice.sequence)
            self._say(choice.sequence.job.id, JobDone())

    def _rescue(self, rows: list[Any], error: Exception) -> None:
        """A step failed: its caches cannot be trusted. Go back to the tokens.

        Each row is read again and then decodes alone, so that the one at fault is found out.
        """
        log.warning("a decode step of %d rows failed: %r", len(rows), error, exc_info=error)
        choices = [self._rows.pop(row) for row in rows]
        self._parts.runner.leave(rows)
        for choice in choices:
            if choice.trail is not None:
                self._parts.cache.close_trail(choice.trail, None)
            choice.row = choice.trail = None
        for choice in choices:
            if choice.done:  # its request has just been given up
                continue
            choice.n_rescues += 1
            if choice.n_rescues > MAX_RESCUES:
                self._fail(choice.sequence, error)
            else:
                self._guard(choice.sequence, partial(self._reread, choice))

    def _reread(self, choice: Choice) -> Task:
        prompt = replace(choice.sequence.job.prompt, ids=choice.ids())
        row = self._parts.runner.start(None)
        return self._add_task(choice.sequence, prompt, [choice], self._parts.cache.blank(), row)

    # --- faults and news -------------------------------------------------------------------

    def _guard(self, sequence: Sequence, action: Callable[[], T]) -> T | None:
        """Run what concerns one request alone; its fault ends that request alone."""
        try:
            return action()
        except Exception as e:
            self._fail(sequence, e)
            return None

    def _fail(self, sequence: Sequence, error: Exception) -> None:
        if sequence.job.id not in self._sequences:
            return
        named = _named(sequence.job, error)
        # After a fault the rows are in doubt: nothing more of them is stored.
        for trail in [sequence.trail, *(c.trail for c in sequence.choices if c.trail)]:
            self._parts.cache.close_trail(trail, None)
        self._retire(sequence)
        self._say(sequence.job.id, JobFailed(named))

    def _end_all(self, error: FirnError) -> None:
        """Tell everyone, those in the inbox too: nobody waits for a thread that is gone."""
        with self._lock:
            self._alive = False
        self._tell_all(error)
        while not self._inbox.empty():  # new jobs, and cancels that find nobody
            self._inbox.get_nowait()()
        self._tell_all(error)
        with self._lock:
            self._n_queued = 0
        self._flush()

    def _tell_all(self, error: FirnError) -> None:
        for request in self._sequences:
            self._say(request, JobFailed(error))
        for table in (self._sequences, self._waiting, self._tasks, self._rows):
            table.clear()

    def _say(self, request: RequestId, event: EngineEvent) -> None:
        self._out.append((request, event))

    def _flush(self) -> None:
        if self._out:
            batch, self._out = self._out, []
            self._publish(batch)


def _named(job: Job, error: Exception) -> FirnError:
    """The error as the client is told it; what firn has no name for goes to the log."""
    if isinstance(error, FirnError):
        return error
    log.warning("request %s failed: %r", job.id, error, exc_info=error)
    return StepFailed(f"The model failed on this request: {error}")
