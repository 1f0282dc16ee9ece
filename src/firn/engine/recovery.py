"""Requests that fail, and requests that go back to their tokens.

A request that fails ends alone. A decode step that fails sends its rows back to their tokens: each is
read again by itself, and only one that fails alone is given up. When memory runs out, or the device
fails, requests are put back: they lose their rows, are first in the queue again, and when they are
admitted each reply is read up to where it was, mostly from the cache. After a device fault nothing is
trusted that was computed since the device was last asked: neither rows nor what they stored.

Owner: the engine thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

from firn.core.errors import DeviceFailing
from firn.core.events import ChoiceDone, JobFailed
from firn.core.ports import LiveRow
from firn.engine.faults import client_error, may_be_the_devices
from firn.engine.inflight import InFlight
from firn.engine.sequence import Choice
from firn.engine.sequence import Sequence as Request

log = logging.getLogger("firn.engine")

MAX_RESCUES = 1
CONFIRM_STEPS = 8
"""While rows decode, a step is in flight, and asking the device waits for it: not at every step."""
MAX_DEVICE_FAULTS = 3
DEVICE_FAULTS_S = 600.0
"""So many device faults within so long, and the process ends: its supervisor starts a new one."""


class Recovery:
    def __init__(
        self,
        inflight: InFlight,
        *,
        on_device_fault: Callable[[], None],
        on_doubt: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """on_doubt: nothing that was computed since the last confirmation can be trusted."""
        self._inflight = inflight
        self._on_device_fault = on_device_fault
        self._on_doubt = on_doubt
        self._clock = clock
        self._fault_times: list[float] = []

    # --- a fault of one request ------------------------------------------------------------

    @contextmanager
    def guard(self, sequence: Request) -> Iterator[None]:
        """For work that concerns one request: a fault in it ends that request and is not raised.

        If it may be a late fault of the device, everyone is put back once and tries again.
        """
        try:
            yield
        except Exception as e:
            is_retried = not sequence.was_at_fault and not sequence.job.prompt_logprobs
            if may_be_the_devices(e) and is_retried:
                sequence.was_at_fault = True
                log.warning("request %s failed, trying again: %r", sequence.job.id, e, exc_info=e)
                self.everyone_back()
            else:
                self.fail(sequence, e)

    def fail(self, sequence: Request, error: Exception) -> None:
        inflight = self._inflight
        if sequence.job.id not in inflight.sequences:
            return
        told = client_error(sequence.job, error)
        # After a fault the rows are in doubt: store no more of them, and do not read them again.
        sequence.n_skipped = 0
        tasks = [t.cursor for t in inflight.tasks_of(sequence)]
        for cursor in [sequence.cursor, *tasks, *(c.cursor for c in sequence.choices if c.cursor)]:
            inflight.cache.close_cursor(cursor, None)
        inflight.retire(sequence)
        inflight.say(sequence.job.id, JobFailed(told))

    # --- a fault of a decode step ----------------------------------------------------------

    def rescue(self, rows: Sequence[LiveRow], error: Exception) -> None:
        """A decode step failed, and its rows cannot be trusted: read each again from its tokens.

        Each then decodes in a group of its own, so that the one at fault fails alone.
        """
        log.warning("a decode step of %d rows failed: %r", len(rows), error, exc_info=error)
        inflight = self._inflight
        choices = [inflight.rows.pop(row) for row in rows]
        inflight.runner.leave(rows)
        for choice in choices:
            if choice.cursor is not None:
                inflight.cache.close_cursor(choice.cursor, None)
            choice.row = choice.cursor = None
        if may_be_the_devices(error):
            self.everyone_back(but={choice.sequence for choice in choices})
        for choice in choices:
            if choice.done or not choice.sequence.admitted:  # given up, or put back, just now
                continue
            choice.n_rescues += 1
            if choice.n_rescues > MAX_RESCUES:
                self.fail(choice.sequence, error)
            else:
                with self.guard(choice.sequence):
                    self._reread(choice)

    def _reread(self, choice: Choice) -> None:
        prompt = choice.sequence.job.prompt.grown(choice.tokens)
        row, cursor = self._inflight.runner.start(None), self._inflight.cache.blank()
        self._inflight.add_task(choice.sequence, prompt, [choice], cursor, row)

    # --- memory ----------------------------------------------------------------------------

    def follow_growth(self) -> None:
        """Count what replies have grown to. Records give way to them, then the youngest requests."""
        inflight, budget = self._inflight, self._inflight.budget
        admitted = inflight.admitted
        for sequence in admitted:
            budget.admit(sequence.job, budget.grown_nbytes(sequence.job, sequence.replies))
        while budget.free_nbytes() < 0 and len(admitted) > 1:
            youngest = admitted.pop()
            if not self._is_being_scored(youngest):
                n_tokens = sum(youngest.replies)
                log.info("memory is short: request %s waits at token %d", youngest.job.id, n_tokens)
                self._put_back(youngest, keep=True)
        inflight.update_room()
        oldest = admitted[0] if admitted else None
        if oldest and inflight.n_admitted == 1 and budget.outgrown(oldest.job, oldest.replies):
            self._end_early(oldest)

    def _end_early(self, sequence: Request) -> None:
        """It has all the memory there is: as at the end of a context, its replies are over."""
        log.warning(
            "request %s ends early: its reply has used all memory that a reply can have",
            sequence.job.id,
        )
        for choice in sequence.open_choices:
            self._inflight.say(sequence.job.id, ChoiceDone(choice.index, "length"))
            self._inflight.finish_choice(choice)

    # --- the device ------------------------------------------------------------------------

    def confirm(self, *, in_flight: bool) -> None:
        """Ask the device about what was committed, at once if no step is in flight.

        MLX may finish an evaluation and report the fault of one of its commands later, to whoever uses
        the device next.
        """
        inflight = self._inflight
        if not inflight.n_unconfirmed:
            return
        inflight.n_unconfirmed += 1
        if in_flight and inflight.n_unconfirmed <= CONFIRM_STEPS:
            return
        try:
            inflight.runner.confirm()
        except Exception as e:
            self._device_failed(e)
            return
        inflight.n_unconfirmed = 0
        inflight.cache.confirm()

    def _device_failed(self, error: Exception) -> None:
        log.error("the device reported a late fault: %r", error, exc_info=error)
        now = self._clock()
        self._fault_times = [t for t in self._fault_times if now - t < DEVICE_FAULTS_S] + [now]
        self._on_device_fault()
        self.everyone_back()
        if len(self._fault_times) >= MAX_DEVICE_FAULTS:
            raise DeviceFailing(len(self._fault_times)) from error

    def everyone_back(self, *, but: Collection[Request] = ()) -> None:
        """Any of what ran may be wrong: forget what was stored of it, and compute it again."""
        inflight = self._inflight
        for sequence in reversed(inflight.admitted):
            if sequence in but:
                continue
            if self._is_being_scored(sequence):
                self.fail(sequence, RuntimeError("the device failed while the prompt was scored"))
            else:
                self._put_back(sequence, keep=False)
        inflight.n_unconfirmed = 0
        self._on_doubt()
        inflight.cache.doubt()
        inflight.update_room()

    def _is_being_scored(self, sequence: Request) -> bool:
        """Its prompt's logprobs are sent as they come, and must not be sent twice."""
        return any(task.scored for task in self._inflight.tasks_of(sequence))

    def _put_back(self, sequence: Request, *, keep: bool) -> None:
        """Take its rows: it waits, first in the queue, with its tokens. keep: store what they hold."""
        inflight, job = self._inflight, sequence.job
        inflight.budget.release(job)
        inflight.update_room()  # for what it stores on its way out
        for task in inflight.tasks_of(sequence):
            inflight.drop_task(task, keep=keep)
        for choice in sequence.open_choices:
            inflight.drop_row(choice, keep=keep)
        inflight.cache.close_cursor(sequence.cursor, None)
        sequence.admitted = False
        sequence.was_put_back = True
        sequence.need_nbytes = inflight.budget.grown_nbytes(job, sequence.replies)
        sequence.cursor = inflight.cache.blank()
        inflight.waiting.insert(0, sequence)
        inflight.rejoin_queue()
