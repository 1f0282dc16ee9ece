"""Reads prompts: opens a task for each admitted request, and reads one chunk of one task in a step.

    look up -> restore what is cached into a new row -> chunks, each committed as it settles -> decode

Owner: the engine thread.
"""

from __future__ import annotations

import time
from collections import abc

from firn.core.events import Advanced, Prefilled, PromptLogprobs
from firn.core.ports import Cursor, NullCursor
from firn.core.values import Prompt
from firn.engine.chunks import ChunkSizes, DepthLimit
from firn.engine.decode import Decode
from firn.engine.inflight import InFlight, RestoreFailed
from firn.engine.preparation import Preparer
from firn.engine.prompt_batches import PromptBatches
from firn.engine.recovery import Recovery
from firn.engine.scheduler import chunk_end
from firn.engine.sequence import Choice, PrefillTask, Sequence


class Prefill:
    def __init__(
        self,
        inflight: InFlight,
        recovery: Recovery,
        *,
        decode: Decode,
        sizes: ChunkSizes,
        depths: DepthLimit,
        preparer: Preparer,
    ) -> None:
        self._inflight = inflight
        self._runner, self._cache = inflight.runner, inflight.cache
        self._recovery = recovery
        self._decode = decode
        self._sizes = sizes
        self._depths = depths
        self._preparer = preparer
        self._batches = PromptBatches(inflight, self.skip_ahead)
        self._skipped: list[PrefillTask] = []
        """Tasks that skipped to the end of their prompts in this step."""
        self.n_chunks = 0
        """Its parity decides whose turn it is."""

    # --- opening ---------------------------------------------------------------------------

    def begin(self, sequence: Sequence) -> None:
        """Start an admitted request: restore what the cache has of its prompt into a new row."""
        with self._recovery.guard(sequence):
            job = sequence.job
            task = self._open(sequence, job.prompt, sequence.choices, sequence.cursor)
            sequence.cursor = task.cursor
            task.wants_logprobs = job.prompt_logprobs
            self._inflight.update_room()  # not before the restore, whose records it might evict
            sequence.mark_started()
            self._preparer.begin(task)
            self._inflight.announce(sequence)
            if task.n_left == 0:
                self._decode.begin(task)

    def begin_again(self, sequence: Sequence) -> None:
        """Start a request that was preempted: read each reply up to where it was."""
        job = sequence.job
        sequence.was_preempted = False
        with self._recovery.guard(sequence):
            # The logprobs of a prompt are sent once, so its replies are read one by one.
            if not sequence.has_begun and not job.prompt_logprobs:
                sequence.cursor = self._cache.open(job.prompt, job.namespace, job.cache)
                self.begin(sequence)
                return
            for choice in sequence.open_choices:
                if choice.done or not sequence.admitted:  # the previous choice has failed
                    return
                prompt = job.prompt.grown(choice.tokens)
                cursor = self._cache.open(prompt, job.namespace, job.cache)
                task = self._open(sequence, prompt, [choice], cursor)
                if task.n_left == 0:
                    self._decode.begin(task)
            self._inflight.update_room()

    def _open(
        self, sequence: Sequence, prompt: Prompt, choices: list[Choice], cursor: Cursor
    ) -> PrefillTask:
        restored = cursor.restore()
        if restored is not None:
            try:
                row = self._inflight.restore(sequence.job.id, cursor, restored)
                return self._inflight.add_task(sequence, prompt, choices, cursor, row)
            except RestoreFailed:
                cursor = NullCursor()
        with self._inflight.closing_on_error(cursor):
            row = self._runner.start(None)
        return self._inflight.add_task(sequence, prompt, choices, cursor, row)

    # --- chunks ----------------------------------------------------------------------------

    def dispatch(self, task: PrefillTask) -> abc.Sequence[PrefillTask]:
        """Start a chunk; returns the tasks that it reads, this one first. Empty: nothing to wait for."""
        self.n_chunks += 1
        if not self.skip_ahead(task):
            return ()
        if self._is_short_rest(task):
            self._decode.begin(task)
            return ()
        with self._recovery.guard(task.sequence):
            self._depths.check(len(task.prompt))
        if task.number not in self._inflight.tasks:
            return ()
        chunk = self._chunk(task)
        task.chunk_start, task.chunk_began = task.row.n_tokens, time.perf_counter()
        if task.is_preparing:
            return self._prepare(task, chunk)
        end = chunk_end(
            task.row.n_tokens,
            task.n_total,
            chunk=chunk,
            stops=task.cursor.stops(),
            unbroken=task.prompt.unbroken,
            aligned=self._inflight.limits.aligned,
            common=self._inflight.limits.common_chunk,
        )
        with self._recovery.guard(task.sequence):
            if self._read_picture(task, end):
                return ()
        if task.number not in self._inflight.tasks:
            return ()
        others = self._batches.find(task, max_tokens=chunk) if end == task.n_total else []
        if task.number not in self._inflight.tasks:  # another request's fault has put all back
            return ()
        task.chunk_began = time.perf_counter()
        with self._recovery.guard(task.sequence):
            if not (others and self._batches.prefill(task, others)):
                top = (task.sequence.job.top_logprobs or 0) if task.wants_logprobs else None
                self._runner.prefill(task.row, task.prompt, end, top_logprobs=top)
            return [task, *task.others]
        return ()

    def _read_picture(self, task: PrefillTask, end: int) -> bool:
        """Read the next picture of the chunk that ends here. False: there is none left to read.

        One in a step: a chunk may have hundreds of small pictures, and decoding rows would wait for
        the vision tower to see them all.
        """
        spans = task.prompt.picture_spans
        while task.n_pictures < len(spans) and spans[task.n_pictures].start < end:
            index, task.n_pictures = task.n_pictures, task.n_pictures + 1
            if spans[index].end > task.row.n_tokens and self._runner.read_picture(
                task.prompt, index
            ):
                return True
        return False

    def _is_short_rest(self, task: PrefillTask) -> bool:
        """Whether the first decode step should read the rest of the prompt, too, which saves a pass.

        Not next to other requests, whose steps it would widen. Nor where the row has to stop before
        the prompt's last token, or must be read in whole chunks.
        """
        inflight, n_done = self._inflight, task.row.n_tokens
        is_plain = task.is_plain and not (
            inflight.limits.aligned
            or len(task.choices) > 1
            or not task.sequence.job.max_tokens  # the prompt is read to be stored
        )
        return (
            is_plain
            and 0 < n_done < task.n_total <= n_done + self._runner.rest_tokens
            and inflight.is_lone_prefill
            and not any(stop > n_done for stop in task.cursor.stops())
        )

    def _prepare(self, task: PrefillTask, chunk: int) -> abc.Sequence[PrefillTask]:
        with self._recovery.guard(task.sequence):
            self._preparer.dispatch(task, chunk)
            return [task] if task.is_preparing else ()
        return ()

    def skip_ahead(self, task: PrefillTask) -> bool:
        """Skip what was loaded, or computed by other requests, since the last chunk.

        False: nothing is left to read, and `begin_replies` lets it join.
        """
        ahead = task.cursor.advance(task.row.n_tokens)
        if ahead is None:
            return True
        try:
            row = self._inflight.restore(task.sequence.job.id, task.cursor, ahead)
        except RestoreFailed:
            self._continue_uncached(task)
        else:
            self._runner.leave([task.row])
            task.row = row
            if task.sequence.announced and task.is_prompt:
                self._inflight.emit(task.sequence.job.id, Advanced(task.sequence.admission))
        self._inflight.announce(task.sequence)
        if task.n_left == 0:
            self._skipped.append(task)
            return False
        return True

    def begin_replies(self) -> None:
        """Let prompts join that skipped to their end.

        Not before the tokens that were read in this step are committed: a join settles the step in
        flight, and rings keep what one step adds beside what is not committed, not what two add.
        """
        tasks, self._skipped = self._skipped, []
        for task in tasks:
            if task.number in self._inflight.tasks:  # it was not cancelled or put back
                self._decode.begin(task)

    def _continue_uncached(self, task: PrefillTask) -> None:
        is_prompt, task.cursor = task.is_prompt, NullCursor()
        if is_prompt:
            task.sequence.cursor = task.cursor

    def _chunk(self, task: PrefillTask) -> int:
        limits = self._inflight.limits
        if limits.aligned:  # other chunks would give other bits
            return limits.prefill_chunk
        n_done = task.row.n_tokens
        chunk = self._sizes.choose(n_done, alone=self._inflight.is_lone_prefill)
        chunk = self._inflight.budget.chunk_tokens(n_done, most=chunk)
        if not task.wants_logprobs:
            return chunk
        return max(
            min(chunk, limits.logprobs_chunk_nbytes // (4 * self._runner.info.vocab_size)), 1
        )

    # --- finishing -------------------------------------------------------------------------

    def finish_chunk(self, task: PrefillTask) -> None:
        """Wait for the task's chunk, and commit it."""
        if task.number not in self._inflight.tasks:  # cancelled while it ran
            return
        with self._recovery.guard(task.sequence):
            if task.is_preparing:
                self._preparer.finish_slice(task)
            else:
                self._commit(task)
            self._inflight.announce(task.sequence)
            if task.sequence.announced:
                self._inflight.emit(task.sequence.job.id, Prefilled(*task.progress))
            if task.n_left == 0:
                self._decode.begin(task)

    def _commit(self, task: PrefillTask) -> None:
        read = self._runner.finish_chunk(task.row)
        if read.logprobs:
            event = PromptLogprobs(task.chunk_start + 1, tuple(read.logprobs))
            self._inflight.emit(task.sequence.job.id, event)
        took_s = time.perf_counter() - task.chunk_began
        self._batches.observe(task, took_s)
        took_s *= task.share
        start, end = task.chunk_start, task.row.n_tokens
        self._cache.prefill.observe(start, end, took_s)
        if task.share == 1.0:
            self._inflight.budget.learn_chunk(end - start, start, read.peak_nbytes)
        self._inflight.commit(task.cursor, task.row)
