"""The requests in the engine: their rows and cursors, and the events for their clients.

Admission, prefill, decode and recovery share these tables. A request is in `sequences` from its arrival
to its end. It is in `waiting` until it is admitted; then it has a prefill task for each prompt that is
being read and an entry in `rows` for each reply that is being generated.

Owner: the engine thread.
"""

from __future__ import annotations

import logging
import time
from collections import abc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from firn.core.errors import FirnError, StepFailed, may_be_device_fault
from firn.core.events import EngineEvent, JobDone
from firn.core.ports import (
    Cursor,
    Delivery,
    EngineCache,
    EngineLoad,
    LiveRow,
    Publish,
    Restored,
    Runner,
)
from firn.core.values import Job, Prompt, RequestId
from firn.engine.budget import Budget
from firn.engine.limits import EngineLimits
from firn.engine.sequence import Choice, PrefillTask, Sequence

log = logging.getLogger("firn.engine")


def client_error(job: Job, error: Exception) -> FirnError:
    """The error to send to the client. One that firn has no name for is logged with its traceback."""
    if isinstance(error, FirnError):
        return error
    log.warning("request %s failed: %r", job.id, error, exc_info=error)
    return StepFailed(f"The model failed on this request: {error}")


class RestoreFailed(Exception):
    """Records could not be copied into a row, which counts as a miss. The request's cursor is closed."""


