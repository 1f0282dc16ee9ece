"""Sparse prefill: reads only a part of a long uncached prompt, and the rest when there is time.

    admitted -> scored in slices, between decode steps -> thinned -> read like any shorter prompt

Records of a thinned prompt are stored under roots of their own. It may resume from the exact chain, but
never writes to it. Once such a request is over and the engine is idle, its whole prompt and reply are
read, a chunk at a time, so that the next turn finds them cached. A new request interrupts that.

Owner: the engine thread.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from firn.core.errors import may_be_device_fault
from firn.core.events import Advanced
from firn.core.ports import Cursor, LiveRow, Scorer
from firn.core.values import Job, Prompt, Scores
from firn.engine.chunks import ChunkSizes
from firn.engine.inflight import InFlight, RestoreFailed
from firn.engine.scheduler import chunk_end
from firn.engine.sequence import PrefillTask, Sequence
from firn.engine.thinning import recipe_of, select, thinned, why_not

log = logging.getLogger("firn.engine")

MAX_DEFERRED = 8
"""How many prompts may wait to be read in full; beyond that, the oldest are forgotten."""


class SparsePrefill:
    def __init__(
        self, inflight: InFlight, scorer: Scorer[object] | None, *, sizes: ChunkSizes
    ) -> None:
        """sizes: of the scorer's chunks; the small model reads more tokens in the same time."""
        self._inflight = inflight
        self._scorer = scorer
        self._sizes = sizes

    def begin(self, task: PrefillTask) -> None:
        """Start to score the prompt, if it may be thinned."""
        job = task.sequence.job
        if self._scorer is None or job.sparse is None or job.prompt.thinned is not None:
            return
        if reason := self._why_not(task):
            log.debug("request %s is read in full: %s", job.id, reason)
            self._keep_all(task.sequence)  # it may have been preempted while it was scored
        else:
            with self._else_in_full(task):
                task.scoring = self._scorer.open(job.prompt, job.namespace, job.cache)
                task.sequence.keep = job.sparse.keep

    @contextmanager
    def _else_in_full(self, task: PrefillTask) -> Iterator[None]:
        """If its scoring fails, the prompt is read in full. A possible device fault is raised again."""
        try:
            yield
        except Exception as e:
            sequence = task.sequence
            log.warning(
                "request %s is read in full, scoring its prompt failed: %r",
                sequence.job.id,
                e,
                exc_info=e,
            )
            sequence.job = replace(sequence.job, sparse=None)
            self._keep_all(sequence)
            self._inflight.end_scoring(task)
            if may_be_device_fault(e):
                raise

    def _keep_all(self, sequence: Sequence) -> None:
        """Its prompt is not thinned after all: tell a client that was told otherwise."""
        if sequence.keep is not None:
            sequence.keep = None
            if sequence.announced:
                self._inflight.emit(sequence.job.id, Advanced(sequence.admission))

    def _why_not(self, task: PrefillTask) -> str:
        assert self._scorer is not None
        n_expected = max(task.row.n_tokens, task.cursor.n_expected)
        return why_not(task.sequence.job, n_expected=n_expected, max_tokens=self._scorer.max_tokens)

    def read(self, task: PrefillTask, n_tokens: int) -> None:
        """Dispatch the next slice of the scoring. If that fails, `task.scoring` is None afterwards.

        n_tokens: the chunk that the large model would read now.
        """
        assert self._scorer is not None
        with self._else_in_full(task):
            alone, task.chunk_start = self._inflight.is_lone_prefill, self._n_scored(task)
            if alone:
                chunk = self._sizes.choose(task.chunk_start, alone=True)
                n_tokens = self._inflight.budget.chunk_tokens(task.chunk_start, most=chunk)
            self._scorer.read(task.scoring, n_tokens, alone=alone)

    def _n_scored(self, task: PrefillTask) -> int:
        """Prompt tokens that the small model has read; the lookahead to come counts as unread."""
        assert self._scorer is not None
        return max(len(task.prompt) - self._scorer.n_left(task.scoring), 0)

    def settle(self, task: PrefillTask) -> None:
        """Wait for the slice. After the last one, thin the prompt."""
        assert self._scorer is not None
        scores = None
        with self._else_in_full(task):
            is_over = self._scorer.settle(task.scoring)
            took_s = time.perf_counter() - task.chunk_began
            self._sizes.saw(task.chunk_start, self._n_scored(task), took_s)
            if not is_over:
                return
            scores = self._scorer.scores(task.scoring)
            self._inflight.end_scoring(task)
        sequence = task.sequence
        prompt = None if scores is None else self._select(task, scores)
        if prompt is None:
            log.info("request %s: nothing of its prompt can be skipped", sequence.job.id)
            self._keep_all(sequence)
            return
        self._thin(task, prompt)
        if sequence.announced:
            self._inflight.emit(sequence.job.id, Advanced(sequence.admission))

    def _select(self, task: PrefillTask, scores: Scores) -> Prompt | None:
        """What to read of the prompt; None: all of it."""
        sparse, start = task.sequence.job.sparse, task.row.n_tokens
        if sparse is None or self._why_not(task):  # more may have been loaded since `begin`
            return None
        assert self._scorer is not None
        essential = task.prompt.essential
        positions = select(scores, start=start, keep=sparse.keep, essential=essential)
        recipe = recipe_of(self._scorer.recipe, sparse.keep)
        return thinned(task.prompt, positions, start=start, recipe=recipe)

    def _thin(self, task: PrefillTask, prompt: Prompt) -> None:
        """Replace the request's prompt with the thinned one."""
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
                row = inflight.restore(job.id, cursor, restored)
            except RestoreFailed:
                cursor = inflight.cache.blank()
            else:
                inflight.runner.leave([task.row])
                task.row = row
        task.prompt, task.cursor, sequence.cursor = prompt, cursor, cursor
        inflight.budget.admit(job, inflight.budget.grown_nbytes(job, sequence.replies))
        inflight.update_room()


