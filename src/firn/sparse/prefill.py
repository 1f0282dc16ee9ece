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
from collections import abc, deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from firn.core.errors import may_be_device_fault
from firn.core.events import Admitted, Advanced
from firn.core.ports import Cursor, LiveRow, NullCursor
from firn.core.prefill_speed import PrefillSpeed
from firn.core.values import Job, Prompt
from firn.engine import (
    AS_IT_IS,
    AsItIs,
    ChunkSizes,
    IdleWork,
    InFlight,
    PrefillTask,
    RestoreFailed,
    Sequence,
    chunk_end,
)
from firn.sparse.rules import Sparse
from firn.sparse.scorer import Scorer, Scores
from firn.sparse.selection import recipe_of, recipes_of, select, thinned, why_not

log = logging.getLogger("firn.engine")

S = TypeVar("S")

SCORER_SCALE = 2
"""The scorer's largest chunk relative to the model's: the scorer is smaller."""
MAX_DEFERRED = 8
"""How many prompts may wait to be read in full; beyond that, the oldest are forgotten."""


@dataclass(frozen=True, slots=True)
class Sparsely(AsItIs):
    """A request whose prompt is read in part.

    keep: the share of its uncached tokens. n_skipped: tokens that are not read, once it is known which.
    whole: what the cache had of the whole prompt then.
    """

    keep: float
    n_skipped: int = 0
    whole: Admitted | None = None

    def told(self, admission: Admitted) -> Admitted:
        whole = self.whole
        if whole is not None:  # the row resumed from whichever had more cached
            admission = replace(
                max(whole, admission, key=lambda a: a.n_cached), reason=whole.reason
            )
        return replace(admission, keep=self.keep, n_skipped=self.n_skipped)


