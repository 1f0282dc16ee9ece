"""Long cold prompts of which only a part is read, and what is read of them when there is time.

    admitted -> scored in slices, between decode steps -> thinned -> read like any shorter prompt

What is read of a thinned prompt is stored below roots of its own. The exact chain is resumed from and
never written. Once such a request is over and the engine has nothing to do, its whole prompt and reply
are read behind it, a chunk at a time, so that the next turn finds them; whoever comes puts that off.

Owner: the loop, whose third half this is.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from firn.core.events import Advanced
from firn.core.ports import Cursor, Scorer
from firn.core.values import Job, Prompt, Scores
from firn.engine.faults import may_be_anybodys
from firn.engine.scheduler import chunk_end
from firn.engine.sequence import Sequence, Task
from firn.engine.thinning import recipe_of, select, thinned, why_not

if TYPE_CHECKING:
    from firn.engine.loop import Loop

log = logging.getLogger("firn.engine")

MAX_BEHIND = 8
"""Prompts that wait to be read in full; of more, the oldest are forgotten."""


class SparsePrefill:
    def __init__(self, loop: Loop, scorer: Scorer | None) -> None:
        self._loop = loop
        self._scorer = scorer

    def begin(self, task: Task) -> Task:
        """The prompt was looked up: score it first, if that is to be."""
        job = task.sequence.job
        if self._scorer is not None and job.sparse is not None and not self._why_not(task):
            with self._or_all_of_it(task):
                task.reading = self._scorer.open(job.prompt, job.namespace, job.cache)
                task.sequence.keep = job.sparse.keep
        return task

    @contextmanager
    def _or_all_of_it(self, task: Task) -> Iterator[None]:
        """If its scoring fails, the prompt is read in full. What may be the device's fault is raised."""
        try:
            yield
        except Exception as e:
            sequence = task.sequence
            log.warning("request %s is read in full: %r", sequence.job.id, e, exc_info=e)
            sequence.job, sequence.keep = replace(sequence.job, sparse=None), None
            self.end(task)
            if may_be_anybodys(e):
                raise

    def _why_not(self, task: Task) -> str:
        assert self._scorer is not None
        near = max(int(task.row.n_tokens), task.cursor.n_expected)
        return why_not(task.sequence.job, n_expected=near, max_tokens=self._scorer.max_tokens)

    def read(self, task: Task, n_tokens: int) -> Task | None:
        """Dispatch a slice of the scoring; None: there is none any more."""
        assert self._scorer is not None
        with self._or_all_of_it(task):
            alone = not self._loop.rows and not self._loop.waiting and len(self._loop.tasks) == 1
            self._scorer.read(task.reading, n_tokens, alone=alone)
        return task if task.reading is not None else None

    def settle(self, task: Task) -> None:
        """Wait for the slice; after the last, thin the prompt."""
        assert self._scorer is not None
        scores = None
        with self._or_all_of_it(task):
            if not self._scorer.settle(task.reading):
                return
            scores = self._scorer.scores(task.reading)
            self.end(task)
        sequence = task.sequence
        prompt = None if scores is None else self._chosen(task, scores)
        if prompt is None:
            sequence.keep = None
            log.info("request %s: nothing of its prompt can be skipped", sequence.job.id)
        else:
            self._thin(task, prompt)
        if sequence.announced:
            self._loop._say(sequence.job.id, Advanced(sequence.admission))

    def _chosen(self, task: Task, scores: Scores) -> Prompt | None:
        """What is read of the prompt; None: all of it."""
        sparse, start = task.sequence.job.sparse, int(task.row.n_tokens)
        if sparse is None or self._why_not(task):  # more of it may have been loaded meanwhile
            return None
        assert self._scorer is not None
        essential = task.prompt.essential
        positions = select(scores, start=start, keep=sparse.keep, essential=essential)
        recipe = recipe_of(self._scorer.recipe, sparse.keep)
        return thinned(task.prompt, positions, start=start, recipe=recipe)

    def _thin(self, task: Task, prompt: Prompt) -> None:
        """From here on the request's prompt is what is left of it."""
        loop, sequence = self._loop, task.sequence
        n_skipped = len(task.prompt) - len(prompt)
        log.info(
            "request %s: sparse prefill reads %d of %d tokens, %d of them cached",
            sequence.job.id,
            len(prompt),
            len(task.prompt),
            task.row.n_tokens,
        )
        sequence.n_skipped, sequence.whole_admission = n_skipped, task.cursor.admission
        loop.cache.close_cursor(task.cursor, None)
        sequence.job = job = replace(sequence.job, prompt=prompt)
        cursor = loop.cache.open(prompt, job.namespace, job.cache)
        restored = loop.cache.restore(cursor)
        if restored is not None and restored.n_tokens > task.row.n_tokens:
            row = loop._restore(cursor, restored)
            if row is None:
                cursor = loop.cache.blank()
            else:
                loop.runner.leave([task.row])
                task.row = row
        task.prompt, task.cursor, sequence.cursor = prompt, cursor, cursor
        loop.budget.admit(job, loop.budget.grown_nbytes(job, sequence.replies))
        loop.cache.set_room(loop.budget.free_nbytes())

    def end(self, task: Task) -> None:
        """Its scoring is over, or given up."""
        if task.reading is not None and self._scorer is not None:
            self._scorer.close_reading(task.reading)
            task.reading = None