@dataclass(eq=False)
class _DeferredPrompt:
    """A whole prompt with its reply, to be read into the cache."""

    job: Job
    cursor: Cursor | None = None
    row: LiveRow | None = None


class DeferredPrefill:
    """Reads sparsely read prompts in full while the engine is idle, newest first."""

    def __init__(self, inflight: InFlight) -> None:
        self._inflight = inflight
        self._prompts: deque[_DeferredPrompt] = deque(maxlen=MAX_DEFERRED)

    @property
    def has_work(self) -> bool:
        return bool(self._prompts)

    def add(self, sequence: Sequence) -> None:
        """A request is over: if its prompt was thinned, read all of it later."""
        job = sequence.job
        reply = sequence.choices[0].tokens
        if not sequence.n_skipped or not reply or not job.cache.write:
            return
        prompt = job.prompt.whole.grown(reply)
        self.pause()
        # Read first: the next request most likely continues the last one.
        self._prompts.append(_DeferredPrompt(replace(job, prompt=prompt)))

    def pause(self) -> None:
        """A request has arrived: drop the row. What was read is in the cache."""
        if self._prompts and self._prompts[-1].row is not None:
            self._release(self._prompts[-1])

    def forget(self) -> None:
        """Drop everything: the engine ends, or nothing that was computed can be trusted."""
        for deferred in self._prompts:
            self._release(deferred, keep=False)
        self._prompts.clear()

    def step(self) -> None:
        """Read one chunk. Called while there are no requests."""
        deferred = self._prompts[-1]
        if (deferred.row is None and not self._begin(deferred)) or self._read(deferred):
            self._release(deferred)
            self._prompts.remove(deferred)

    def _begin(self, deferred: _DeferredPrompt) -> bool:
        """Reserve memory, and restore what is cached. False: there is no memory for it."""
        inflight, job = self._inflight, deferred.job
        need = inflight.budget.cost.of(len(job.prompt))
        if need > inflight.budget.free_nbytes():
            return False
        inflight.budget.admit(job, need)
        inflight.update_room()
        deferred.cursor = inflight.cache.open(job.prompt, job.namespace, job.cache)
        restored = inflight.cache.restore(deferred.cursor)
        deferred.row = inflight.runner.start(restored)
        return True

    def _read(self, deferred: _DeferredPrompt) -> bool:
        """Read a chunk. True: all but the last token is read, as with any prompt."""
        inflight, prompt = self._inflight, deferred.job.prompt
        row, cursor = deferred.row, deferred.cursor
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

    def _release(self, deferred: _DeferredPrompt, *, keep: bool = True) -> None:
        inflight = self._inflight
        inflight.budget.release(deferred.job)
        if deferred.cursor is not None:
            inflight.close(deferred.cursor, deferred.row if keep else None)
        if deferred.row is not None:
            inflight.runner.leave([deferred.row])
        deferred.row = deferred.cursor = None
        inflight.update_room()