class SparsePrefill(Generic[S]):
    """Implements engine.Preparer."""

    def __init__(self, scorer: Scorer[S]) -> None:
        self._scorer = scorer
        self._scorings: dict[int, S] = {}
        """By the number of the task whose prompt is being scored."""
        self.recipes: abc.Sequence[str] = recipes_of(scorer.recipe)
        self._speed = PrefillSpeed()
        """Of the small model."""
        self._inflight: InFlight
        self._sizes: ChunkSizes
        """Of the scorer's chunks; the small model reads more tokens in the same time."""
        self.idle_work: IdleWork

    def attach(self, inflight: InFlight) -> None:
        self._inflight = inflight
        self._sizes = ChunkSizes.of(inflight.limits, self._speed, scale=SCORER_SCALE)
        self.idle_work = DeferredPrefill(inflight)

    def shrink(self) -> None:
        self._sizes.shrink()

    def close(self) -> None:
        self._scorer.close()

    def begin(self, task: PrefillTask) -> None:
        """Start to score the prompt, if it may be thinned."""
        job, sparse = task.sequence.job, _asked(task)
        if sparse is None:
            return
        if reason := self._why_not(task, sparse):
            log.debug("request %s is read in full: %s", job.id, reason)
            self._keep_all(task.sequence)  # it may have been preempted while it was scored
        else:
            with self._else_in_full(task):
                scoring = self._scorer.open(job.prompt, job.namespace, job.cache)
                self._scorings[task.number] = scoring
                task.is_preparing = True
                task.sequence.prepared = Sparsely(sparse.keep)

    def drop(self, task: PrefillTask) -> None:
        """The prompt is scored, or its scoring is given up."""
        task.is_preparing = False
        scoring = self._scorings.pop(task.number, None)
        if scoring is not None:
            self._scorer.close_reading(scoring)

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
            sequence.job = replace(sequence.job, preparation=None)
            self._keep_all(sequence)
            self.drop(task)
            if may_be_device_fault(e):
                raise

    def _keep_all(self, sequence: Sequence) -> None:
        """Its prompt is not thinned after all: tell a client that was told otherwise."""
        if isinstance(sequence.prepared, Sparsely):
            sequence.prepared = AS_IT_IS
            if sequence.announced:
                self._inflight.emit(sequence.job.id, Advanced(sequence.admission))

    def _why_not(self, task: PrefillTask, sparse: Sparse) -> str:
        n_expected = max(task.row.n_tokens, task.cursor.n_expected)
        job, max_tokens = task.sequence.job, self._scorer.max_tokens
        return why_not(job, sparse, n_expected=n_expected, max_tokens=max_tokens)

    def dispatch(self, task: PrefillTask, n_tokens: int) -> None:
        """Dispatch the next slice of the scoring."""
        with self._else_in_full(task):
            alone, task.chunk_start = self._inflight.is_lone_prefill, self._n_scored(task)
            if alone:
                chunk = self._sizes.choose(task.chunk_start, alone=True)
                n_tokens = self._inflight.budget.chunk_tokens(task.chunk_start, most=chunk)
            self._scorer.read(self._scorings[task.number], n_tokens, alone=alone)

    def _n_scored(self, task: PrefillTask) -> int:
        """Prompt tokens that the small model has read; the lookahead to come counts as unread."""
        n_left = self._scorer.n_left(self._scorings[task.number])
        return max(len(task.prompt) - n_left, 0)

    def finish_slice(self, task: PrefillTask) -> None:
        """Wait for the slice. After the last one, thin the prompt."""
        scores, scoring = None, self._scorings[task.number]
        with self._else_in_full(task):
            is_over = self._scorer.finish_slice(scoring)
            took_s = time.perf_counter() - task.chunk_began
            self._speed.observe(task.chunk_start, self._n_scored(task), took_s)
            if not is_over:
                return
            scores = self._scorer.scores(scoring)
            self.drop(task)
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
        sparse, start = _asked(task), task.row.n_tokens
        if sparse is None or self._why_not(task, sparse):  # more may have been loaded since `begin`
            return None
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
        assert isinstance(sequence.prepared, Sparsely)
        sequence.prepared = replace(
            sequence.prepared, n_skipped=n_skipped, whole=task.cursor.admission
        )
        task.cursor.hand_over(task.row)
        sequence.job = job = replace(sequence.job, prompt=prompt)
        cursor = inflight.cache.open(prompt, job.namespace, job.cache)
        restored = cursor.restore()
        if restored is not None and restored.n_tokens <= task.row.n_tokens:
            cursor.filled(task.row)  # it holds the same, and more
        elif restored is not None:
            try:
                row = inflight.restore(job.id, cursor, restored)
            except RestoreFailed:
                cursor = NullCursor()
            else:
                inflight.runner.leave([task.row])
                task.row = row
        task.prompt, task.cursor, sequence.cursor = prompt, cursor, cursor
        inflight.budget.admit(job, inflight.budget.grown_nbytes(job, sequence.replies))
        inflight.update_room()


def _asked(task: PrefillTask) -> Sparse | None:
    """What the request asks for; None: every token of its prompt must be read, or it is thinned."""
    asked = task.sequence.job.preparation
    return asked if isinstance(asked, Sparse) and not task.sequence.job.prompt.has_gaps else None


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
        was_thinned = isinstance(sequence.prepared, Sparsely) and sequence.prepared.n_skipped
        if not was_thinned or sequence.has_failed or not reply or not job.cache.write:
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
        """Reserve memory, and restore what is cached. False: there is no memory for it, or what is
        cached cannot be restored."""
        inflight, job = self._inflight, deferred.job
        need = inflight.budget.cost.of(len(job.prompt))
        if need > inflight.budget.free_nbytes():
            return False
        inflight.budget.admit(job, need)
        inflight.update_room()
        deferred.cursor = inflight.cache.open(job.prompt, job.namespace, job.cache)
        restored = deferred.cursor.restore()
        if restored is None:
            deferred.row = inflight.runner.start(None)
            return True
        with suppress(RestoreFailed):
            deferred.row = inflight.restore(job.id, deferred.cursor, restored)
        return deferred.row is not None

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
            stops=cursor.stops(),
            aligned=inflight.limits.aligned,
            common=inflight.limits.common_chunk,
        )
        began = time.perf_counter()
        inflight.runner.prefill(row, prompt, end)
        inflight.runner.finish_chunk(row)
        inflight.cache.prefill.observe(start, end, time.perf_counter() - began)
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