@dataclass(eq=False)
class _Behind:
    """One whole prompt with its reply, on its way into the cache."""

    job: Job
    cursor: Cursor | None = None
    row: Any = None


class ReadBehind:
    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._jobs: deque[_Behind] = deque(maxlen=MAX_BEHIND)

    @property
    def has_work(self) -> bool:
        return bool(self._jobs)

    def add(self, sequence: Sequence) -> None:
        """A request with a thinned prompt is over."""
        job = sequence.job
        said = sequence.choices[0].tokens
        if not sequence.n_skipped or not said or not job.cache.write:
            return
        prompt = job.prompt.whole.grown(said)
        self.pause()
        # What is asked for next is most likely what was asked for last.
        self._jobs.append(_Behind(replace(job, prompt=prompt)))

    def pause(self) -> None:
        """Somebody is here: let go of the row; what was read of it is in the cache."""
        if self._jobs and self._jobs[-1].row is not None:
            self._let_go(self._jobs[-1])

    def forget(self) -> None:
        """The engine ends, or nothing that was computed can be trusted."""
        for work in self._jobs:
            self._let_go(work, keep=False)
        self._jobs.clear()

    def step(self) -> None:
        """One chunk. Called while there are no requests."""
        work = self._jobs[-1]
        try:
            over = (work.row is None and not self._begin(work)) or self._read(work)
        except Exception as e:
            log.warning("reading a prompt behind its reply failed: %r", e, exc_info=e)
            self._loop._recovery.everyone_back()  # which forgets all of this, too
            return
        if over:
            self._let_go(work)
            self._jobs.remove(work)

    def _begin(self, work: _Behind) -> bool:
        """False: there is no memory for it."""
        loop, job = self._loop, work.job
        need = loop.budget.cost.of(len(job.prompt))
        if need > loop.budget.free_nbytes():
            return False
        loop.budget.admit(job, need)
        loop.cache.set_room(loop.budget.free_nbytes())
        work.cursor = loop.cache.open(job.prompt, job.namespace, job.cache)
        restored = loop.cache.restore(work.cursor)
        work.row = loop.runner.start(restored)
        return True

    def _read(self, work: _Behind) -> bool:
        """Whether that was all: the last token stays, as of any prompt."""
        loop, prompt = self._loop, work.job.prompt
        start, n_total = int(work.row.n_tokens), len(prompt) - 1
        if start >= n_total:
            return True
        end = chunk_end(
            start,
            n_total,
            chunk=loop.budget.chunk_tokens(start, most=loop.limits.prefill_chunk),
            stops=loop.cache.stops(work.cursor),
            aligned=loop.limits.aligned,
        )
        began = time.perf_counter()
        loop.runner.prefill(work.row, prompt, end)
        loop.runner.settle(work.row)
        loop.cache.saw_prefill(start, end, time.perf_counter() - began)
        loop.cache.commit(work.cursor, work.row)
        loop._recovery.stored()
        return end >= n_total

    def _let_go(self, work: _Behind, *, keep: bool = True) -> None:
        loop = self._loop
        loop.budget.release(work.job)
        if work.cursor is not None:
            loop._close(work.cursor, work.row if keep else None)
        if work.row is not None:
            loop.runner.leave([work.row])
        work.row = work.cursor = None
        loop.cache.set_room(loop.budget.free_nbytes())
