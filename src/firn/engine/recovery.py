"""Requests that fail, and requests that lose their rows and are computed again from their tokens.

A request that fails ends alone. If a decode step fails, each of its rows is read again from its
tokens, by itself, and only a request that fails alone is given up. When memory runs out, or the
device fails, requests are preempted: they lose their rows and return to the front of the queue, and
once admitted each reply is read up to where it was, mostly from the cache. After a device fault,
nothing that was computed since the device's last confirmation is trusted: neither rows nor the
records made from them.

Owner: the engine thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress

from firn.core.errors import DeviceFailing, is_out_of_memory, may_be_device_fault
from firn.core.events import ChoiceDone, JobFailed
from firn.core.ports import LiveRow, NullCursor
from firn.engine.inflight import InFlight, client_error
from firn.engine.sequence import Choice
from firn.engine.sequence import Sequence as Request

log = logging.getLogger("firn.engine")

MAX_RESCUES = 1
CONFIRM_S = 2.0
"""While rows decode, the device is asked to confirm at most this often: that waits for the step in
flight, and leaves a GPU idle until the next one is built."""
MAX_DEVICE_FAULTS = 3
DEVICE_FAULTS_S = 600.0
"""After MAX_DEVICE_FAULTS within this time the process ends, and its supervisor restarts it."""
ABSORBED_EVERY_S = 60.0
"""Absorbed faults count as the device's at most this often: a bad record fails again and again."""


