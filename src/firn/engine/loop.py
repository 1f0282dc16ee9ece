"""What the engine thread does: step after step over the requests in flight.

    plan -> admit -> launch a decode step -> dispatch one prefill chunk -> read the tokens
    -> let prompts join that skipped to their end -> publish -> finish the chunk, commit what it finished

Where dispatching a chunk takes as long as computing it, the tokens are read and published before that.

Each verb is a module of its own: scheduler (plan), prefill, decode, recovery. They share `InFlight`.

Owner: the engine thread.
"""

from __future__ import annotations

import logging
import time
from collections import abc
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from firn.core.errors import FirnError, InvalidValue
from firn.core.events import JobFailed
from firn.core.ports import Publish
from firn.core.values import Job, RequestId
from firn.engine.chunks import ChunkSizes, DepthLimit
from firn.engine.decode import Decode
from firn.engine.inflight import InFlight, client_error
from firn.engine.parts import EngineParts
from firn.engine.prefill import Prefill
from firn.engine.recovery import Recovery
from firn.engine.scheduler import PendingWork, Prefilling, StepPlan, Waiting, plan
from firn.engine.sequence import Choice, ForcedTokens, PrefillTask, Sequence, looked_up

log = logging.getLogger("firn.engine")

YIELD_S = 1e-4
"""Pause after a first token to let asyncio send it: the next launch holds the GIL for a while."""
CALIBRATE_EVERY = 64
"""Steps between two measurements of the memory that decoding rows actually take."""
GROW_EVERY = 16
"""Steps between two checks of how far replies have grown."""


