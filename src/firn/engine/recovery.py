"""Requests that go back to their tokens and wait: memory ran out, or the device failed.

Their rows are dropped, they are first in the queue again, and when they are admitted each reply is read
up to where it was; nobody is cut, and what they had computed is in the cache. After a fault of the
device nothing is trusted that was computed since it was last asked: neither rows nor what they stored.

Owner: the loop, whose other half this is.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING

from firn.core.errors import DeviceFailing
from firn.core.events import ChoiceDone
from firn.core.values import Prompt
from firn.engine.sequence import Choice, Sequence, Task

if TYPE_CHECKING:
    from firn.engine.loop import Loop

log = logging.getLogger("firn.engine")

CONFIRM_STEPS = 8
"""While rows decode, a step is always in flight, and asking waits for it: not at every step, then."""
MAX_DEVICE_FAULTS = 3
DEVICE_FAULTS_S = 600.0
"""So many faults of the device within so long, and the process ends: its supervisor starts a new one."""


class Recovery:
    def __init__(self, loop: Loop, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._loop = loop
        self._clock = clock
        self._n_unconfirmed = 0
        """Steps since something was stored that the device has not been asked about."""
        self._fault_times: list[float] = []

    # --- memory ----------------------------------------------------------------------------

    def follow_growth(self) -> None:
        """Count what replies have grown to. Records give way to them, then the youngest requests."""
        loop, budget = self._loop, self._loop.budget
        admitted = [s for s in loop.sequences.values() if s.admitted]
        for sequence in admitted:
            budget.admit(sequence.job, budget.grown_nbytes(sequence.job, sequence.replies))
        while budget.free_nbytes() < 0 and len(admitted) > 1:
            youngest = admitted.pop()
            if not self._is_being_scored(youngest):
                n_tokens = sum(youngest.replies)
                log.info("memory is short: request %s waits at token %d", youngest.job.id, n_tokens)
                self._put_back(youngest, keep=True)
        loop.cache.set_room(budget.free_nbytes())
        oldest = admitted[0] if admitted else None
        if oldest and loop.n_admitted == 1 and budget.outgrown(oldest.job, oldest.replies):
            self._end_early(oldest)

    def _end_early(self, sequence: Sequence) -> None:
        """It has all the memory there is: as at the end of a context, its replies are over."""
        log.warning("request %s has used all memory there is for a reply", sequence.job.id)
        for choice in sequence.open_choices:
            self._loop._say(sequence.job.id, ChoiceDone(choice.index, "length"))
            self._loop._finish_choice(choice)

    # --- the device ------------------------------------------------------------------------

    def stored(self) -> None:
        """Something was given to the cache in this step."""
        self._n_unconfirmed = max(self._n_unconfirmed, 1)

    def confirm(self, *, in_flight: bool) -> None:
        """The step is over: ask the device about what was stored, at once if nothing else waits for it.

        MLX may end an evaluation well and report the fault of one of its commands later, to whoever
        uses the device next.
        """
        if not self._n_unconfirmed:
            return
        self._n_unconfirmed += 1
        if in_flight and self._n_unconfirmed <= CONFIRM_STEPS:
            return
        try:
            self._loop.runner.confirm()
        except Exception as e:
            self._device_failed(e)
            return
        self._n_unconfirmed = 0
        self._loop.cache.confirm()

    def _device_failed(self, error: Exception) -> None:
        log.error("the device failed in something that had ended: %r", error, exc_info=error)
        now = self._clock()
        self._fault_times = [t for t in self._fault_times if now - t < DEVICE_FAULTS_S] + [now]
        self._loop._chunks.shrink()
        self.everyone_back()
        if len(self._fault_times) >= MAX_DEVICE_FAULTS:
            raise DeviceFailing(len(self._fault_times)) from error

    def everyone_back(self, *, but: Collection[Sequence] = ()) -> None:
        """Any of what ran may be wrong: forget what was stored of it, and compute it again."""
        loop = self._loop
        for sequence in reversed([s for s in loop.sequences.values() if s.admitted]):
            if sequence in but:
                continue
            if self._is_being_scored(sequence):
                loop._fail(sequence, RuntimeError("the device failed while the prompt was scored"))
            else:
                self._put_back(sequence, keep=False)
        self._n_unconfirmed = 0
        loop._behind.forget()
        loop.cache.doubt()
        loop.cache.set_room(loop.budget.free_nbytes())

    # --- back and again --------------------------------------------------------------------

    def _is_being_scored(self, sequence: Sequence) -> bool:
        """Its prompt's logprobs are told as they come, and must not be told twice."""
        return any(t.scored and t.sequence is sequence for t in self._loop.tasks.values())

    def _put_back(self, sequence: Sequence, *, keep: bool) -> None:
        """Take its rows: it waits, first in the queue, with its tokens. keep: store what they hold."""
        loop, job = self._loop, sequence.job
        loop.budget.release(job)
        loop.cache.set_room(loop.budget.free_nbytes())  # for what it stores on its way out
        for task in [t for t in loop.tasks.values() if t.sequence is sequence]:
            loop._drop_task(task, keep=keep)
        for choice in sequence.open_choices:
            loop._drop_row(choice, keep=keep)
        loop.cache.close_cursor(sequence.cursor, None)
        sequence.admitted = False
        sequence.was_put_back = True
        sequence.need_nbytes = loop.budget.grown_nbytes(job, sequence.replies)
        sequence.cursor = loop.cache.blank()
        loop.waiting.insert(0, sequence)
        loop._rejoin_queue()

    def bring_back(self, sequence: Sequence) -> None:
        """It has its memory again: each reply is read up to where it was."""
        loop, job = self._loop, sequence.job
        sequence.was_put_back = False
        if not sequence.has_begun:
            opened = partial(loop.cache.open, job.prompt, job.namespace, job.cache)
            cursor = loop._guard(sequence, opened)
            if cursor is not None:
                sequence.cursor = cursor
                loop._begin(sequence)
            return
        for choice in sequence.open_choices:
            prompt = job.prompt.grown(choice.tokens)
            task = loop._guard(sequence, partial(self._reopen, choice, prompt))
            if task is None:
                return
            if task.n_left == 0:
                loop._begin_decode(task)
        loop.cache.set_room(loop.budget.free_nbytes())

    def _reopen(self, choice: Choice, prompt: Prompt) -> Task:
        job = choice.sequence.job
        cursor = self._loop.cache.open(prompt, job.namespace, job.cache)
        return self._loop._start_task(choice.sequence, prompt, [choice], cursor)
