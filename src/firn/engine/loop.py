"""What the engine thread does: one step after the other over the requests it has.

    plan -> launch a decode step -> dispatch one prefill chunk -> read the tokens -> publish
    -> settle the chunk, commit what it finished

A request that fails ends alone. A step that fails takes its rows back to their tokens: each is read
again by itself, and only one that fails alone is given up.

Owner: the engine thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from firn.core.errors import FirnError, InvalidValue
from firn.core.events import (
    Advanced,
    ChoiceDone,
    EngineEvent,
    JobDone,
    JobFailed,
    Prefilled,
    PromptLogprobs,
    Token,
)
from firn.core.ports import Cursor, Delivery, EngineLoad, Publish, Restored
from firn.core.values import Job, Prompt, RequestId
from firn.engine.chunks import ChunkSizes
from firn.engine.faults import may_be_anybodys, named
from firn.engine.parts import Limits as Limits
from firn.engine.parts import Parts as Parts
from firn.engine.recovery import Recovery
from firn.engine.scheduler import Plan, Prefilling, View, Waiting, chunk_end, plan
from firn.engine.sequence import Choice, Forced, Sequence, Since, Task, looked_up
from firn.engine.sparse import ReadBehind, SparsePrefill
from firn.engine.together import Together

log = logging.getLogger("firn.engine")
T = TypeVar("T")

MAX_RESCUES = 1
HAND_OVER_S = 1e-4
"""Behind a first token: so long Python is left to the thread that carries it out."""
CALIBRATE_EVERY = 64
"""Steps between two looks at how much memory the decoding rows really take."""
GROW_EVERY = 16
"""Steps between two looks at how far replies have grown."""


class Loop:
    def __init__(
        self,
        parts: Parts,
        publish: Publish,
        *,
        left_queue: Callable[[], None],
        rejoined_queue: Callable[[], None] = lambda: None,
    ) -> None:
        """`left_queue` is called for each request that does not wait any more, or waits again."""
        self.runner, self.cache = parts.runner, parts.cache
        self.budget, self.limits = parts.budget, parts.limits
        self._publish = publish
        self._leave_queue = left_queue
        self._rejoin_queue = rejoined_queue
        self.sequences: dict[RequestId, Sequence] = {}
        self.waiting: list[Sequence] = []
        self.tasks: dict[int, Task] = {}
        self.rows: dict[Any, Choice] = {}
        self._n_tasks = 0
        self._n_steps = 0
        self._turn = 0
        self._said_first = False
        self._out: list[Delivery] = []
        self._chunks = ChunkSizes(
            self.limits.prefill_chunk,
            largest=self.limits.largest_chunk,
            max_step_s=self.limits.max_step_s,
        )
        self._recovery = Recovery(self)
        self._sparse = SparsePrefill(self, parts.scorer)
        self._behind = ReadBehind(self)
        self._together = Together(self)
        self.cache.confirm()

    @property
    def busy(self) -> bool:
        """There is something to compute, or somebody to admit."""
        if self.rows or (self.waiting and not self.tasks):
            return True
        if self._behind.has_work and not self.sequences:
            return True
        return any(not task.cursor.should_wait(busy=False) for task in self.tasks.values())

    @property
    def n_admitted(self) -> int:
        """Requests that have their rows. May be read from any thread."""
        return len(self.sequences) - len(self.waiting)

    @property
    def _load(self) -> EngineLoad:
        # One token: it has just been handed over, and is on its way out.
        if self.tasks or self.waiting or any(len(c.tokens) < 2 for c in self.rows.values()):
            return EngineLoad.BOTH if self.rows else EngineLoad.PREFILLING
        return EngineLoad.DECODING if self.rows else EngineLoad.NONE

    def step(self) -> None:
        self.cache.tick(self._load)
        if self.rows and self._n_steps % GROW_EVERY == 0:
            self._recovery.follow_growth()
        todo = self._plan()
        for request in todo.admit:
            self._admit(self.sequences[request])
        if todo.decode:
            self._launch()
        task = self.tasks.get(todo.prefill) if todo.prefill is not None else None
        if task is not None:
            task = self._dispatch_chunk(task)
        if todo.decode:
            self._collect(wait=task is not None)
        self.flush()
        if self._said_first:
            self._said_first = False
            time.sleep(HAND_OVER_S)
        if task is not None:
            for read in (task, *task.others):
                self._settle_chunk(read)
        if self._behind.has_work and not self.sequences:
            self._behind.step()
        self._recovery.confirm(in_flight=bool(self.rows) and task is None)
        self._n_steps += 1
        if self.rows and self._n_steps % CALIBRATE_EVERY == 0:
            self._calibrate()

    def _calibrate(self) -> None:
        """Compare what admission thought the decoding rows would take with what they take."""
        self.budget.learn([row.n_tokens for row in self.rows], self.runner.live_nbytes())

    def _plan(self) -> Plan:
        waiting = tuple(Waiting(s.job.id, s.job.n, s.need_nbytes) for s in self.waiting)
        busy = bool(self.rows)
        prefilling = tuple(
            Prefilling(t.number, t.n_left, t.cursor.racing, t.cursor.should_wait(busy=busy))
            for t in self.tasks.values()
        )
        n_rows = sum(len(s.open_choices) for s in self.sequences.values() if s.admitted)
        return plan(
            View(
                waiting=waiting,
                prefilling=prefilling,
                n_rows=n_rows,
                max_rows=self.limits.max_rows,
                n_decoding=len(self.rows),
                free_nbytes=self.budget.free_nbytes(),
                turn=self._turn,
            )
        )

    # --- arrivals and departures -----------------------------------------------------------

    def accept(self, job: Job) -> None:
        try:
            if job.n > self.limits.max_rows:
                raise InvalidValue(
                    "n", f"{job.n} replies are over the limit of {self.limits.max_rows}"
                )
            need = self.budget.need_nbytes(job)
            # What is scored must be computed; it is kept for others all the same.
            control = replace(job.cache, read=False) if job.prompt_logprobs else job.cache
            began_at = time.perf_counter()
            cursor = self.cache.open(job.prompt, job.namespace, control)
        except Exception as e:
            self._leave_queue()
            self._say(job.id, JobFailed(named(job, e)))
            return
        self._behind.pause()
        sequence = Sequence(job, cursor, need_nbytes=need, waits=looked_up(cursor, began_at))
        self.sequences[job.id] = sequence
        self.waiting.append(sequence)

    def _admit(self, sequence: Sequence) -> None:
        self.waiting.remove(sequence)
        self._leave_queue()
        sequence.admitted = True
        self.budget.admit(sequence.job, sequence.need_nbytes)
        if sequence.was_put_back:
            self._recovery.bring_back(sequence)
        else:
            self._begin(sequence)

    def _begin(self, sequence: Sequence) -> None:
        task = self._guard(sequence, lambda: self._open_task(sequence))
        self.cache.set_room(self.budget.free_nbytes())  # what it resumed from was needed until here
        if task is None:
            return
        sequence.has_row()
        if self._guard(sequence, lambda: self._sparse.begin(task)) is None:
            return
        self._announce(sequence)
        if task.n_left == 0:
            self._begin_decode(task)

    def _announce(self, sequence: Sequence, *, at_last: bool = False) -> None:
        """Say what the cache did for the prompt, as soon as that is settled."""
        if not sequence.announced and (at_last or not sequence.cursor.racing):
            sequence.announced = True
            self._say(sequence.job.id, sequence.admission)

    def _open_task(self, sequence: Sequence) -> Task:
        """Restore what the cache has of the prompt into a new row."""
        prompt, choices = sequence.job.prompt, sequence.choices
        task = self._start_task(sequence, prompt, choices, sequence.cursor)
        sequence.cursor = task.cursor
        task.scored = sequence.job.prompt_logprobs
        return task

    def _start_task(
        self, sequence: Sequence, prompt: Prompt, choices: list[Choice], cursor: Cursor
    ) -> Task:
        restored = self.cache.restore(cursor)
        row = self._restore(cursor, restored) if restored else None
        if restored and row is None:
            cursor = self.cache.blank()
        if row is None:
            with self._closing_if_it_fails(cursor):
                row = self.runner.start(None)
        return self._add_task(sequence, prompt, choices, cursor, row)

    @contextmanager
    def _closing_if_it_fails(self, cursor: Cursor) -> Iterator[None]:
        try:
            yield
        except Exception:
            self.cache.close_cursor(cursor, None)
            raise

    def _restore(self, cursor: Cursor, restored: Restored) -> Any | None:
        """A row with a past. If that fails it is a miss, and this request leaves the cache alone."""
        began = time.perf_counter()
        try:
            row = self.runner.start(restored)
            self.cache.saw_restore(restored, time.perf_counter() - began)
            return row
        except Exception as e:
            log.warning("restoring %d tokens failed: %r", restored.n_tokens, e, exc_info=e)
            self.cache.close_cursor(cursor, None)
            return None

    def _add_task(
        self, sequence: Sequence, prompt: Prompt, choices: list[Choice], cursor: Cursor, row: Any
    ) -> Task:
        self._n_tasks += 1
        task = Task(self._n_tasks, sequence, prompt, choices, cursor, row)
        self.tasks[task.number] = task
        return task

    def cancel(self, request: RequestId) -> None:
        sequence = self.sequences.get(request)
        if sequence is not None:
            self._retire(sequence)

    def stop_choice(self, request: RequestId, index: int) -> None:
        choice = self._choice(request, index)
        if choice is not None:
            self._finish_choice(choice)

    def force(self, request: RequestId, index: int, forced: Forced) -> None:
        choice = self._choice(request, index)
        if choice is not None and choice.force(forced) and choice.row is not None:
            self._force_row(choice)

    def _choice(self, request: RequestId, index: int) -> Choice | None:
        """One that is not done; requests end while others still speak of them."""
        sequence = self.sequences.get(request)
        if sequence is None or not 0 <= index < len(sequence.choices):
            return None
        choice = sequence.choices[index]
        return None if choice.done else choice

    def _force_row(self, choice: Choice) -> None:
        rest = choice.forced.rest(choice.n_picked)
        n_prompt = len(choice.sequence.job.prompt)
        self.runner.force(choice.row, rest.tokens, at=n_prompt + rest.at)

    def _retire(self, sequence: Sequence) -> None:
        """Drop all of a sequence's rows; the blocks done so far stay in the cache."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
            self._leave_queue()
        for task in [t for t in self.tasks.values() if t.sequence is sequence]:
            self._drop_task(task)
        for choice in sequence.open_choices:
            self._drop_row(choice)
            choice.done = True
        self.cache.close_cursor(sequence.cursor, None)
        if sequence.admitted:
            self.budget.release(sequence.job)
            self.cache.set_room(self.budget.free_nbytes())
        self.sequences.pop(sequence.job.id, None)
        self._behind.add(sequence)

    def _drop_task(self, task: Task, *, keep: bool = True) -> None:
        """keep: store what it has read."""
        del self.tasks[task.number]
        self._sparse.end(task)
        self._close(task.cursor, task.row if keep else None)
        self.runner.leave([task.row])

    def _close(self, cursor: Cursor, row: Any | None) -> None:
        self.cache.close_cursor(cursor, row)
        if row is not None:
            self._recovery.stored()

    def _drop_row(self, choice: Choice, *, keep: bool = True) -> None:
        if choice.row is None:
            return
        if choice.cursor is not None:
            self._close(choice.cursor, choice.row if keep else None)
        self.rows.pop(choice.row, None)
        self.runner.leave([choice.row])
        choice.row = choice.cursor = None

    # --- prefill ---------------------------------------------------------------------------

    def _dispatch_chunk(self, task: Task) -> Task | None:
        self._turn += 1
        if not self._jump(task):
            return None
        chunk = self._chunk(task)
        task.chunk_start, task.chunk_began = task.row.n_tokens, time.perf_counter()
        if task.reading is not None:
            return self._guard(task.sequence, lambda: self._sparse.read(task, chunk))
        end = chunk_end(
            task.row.n_tokens,
            task.n_total,
            chunk=chunk,
            stops=self.cache.stops(task.cursor),
            unbroken=task.prompt.unbroken,
            aligned=self.limits.aligned,
        )
        others = self._together.find(task, most=chunk) if end == task.n_total else []
        task.chunk_began = time.perf_counter()
        return self._guard(task.sequence, lambda: self._prefill(task, end, others))

    def _jump(self, task: Task) -> bool:
        """Go on behind what was loaded or computed by others since; False if nothing is left to read."""
        ahead = self.cache.advance(task.cursor, task.row.n_tokens)
        if ahead is not None:
            row = self._restore(task.cursor, ahead)
            if row is None:
                self._leave_cache(task)
            else:
                self.runner.leave([task.row])
                task.row = row
                if task.sequence.announced and task.is_prompt:
                    self._say(task.sequence.job.id, Advanced(task.sequence.admission))
            self._announce(task.sequence)
            if task.n_left == 0:
                self._begin_decode(task)
                return False
        return True

    def _leave_cache(self, task: Task) -> None:
        """What it was to resume from is bad: it goes on without."""
        is_prompt, task.cursor = task.is_prompt, self.cache.blank()
        if is_prompt:
            task.sequence.cursor = task.cursor

    def _chunk(self, task: Task) -> int:
        if self.limits.aligned:  # other chunks would be other bits
            return self.limits.prefill_chunk
        alone = not self.rows and not self.waiting and len(self.tasks) == 1
        chunk = self._chunks.choose(task.row.n_tokens, alone=alone)
        chunk = self.budget.chunk_tokens(task.row.n_tokens, most=chunk)
        if not task.scored:
            return chunk
        return max(min(chunk, self.limits.scored_nbytes // (4 * self.runner.info.vocab_size)), 1)

    def _prefill(self, task: Task, end: int, others: list[Task]) -> Task:
        if others and self._together.prefill(task, others):
            return task
        top = (task.sequence.job.top_logprobs or 0) if task.scored else None
        self.runner.prefill(task.row, task.prompt, end, top_logprobs=top)
        return task

    def _settle_chunk(self, task: Task) -> None:
        if task.number not in self.tasks:  # cancelled while it ran
            return
        settled = self._guard(task.sequence, lambda: self._commit_chunk(task))
        if settled is None:
            return
        self._announce(task.sequence)
        if task.sequence.announced:
            self._say(task.sequence.job.id, Prefilled(*task.progress))
        if task.n_left == 0:
            self._begin_decode(task)

    def _commit_chunk(self, task: Task) -> Task:
        if task.reading is not None:
            self._sparse.settle(task)
            return task
        logprobs = self.runner.settle(task.row)
        if logprobs:
            self._say(task.sequence.job.id, PromptLogprobs(task.chunk_start + 1, tuple(logprobs)))
        took = time.perf_counter() - task.chunk_began
        self._together.settled(task, took)
        took *= task.share
        start, end = task.chunk_start, task.row.n_tokens
        self.cache.saw_prefill(start, end, took)
        self._chunks.saw(start, end, took)
        if task.share == 1.0:
            self.budget.learn_chunk(end - start, start, self.runner.chunk_peak_nbytes)
        self.cache.commit(task.cursor, task.row)
        self._recovery.stored()
        return task

    def _begin_decode(self, task: Task) -> None:
        """The prompt is read but for its last token: its choices join the decode batch."""
        job = task.sequence.job
        self._sparse.end(task)
        self._announce(task.sequence, at_last=True)
        if not job.max_tokens:
            for choice in [c for c in task.choices if not c.done]:
                self._say(job.id, ChoiceDone(choice.index, "length"))
                self._finish_choice(choice)
            return
        del self.tasks[task.number]
        self._guard(task.sequence, lambda: self._join(task))

    def _join(self, task: Task) -> None:
        with self._closing_if_it_fails(task.cursor):
            self._join_choices(task)
        self.cache.close_cursor(task.cursor, None)

    def _join_choices(self, task: Task) -> None:
        last = int(task.prompt.ids[-1])
        fresh = [c for c in task.choices if not c.done]
        rows = self.runner.choices(task.row, task.sequence.job, [c.index for c in fresh])
        # Room is made at once only for those that fit it, and have been given memory for it.
        alike = [t for t in self.tasks.values() if 0.5 <= len(t.prompt) / len(task.prompt) <= 2]
        n_coming = len(fresh) + sum(len(t.choices) for t in alike)
        for choice, row in zip(fresh, rows, strict=True):
            n_coming -= 1
            if choice.n_rescues or choice.tokens:
                self.runner.resume(row, choice.tokens, alone=choice.n_rescues > 0)
            reply = Since(choice.tokens, len(task.prompt) - len(task.sequence.job.prompt))
            choice.row, choice.cursor = row, self.cache.fork(task.cursor, reply)
            self.runner.join(row, last, n_coming=n_coming)
            self.rows[row] = choice
            if choice.forced.tokens:
                self._force_row(choice)

    # --- decode ----------------------------------------------------------------------------

    def _groups(self) -> Iterator[list[Any]]:
        """The decode groups, less the rows that a fault in an earlier one took along."""
        for rows in self.runner.groups():
            if live := [row for row in rows if row in self.rows]:
                yield live

    def _launch(self) -> None:
        for rows in self._groups():
            try:
                self.runner.launch(rows)
            except Exception as e:
                self._rescue(rows, e)

    def _collect(self, *, wait: bool) -> None:
        """Read the tokens; those of the newest step may wait until the next one is under way.

        Not if a prefill chunk runs meanwhile, and not if somebody waits for a first token.
        """
        for rows in self._groups():
            now = wait or any(not self.rows[row].tokens for row in rows)
            try:
                picked = self.runner.collect(rows, keep_in_flight=0 if now else 1)
            except Exception as e:
                self._rescue(rows, e)
                continue
            for p in picked:
                choice = self.rows.get(p.row)
                if choice is None or choice.done:
                    continue
                if p.fault is not None:
                    self._fail(choice.sequence, p.fault)
                else:
                    forced = choice.forced.at <= len(choice.tokens) < choice.forced.end
                    tried = (p.n_drafted, p.n_accepted)
                    self._take_token(
                        choice, Token(choice.index, p.token, p.logprob, forced, *tried)
                    )

    def _take_token(self, choice: Choice, token: Token) -> None:
        job = choice.sequence.job
        ended = token.id in job.eos
        self._said_first |= not choice.tokens
        choice.tokens.append(token.id)
        self._say(job.id, token)
        if ended or len(choice.tokens) >= job.max_tokens:
            self._say(job.id, ChoiceDone(choice.index, "stop" if ended else "length"))
            self._finish_choice(choice)
        elif choice.cursor is not None and choice.cursor.commit_due(choice.row.n_tokens):
            self.cache.commit(choice.cursor, choice.row)
            self._recovery.stored()

    def _finish_choice(self, choice: Choice) -> None:
        self._drop_row(choice)
        choice.done = True
        for task in [t for t in self.tasks.values() if all(c.done for c in t.choices)]:
            self._drop_task(task)
        if not choice.sequence.open_choices:
            self._retire(choice.sequence)
            self._say(choice.sequence.job.id, JobDone())

    def _rescue(self, rows: list[Any], error: Exception) -> None:
        """A step failed: its caches cannot be trusted. Go back to the tokens.

        Each row is read again and then decodes alone, so that the one at fault is found out.
        """
        log.warning("a decode step of %d rows failed: %r", len(rows), error, exc_info=error)
        choices = [self.rows.pop(row) for row in rows]
        in_it = {choice.sequence for choice in choices}
        self.runner.leave(rows)
        for choice in choices:
            if choice.cursor is not None:
                self.cache.close_cursor(choice.cursor, None)
            choice.row = choice.cursor = None
        if may_be_anybodys(error):
            self._recovery.everyone_back(but=in_it)
        for choice in choices:
            if choice.done or not choice.sequence.admitted:  # given up, or put back, just now
                continue
            choice.n_rescues += 1
            if choice.n_rescues > MAX_RESCUES:
                self._fail(choice.sequence, error)
            else:
                self._guard(choice.sequence, partial(self._reread, choice))

    def _reread(self, choice: Choice) -> Task:
        prompt = choice.sequence.job.prompt.grown(choice.tokens)
        row = self.runner.start(None)
        return self._add_task(choice.sequence, prompt, [choice], self.cache.blank(), row)

    # --- faults and news -------------------------------------------------------------------

    def _guard(self, sequence: Sequence, action: Callable[[], T]) -> T | None:
        """Run what concerns one request alone; its fault ends that request alone."""
        try:
            return action()
        except Exception as e:
            if (
                may_be_anybodys(e)
                and not sequence.was_at_fault
                and not sequence.job.prompt_logprobs
            ):
                sequence.was_at_fault = True
                log.warning("request %s: %r; once more", sequence.job.id, e, exc_info=e)
                self._recovery.everyone_back()
            else:
                self._fail(sequence, e)
            return None

    def _fail(self, sequence: Sequence, error: Exception) -> None:
        if sequence.job.id not in self.sequences:
            return
        told = named(sequence.job, error)
        # After a fault the rows are in doubt: nothing more of them is stored, nor read again.
        sequence.n_skipped = 0
        tasks = [t.cursor for t in self.tasks.values() if t.sequence is sequence]
        for cursor in [sequence.cursor, *tasks, *(c.cursor for c in sequence.choices if c.cursor)]:
            self.cache.close_cursor(cursor, None)
        self._retire(sequence)
        self._say(sequence.job.id, JobFailed(told))

    def end_all(self, error: FirnError) -> None:
        """Tell everyone, and let go of everything."""
        with suppress(Exception):  # a device that fails now has nothing left to spoil
            self._recovery.confirm(in_flight=False)
        for request in self.sequences:
            self._say(request, JobFailed(error))
        self._behind.forget()
        for table in (self.sequences, self.waiting, self.tasks, self.rows):
            table.clear()

    def _say(self, request: RequestId, event: EngineEvent) -> None:
        self._out.append((request, event))

    def flush(self) -> None:
        if self._out:
            batch, self._out = self._out, []
            self._publish(batch)