class Loop:
    def __init__(
        self,
        parts: EngineParts,
        publish: Publish,
        *,
        left_queue: Callable[[], None],
        rejoined_queue: Callable[[], None] = lambda: None,
    ) -> None:
        """left_queue, rejoined_queue: called for each request that no longer waits, or waits again."""
        self._preparer = parts.preparer
        self.inflight = InFlight(
            parts.runner,
            parts.cache,
            publish,
            budget=parts.budget,
            limits=parts.limits,
            left_queue=left_queue,
            rejoined_queue=rejoined_queue,
            end_preparation=self._preparer.drop,
            on_end=lambda sequence: self._idle_work.add(sequence),
        )
        self._preparer.attach(self.inflight)
        self._idle_work = self._preparer.idle_work
        self._sizes = ChunkSizes.of(parts.limits, parts.cache.prefill)
        self._depths = DepthLimit()
        self._reading: abc.Sequence[PrefillTask] = ()
        """Whose chunk the device computes in this step."""
        self._recovery = Recovery(
            self.inflight, on_device_fault=self._device_failed, on_doubt=self._idle_work.forget
        )
        self._decode = Decode(self.inflight, self._recovery)
        self._prefill = Prefill(
            self.inflight,
            self._recovery,
            decode=self._decode,
            sizes=self._sizes,
            depths=self._depths,
            preparer=self._preparer,
        )
        self._n_steps = 0
        parts.cache.confirm()

    def _device_failed(self) -> None:
        self._sizes.shrink()
        self._preparer.shrink()
        if self.inflight.limits.aligned:
            for task in self._reading:
                self._depths.failed(task.chunk_start, task.row.n_tokens)

    @property
    def busy(self) -> bool:
        """Whether there is something to compute, or a request to admit."""
        inflight = self.inflight
        if inflight.rows or (inflight.waiting and not inflight.tasks):
            return True
        if self._has_idle_work:
            return True
        return any(not task.cursor.should_wait(busy=False) for task in inflight.tasks.values())

    @property
    def _has_idle_work(self) -> bool:
        return self._idle_work.has_work and not self.inflight.sequences

    def step(self) -> None:
        inflight = self.inflight
        inflight.cache.tick(inflight.load)
        if inflight.rows and self._n_steps % GROW_EVERY == 0:
            self._recovery.follow_growth()
        step_plan = self._plan()
        for request in step_plan.admit:
            self._admit(inflight.sequences[request])
        if step_plan.decode:
            self._decode.launch()
            if inflight.limits.dispatch_waits and step_plan.prefill is not None:
                self._decode.collect(wait=True)
                self._flush()
        task = inflight.tasks.get(step_plan.prefill) if step_plan.prefill is not None else None
        self._reading = reading = self._prefill.dispatch(task) if task is not None else ()
        if step_plan.decode:
            self._decode.collect(wait=bool(reading))
        self._prefill.begin_replies()
        self._flush()
        with inflight.cache.together():
            for task in reading:
                self._prefill.finish_chunk(task)
        if self._has_idle_work:
            self._do_idle_work()
        self._recovery.confirm(in_flight=bool(inflight.rows) and not reading)
        self._n_steps += 1
        if inflight.rows and self._n_steps % CALIBRATE_EVERY == 0:
            lengths = [row.n_tokens for row in inflight.rows]
            inflight.budget.learn(lengths, inflight.runner.live_nbytes())

    def _flush(self) -> None:
        self.inflight.flush()
        if self._decode.take_first_token_flag():
            time.sleep(YIELD_S)

    def _plan(self) -> StepPlan:
        inflight, busy = self.inflight, bool(self.inflight.rows)
        return plan(
            PendingWork(
                waiting=tuple(Waiting(s.job.id, s.job.n, s.need_nbytes) for s in inflight.waiting),
                prefilling=tuple(
                    Prefilling(t.number, t.n_left, t.cursor.racing, t.cursor.should_wait(busy=busy))
                    for t in inflight.tasks.values()
                ),
                n_rows=sum(len(s.open_choices) for s in inflight.admitted),
                max_rows=inflight.limits.max_rows,
                n_decoding=len(inflight.rows),
                free_nbytes=inflight.budget.free_nbytes(),
                turn=self._prefill.n_chunks,
            )
        )

    def _admit(self, sequence: Sequence) -> None:
        inflight = self.inflight
        inflight.waiting.remove(sequence)
        inflight.leave_queue()
        sequence.admitted = True
        inflight.budget.admit(sequence.job, sequence.need_nbytes)
        if sequence.was_preempted:
            self._prefill.begin_again(sequence)
        else:
            self._prefill.begin(sequence)

    def _do_idle_work(self) -> None:
        try:
            self._idle_work.step()
        except Exception as e:
            log.warning("work while the engine is idle failed, giving up: %r", e, exc_info=e)
            self._recovery.put_all_back(e)  # forgets that work, too

    # --- what other threads ask for, between two steps -------------------------------------

    def accept(self, job: Job) -> None:
        inflight = self.inflight
        try:
            if job.n > inflight.limits.max_rows:
                raise InvalidValue(
                    "n", f"{job.n} replies exceed the limit of {inflight.limits.max_rows}"
                )
            need = inflight.budget.need_nbytes(job)
            # A prompt whose logprobs are wanted must be computed; it is still stored for others.
            control = replace(job.cache, read=False) if job.prompt_logprobs else job.cache
            began_at = time.perf_counter()
            cursor = inflight.cache.open(job.prompt, job.namespace, control)
        except Exception as e:
            inflight.leave_queue()
            inflight.emit(job.id, JobFailed(client_error(job, e)))
            return
        self._idle_work.pause()
        sequence = Sequence(job, cursor, need_nbytes=need, waits=looked_up(cursor, began_at))
        inflight.sequences[job.id] = sequence
        inflight.waiting.append(sequence)

    def cancel(self, request: RequestId) -> None:
        sequence = self.inflight.sequences.get(request)
        if sequence is not None:
            self.inflight.retire(sequence)

    def stop_choice(self, request: RequestId, index: int) -> None:
        self.inflight.finish(self._open_choices(request, index))

    def force(self, request: RequestId, index: int, forced: ForcedTokens) -> None:
        for choice in self._open_choices(request, index):
            # How far a step with drafts takes the reply is known only once it is read.
            self._decode.collect_all(choice)
            if not choice.done and choice.force(forced) and choice.row is not None:
                self._decode.force(choice, choice.row)

    def _open_choices(self, request: RequestId, index: int) -> list[Choice]:
        """The choice, or nothing if it is done: a request may end before the inbox is read."""
        sequence = self.inflight.sequences.get(request)
        choices = sequence.choices if sequence is not None else []
        return [c for c in choices if c.index == index and not c.done]

    def end_all(self, error: FirnError) -> None:
        """Fail every request, and drop all rows."""
        with suppress(Exception):  # a fault of the device no longer matters
            self._recovery.confirm(in_flight=False)
        for request in self.inflight.sequences:
            self.inflight.emit(request, JobFailed(error))
        self._idle_work.forget()
        self.inflight.clear()