class InFlight:
    def __init__(
        self,
        runner: Runner[LiveRow],
        cache: EngineCache,
        publish: Publish,
        *,
        budget: Budget,
        limits: EngineLimits,
        left_queue: Callable[[], None],
        rejoined_queue: Callable[[], None],
        end_preparation: Callable[[PrefillTask], None],
        on_end: Callable[[Sequence], None],
    ) -> None:
        """left_queue, rejoined_queue: called for each request that no longer waits, or waits again.
        end_preparation: of a task that is over. on_end: called for each request that is over."""
        self.runner, self.cache = runner, cache
        self.budget, self.limits = budget, limits
        self.leave_queue, self.rejoin_queue = left_queue, rejoined_queue
        self._publish = publish
        self.end_preparation = end_preparation
        self._on_end = on_end
        self.sequences: dict[RequestId, Sequence] = {}
        self.waiting: list[Sequence] = []
        self.tasks: dict[int, PrefillTask] = {}
        self.rows: dict[LiveRow, Choice] = {}
        self.has_unconfirmed = False
        """Whether something was committed since the device last confirmed that it had no fault."""
        self._absorbed: Exception | None = None
        self._n_tasks = 0
        self._events: list[Delivery] = []

    # --- what there is ---------------------------------------------------------------------

    @property
    def admitted(self) -> list[Sequence]:
        """The requests that have their rows, in order of arrival."""
        return [s for s in self.sequences.values() if s.admitted]

    @property
    def n_admitted(self) -> int:
        """May be read from any thread."""
        return len(self.sequences) - len(self.waiting)

    @property
    def is_lone_prefill(self) -> bool:
        """Whether one prompt is being read, and no other request waits for anything."""
        return not self.rows and not self.waiting and len(self.tasks) == 1

    @property
    def load(self) -> EngineLoad:
        # A reply of one token counts as prefill: its first token may not have been sent yet.
        if self.tasks or self.waiting or any(len(c.tokens) < 2 for c in self.rows.values()):
            return EngineLoad.BOTH if self.rows else EngineLoad.PREFILLING
        return EngineLoad.DECODING if self.rows else EngineLoad.NONE

    def tasks_of(self, sequence: Sequence) -> list[PrefillTask]:
        return [t for t in self.tasks.values() if t.sequence is sequence]

    # --- events for clients ----------------------------------------------------------------

    def emit(self, request: RequestId, event: EngineEvent) -> None:
        self._events.append((request, event))

    def announce(self, sequence: Sequence, *, is_final: bool = False) -> None:
        """Tell the client, once, what the cache did for its prompt. is_final: loads are over."""
        if not sequence.announced and (is_final or not sequence.cursor.racing):
            sequence.announced = True
            self.emit(sequence.job.id, sequence.admission)

    def flush(self) -> None:
        if self._events:
            batch, self._events = self._events, []
            self._publish(batch)

    # --- rows and cursors ------------------------------------------------------------------

    def add_task(
        self,
        sequence: Sequence,
        prompt: Prompt,
        choices: list[Choice],
        cursor: Cursor,
        row: LiveRow,
    ) -> PrefillTask:
        self._n_tasks += 1
        task = PrefillTask(self._n_tasks, sequence, prompt, choices, cursor, row)
        self.tasks[task.number] = task
        return task

    def restore(self, request: RequestId, cursor: Cursor, restored: Restored) -> LiveRow:
        """A new row with a cached prefix. Raises RestoreFailed."""
        began = time.perf_counter()
        try:
            row = self.runner.start(restored)
        except Exception as e:
            log.warning(
                "request %s: restoring %d cached tokens failed, they are computed instead: %r",
                request,
                restored.n_tokens,
                e,
                exc_info=e,
            )
            self.absorbed(e)
            cursor.not_filled(e)
            raise RestoreFailed from e
        cursor.filled(row)
        self.cache.observe_restore(restored, time.perf_counter() - began)
        return row

    def commit(self, cursor: Cursor, row: LiveRow) -> None:
        cursor.commit(row)
        self.has_unconfirmed = True

    def close(self, cursor: Cursor, row: LiveRow | None) -> None:
        """row: what it has computed is stored; None: store nothing more."""
        cursor.close(row)
        if row is not None:
            self.has_unconfirmed = True

    def absorbed(self, error: Exception) -> None:
        """A fault was handled and fails no request. It may be the device's: see `Recovery`."""
        if may_be_device_fault(error):
            self._absorbed = error

    def take_absorbed(self) -> Exception | None:
        """The last absorbed fault, here or in the cache, that may be the device's; forgets it."""
        error, self._absorbed = self._absorbed, None
        return self.cache.take_fault() or error

    @contextmanager
    def closing_on_error(self, cursor: Cursor) -> Iterator[None]:
        try:
            yield
        except Exception:
            cursor.close(None)
            raise

    def update_room(self) -> None:
        """Tell the cache how much memory live requests leave for records."""
        self.cache.set_room(self.budget.free_nbytes())

    # --- ends ------------------------------------------------------------------------------

    def drop_task(self, task: PrefillTask, *, keep: bool = True) -> None:
        """keep: store what it has read."""
        del self.tasks[task.number]
        self.end_preparation(task)
        self.close(task.cursor, task.row if keep else None)
        self.runner.leave([task.row])

    def drop_rows(self, choices: abc.Sequence[Choice], *, keep: bool = True) -> None:
        """Drop all of them together, which is cheaper. keep: store what they have generated."""
        rows = []
        with self.cache.together():
            for choice in choices:
                if choice.row is None:
                    continue
                if choice.cursor is not None:
                    self.close(choice.cursor, choice.row if keep else None)
                self.rows.pop(choice.row, None)
                rows.append(choice.row)
                choice.row = choice.cursor = None
        if rows:
            self.runner.leave(rows)

    def finish(self, choices: abc.Sequence[Choice]) -> None:
        """End these replies, except those of requests that have failed in the meantime."""
        choices = [choice for choice in choices if not choice.done]
        self.drop_rows(choices)
        for choice in choices:
            choice.done = True
            for task in [t for t in self.tasks.values() if all(c.done for c in t.choices)]:
                self.drop_task(task)
            if not choice.sequence.open_choices:
                self.retire(choice.sequence)
                self.emit(choice.sequence.job.id, JobDone())

    def retire(self, sequence: Sequence) -> None:
        """Drop all rows of a request. What they have computed stays in the cache."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
            self.leave_queue()
        for task in self.tasks_of(sequence):
            self.drop_task(task)
        self.drop_rows(sequence.open_choices)
        for choice in sequence.open_choices:
            choice.done = True
        sequence.cursor.close(None)
        if sequence.admitted:
            self.budget.release(sequence.job)
            self.update_room()
        self.sequences.pop(sequence.job.id, None)
        self._on_end(sequence)

    def clear(self) -> None:
        """The engine ends: forget every request."""
        for table in (self.sequences, self.waiting, self.tasks, self.rows):
            table.clear()
