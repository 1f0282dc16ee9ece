"""Long cold prompts of which only a part is read, and what is read of them when there is time.

    admitted -> scored in slices, between decode steps -> thinned -> read like any shorter prompt

What is read of a thinned prompt is stored below roots of its own. The exact chain is resumed from and
never written. Once such a request is over and the engine has nothing to do, its whole prompt and reply
are read behind it, a chunk at a time, so that the next turn finds them; whoever comes puts that off.

Owner: the engine thread.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from firn.core.events import Advanced
from firn.core.ports import Cursor, LiveRow, Scorer
from firn.core.values import Job, Prompt, Scores
from firn.engine.chunks import ChunkSizes
from firn.engine.faults import may_be_the_devices
from firn.engine.inflight import InFlight, RestoreFailed
from firn.engine.scheduler import chunk_end
from firn.engine.sequence import PrefillTask, Sequence
from firn.engine.thinning import recipe_of, select, thinned, why_not

log = logging.getLogger("firn.engine")

MAX_BEHIND = 8
"""Prompts that wait to be read in full; of more, the oldest are forgotten."""


class SparsePrefill:
    def __init__(
        self, inflight: InFlight, scorer: Scorer[object] | None, *, sizes: ChunkSizes
    ) -> None:
        """sizes: of the small model's chunks, which takes more tokens in the same time."""
        self._inflight = inflight
        self._scorer = scorer
        self._sizes = sizes

    def begin(self, task: PrefillTask) -> None:
        """The prompt was looked up: score it first, if that is to be."""
        job = task.sequence.job
        if self._scorer is not None and job.sparse is not None and not self._why_not(task):
            with self._or_all_of_it(task):
                task.reading = self._scorer.open(job.prompt, job.namespace, job.cache)
                task.sequence.keep = job.sparse.keep

    @contextmanager
    def _or_all_of_it(self, task: PrefillTask) -> Iterator[None]:
        """If its scoring fails, the prompt is read in full. What may be the device's fault is raised."""
        try:
            yield
        except Exception as e:
            sequence = task.sequence
            log.warning("request %s is read in full: %r", sequence.job.id, e, exc_info=e)
            sequence.job, sequence.keep = replace(sequence.job, sparse=None), None
            self._inflight.end_scoring(task)
            if may_be_the_devices(e):
                raise

    def _why_not(self, task: PrefillTask) -> str:
        assert self._scorer is not None
        near = max(task.row.n_tokens, task.cursor.n_expected)
        return why_not(task.sequence.job, n_expected=near, max_tokens=self._scorer.max_tokens)

    def read(self, task: PrefillTask, n_tokens: int) -> None:
        """Dispatch a slice of the scoring, which may end it: then `task.reading` is None.

        n_tokens: what the large model would read now, and hold up others with.
        """
        assert self._scorer is not None
        with self._or_all_of_it(task):
            alone, task.chunk_start = self._inflight.is_one_prefill, self._n_scored(task)
            if alone:
                chunk = self._sizes.choose(task.chunk_start, alone=True)
                n_tokens = self._inflight.budget.chunk_tokens(task.chunk_start, most=chunk)
            self._scorer.read(task.reading, n_tokens, alone=alone)

    def _n_scored(self, task: PrefillTask) -> int:
        """Tokens of the prompt that the small model has read; the lookahead counts as not yet read."""
        assert self._scorer is not None
        return max(len(task.prompt) - self._scorer.n_left(task.reading), 0)

    def settle(self, task: PrefillTask) -> None:
        """Wait for the slice; after the last, thin the prompt."""
        assert self._scorer is not None
        scores = None
        with self._or_all_of_it(task):
            is_over = self._scorer.settle(task.reading)
            took_s = time.perf_counter() - task.chunk_began
            self._sizes.saw(task.chunk_start, self._n_scored(task), took_s)
            if not is_over:
                return
            scores = self._scorer.scores(task.reading)
            self._inflight.end_scoring(task)
        sequence = task.sequence
        prompt = None if scores is None else self._chosen(task, scores)
        if prompt is None:
            sequence.keep = None
            log.info("request %s: nothing of its prompt can be skipped", sequence.job.id)
        else:
            self._thin(task, prompt)
        if sequence.announced:
            self._inflight.say(sequence.job.id, Advanced(sequence.admission))

    def _chosen(self, task: PrefillTask, scores: Scores) -> Prompt | None:
        """What is read of the prompt; None: all of it."""
        sparse, start = task.sequence.job.sparse, task.row.n_tokens
        if sparse is None or self._why_not(task):  # more of it may have been loaded meanwhile
            return None
        assert self._scorer is not None
        essential = task.prompt.essential
        positions = select(scores, start=start, keep=sparse.keep, essential=essential)
        recipe = recipe_of(self._scorer.recipe, sparse.keep)
        return thinned(task.prompt, positions, start=start, recipe=recipe)

    def _thin(self, task: PrefillTask, prompt: Prompt) -> None:
        """From here on the request's prompt is what is left of it."""
        inflight, sequence = self._inflight, task.sequence
        n_skipped = len(task.prompt) - len(prompt)
        log.info(
            "request %s: sparse prefill reads %d of %d tokens, %d of them cached",
            sequence.job.id,
            len(prompt),
            len(task.prompt),
            task.row.n_tokens,
        )
        sequence.n_skipped, sequence.whole_admission = n_skipped, task.cursor.admission
        inflight.cache.close_cursor(task.cursor, None)
        sequence.job = job = replace(sequence.job, prompt=prompt)
        cursor = inflight.cache.open(prompt, job.namespace, job.cache)
        restored = inflight.cache.restore(cursor)
        if restored is not None and restored.n_tokens > task.row.n_tokens:
            try:
                row = inflight.restore(cursor, restored)
            except RestoreFailed:
                cursor = inflight.cache.blank()
            else:
                inflight.runner.leave([task.row])
                task.row = row
        task.prompt, task.cursor, sequence.cursor = prompt, cursor, cursor
        inflight.budget.admit(job, inflight.budget.grown_nbytes(job, sequence.replies))
        inflight.update_room()