class Recovery:
    def __init__(
        self,
        inflight: InFlight,
        *,
        on_device_fault: Callable[[], None],
        on_doubt: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """on_doubt: called when nothing computed since the last confirmation can be trusted."""
        self._inflight = inflight
        self._on_device_fault = on_device_fault
        self._on_doubt = on_doubt
        self._clock = clock
        self._fault_times: list[float] = []
        self._absorbed_at = -ABSORBED_EVERY_S
        self._confirmed_at = clock()

    # --- a fault of one request ------------------------------------------------------------

    @contextmanager
    def guard(self, sequence: Request) -> Iterator[None]:
        """For work on one request: a fault ends that request and is not raised.

        If it may be a late fault of the device, all requests are preempted and tried again, once.
        """
        try:
            yield
        except Exception as e:
            is_retried = not sequence.was_at_fault and not sequence.job.prompt_logprobs
            if may_be_device_fault(e) and is_retried:
                sequence.was_at_fault = True
                log.warning(
                    "request %s failed, perhaps a device fault; all requests are computed again: %r",
                    sequence.job.id,
                    e,
                    exc_info=e,
                )
                self.put_all_back(e)
            else:
                self.fail(sequence, e)

    def fail(self, sequence: Request, error: Exception) -> None:
        inflight = self._inflight
        if sequence.job.id not in inflight.sequences:
            return
        failure = client_error(sequence.job, error)
        # After a fault the rows are in doubt: store no more of them, and leave nothing to do later.
        sequence.has_failed = True
        task_cursors = [t.cursor for t in inflight.tasks_of(sequence)]
        choice_cursors = [c.cursor for c in sequence.choices if c.cursor]
        for cursor in (sequence.cursor, *task_cursors, *choice_cursors):
            cursor.close(None)
        inflight.retire(sequence)
        inflight.emit(sequence.job.id, JobFailed(failure))

    # --- a fault of a decode step ----------------------------------------------------------

    def rescue(self, rows: Sequence[LiveRow], error: Exception) -> None:
        """A decode step failed, and its rows cannot be trusted: read each again from its tokens.

        Each then decodes in a group of its own, so that the one at fault fails alone.
        """
        inflight = self._inflight
        choices = [inflight.rows[row] for row in rows]
        sequences = list(dict.fromkeys(choice.sequence for choice in choices))
        log.warning(
            "a decode step failed, its requests are read again (%s): %r",
            ", ".join(sorted(sequence.job.id for sequence in sequences)),
            error,
            exc_info=error,
        )
        for choice in choices:
            choice.n_rescues += 1
        if may_be_device_fault(error):  # their other rows are in doubt, too
            choices = [choice for sequence in sequences for choice in sequence.open_choices]
        self._lose_rows(choices)
        if may_be_device_fault(error):
            self.put_all_back(error, spared=sequences)
        for choice in choices:
            if choice.done or not choice.sequence.admitted:  # given up or preempted just now
                continue
            if choice.n_rescues > MAX_RESCUES:
                self.fail(choice.sequence, error)
            else:
                with self.guard(choice.sequence):
                    self._reread(choice)

    def _lose_rows(self, choices: Sequence[Choice]) -> None:
        """Drop what was computed of these replies, and store nothing of it."""
        inflight = self._inflight
        for task in [t for t in inflight.tasks.values() if any(c in choices for c in t.choices)]:
            inflight.drop_task(task, keep=False)
        # All rows of a group leave together: its arrays may be what failed.
        rows = [choice.row for choice in choices if choice.row is not None]
        inflight.runner.leave(rows)
        for choice in choices:
            if choice.row is not None:
                del inflight.rows[choice.row]
            if choice.cursor is not None:
                choice.cursor.close(None)
            choice.row = choice.cursor = None

    def _reread(self, choice: Choice) -> None:
        prompt = choice.sequence.job.prompt.grown(choice.tokens)
        row, cursor = self._inflight.runner.start(None), NullCursor()
        self._inflight.add_task(choice.sequence, prompt, [choice], cursor, row)

    # --- memory ----------------------------------------------------------------------------

    def follow_growth(self) -> None:
        """Reserve what replies have grown to. Records give way to them, then the youngest requests."""
        inflight, budget = self._inflight, self._inflight.budget
        admitted = inflight.admitted
        for sequence in admitted:
            budget.admit(sequence.job, budget.grown_nbytes(sequence.job, sequence.replies))
        while budget.free_nbytes() < 0 and len(admitted) > 1:
            youngest = admitted.pop()
            if not self._streams_prompt_logprobs(youngest):
                n_tokens = sum(youngest.replies)
                log.info(
                    "memory is low: request %s returns to the queue after %d tokens",
                    youngest.job.id,
                    n_tokens,
                )
                self._preempt(youngest, keep=True)
        inflight.update_room()
        oldest = admitted[0] if admitted else None
        if oldest and inflight.n_admitted == 1 and budget.outgrown(oldest.job, oldest.replies):
            self._end_early(oldest)

    def _end_early(self, sequence: Request) -> None:
        """It alone has outgrown all memory: end its replies, as at the end of the context."""
        log.warning(
            "request %s ends early: its reply needs more memory than the server may use",
            sequence.job.id,
        )
        for choice in sequence.open_choices:
            self._inflight.emit(sequence.job.id, ChoiceDone(choice.index, "length"))
        self._inflight.finish(sequence.open_choices)

    # --- the device ------------------------------------------------------------------------

    def confirm(self, *, in_flight: bool) -> None:
        """Ask the device whether what was committed is sound; right away if no step is in flight.

        MLX may finish an evaluation and report the fault of one of its commands later, to whatever uses
        the device next.
        """
        inflight = self._inflight
        if self._recover_absorbed() or not inflight.has_unconfirmed:
            return
        now = self._clock()
        if in_flight and now - self._confirmed_at < CONFIRM_S:
            return
        self._confirmed_at = now
        try:
            inflight.runner.confirm()
        except Exception as e:
            self._device_failed(e)
            return
        inflight.has_unconfirmed = False
        inflight.cache.confirm()

    def _recover_absorbed(self) -> bool:
        """If a fault that counted as a miss, or as a caller's error, may have been the device's, put all
        requests back: the device does not report it again. Returns whether that was done."""
        inflight, now = self._inflight, self._clock()
        error = inflight.take_absorbed()
        is_idle = not inflight.sequences and not inflight.has_unconfirmed
        if error is None or is_idle or now - self._absorbed_at < ABSORBED_EVERY_S:
            return False
        self._absorbed_at = now
        log.warning(
            "the last fault may have been the device's, all requests are computed again: %r", error
        )
        self.put_all_back(error)
        return True

    def _device_failed(self, error: Exception) -> None:
        log.error(
            "the device reported a late fault, all requests are computed again: %r",
            error,
            exc_info=error,
        )
        now = self._clock()
        self._fault_times = [t for t in self._fault_times if now - t < DEVICE_FAULTS_S] + [now]
        self._on_device_fault()
        self.put_all_back(error)
        if len(self._fault_times) >= MAX_DEVICE_FAULTS:
            raise DeviceFailing(len(self._fault_times)) from error

    def put_all_back(self, error: Exception, *, spared: Collection[Request] = ()) -> None:
        """Whatever ran may be wrong: forget the records made from it, and compute it again.

        If memory ran out, all other records in memory are evicted. spared: requests that the caller
        recovers itself.
        """
        inflight, is_out = self._inflight, is_out_of_memory(error)
        if is_out:  # commands of the failed step may still write to buffers that are freed below
            with suppress(Exception):
                inflight.runner.confirm()
        for sequence in reversed(inflight.admitted):
            if sequence in spared:
                continue
            if self._streams_prompt_logprobs(sequence):
                self.fail(
                    sequence,
                    RuntimeError("the device failed while the prompt's logprobs were computed"),
                )
            else:
                self._preempt(sequence, keep=False)
        inflight.has_unconfirmed = False
        self._on_doubt()
        inflight.cache.discard_unconfirmed()
        if is_out:
            log.warning("out of memory: evicting everything that the cache holds in memory")
            inflight.cache.set_room(0)
            inflight.runner.free_memory()
        inflight.update_room()

    def _streams_prompt_logprobs(self, sequence: Request) -> bool:
        """Whether its prompt's logprobs are being sent: they must not be sent twice."""
        return any(task.wants_logprobs for task in self._inflight.tasks_of(sequence))

    def _preempt(self, sequence: Request, *, keep: bool) -> None:
        """Drop its rows and put it first in the queue, with its tokens. keep: store what they hold."""
        inflight, job = self._inflight, sequence.job
        inflight.budget.release(job)
        inflight.update_room()  # room for what dropping its rows stores
        for task in inflight.tasks_of(sequence):
            inflight.drop_task(task, keep=keep)
        inflight.drop_rows(sequence.open_choices, keep=keep)
        sequence.cursor.close(None)
        sequence.admitted = False
        sequence.was_preempted = True
        sequence.need_nbytes = inflight.budget.grown_nbytes(job, sequence.replies)
        sequence.cursor = NullCursor()
        inflight.waiting.insert(0, sequence)
        inflight.rejoin_queue()