@dataclass(eq=False)
class _Behind:
    """One whole prompt with its reply, on its way into the cache."""

    job: Job
    cursor: Cursor | None = None
    row: LiveRow | None = None


class ReadBehind:
    def __init__(self, inflight: InFlight) -> None:
        self._inflight = inflight
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
        if (work.row is None and not self._begin(work)) or self._read(work):
            self._let_go(work)
            self._jobs.remove(work)

    def _begin(self, work: _Behind) -> bool:
        """False: there is no memory for it."""
        inflight, job = self._inflight, work.job
        need = inflight.budget.cost.of(len(job.prompt))
        if need > inflight.budget.free_nbytes():
            return False
        inflight.budget.admit(job, need)
        inflight.update_room()
        work.cursor = inflight.cache.open(job.prompt, job.namespace, job.cache)
        restored = inflight.cache.restore(work.cursor)
        work.row = inflight.runner.start(restored)
        return True

    def _read(self, work: _Behind) -> bool:
        """Whether that was all: the last token stays, as of any prompt."""
        inflight, prompt = self._inflight, work.job.prompt
        row, cursor = work.row, work.cursor
        assert row is not None
        assert cursor is not None
        start, n_total = row.n_tokens, len(prompt) - 1
        if start >= n_total:
            return True
        end = chunk_end(
            start,
            n_total,
            chunk=inflight.budget.chunk_tokens(start, most=inflight.limits.prefill_chunk),
            stops=inflight.cache.stops(cursor),
            aligned=inflight.limits.aligned,
            common=inflight.limits.common_chunk,
        )
        began = time.perf_counter()
        inflight.runner.prefill(row, prompt, end)
        inflight.runner.settle(row)
        inflight.cache.saw_prefill(start, end, time.perf_counter() - began)
        inflight.commit(cursor, row)
        return end >= n_total

    def _let_go(self, work: _Behind, *, keep: bool = True) -> None:
        inflight = self._inflight
        inflight.budget.release(work.job)
        if work.cursor is not None:
            inflight.close(work.cursor, work.row if keep else None)
        if work.row is not None:
            inflight.runner.leave([work.row])
        work.row = work.cursor = None
        inflight.update_room()
