"""Runs the model: prefill of one row, or of several short prompts in one pass; decode of all rows.

Owner: the engine thread. Every mx.array of a live sequence is created and freed here.

Decode is pipelined. `launch` dispatches a step and returns; `collect` reads the tokens of steps that
were dispatched before. With nothing else to do, one step stays in flight, so that Python prepares the
next step while the device computes this one. A row that ends has therefore consumed its last token
already, and the next turn of the conversation can start from its state.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import mlx.core as mx

from firn.core.ports import ReadChunk, Restored
from firn.core.values import Job, ModelInfo, Prompt
from firn.models.decode.batch import MAX_PADDING_TOKENS, Group, Row, TakenTokens, fork
from firn.models.decode.batched_prefill import BatchedPrefill
from firn.models.decode.execution import PLAIN_EXECUTION, Execution
from firn.models.decode.forward import forward_of
from firn.models.decode.sampling import Picker, Picks, pick, score
from firn.models.decode.steps import NO_SPECULATION, Speculator, Steps, picker_of
from firn.models.layers import MakeLayers
from firn.models.model_arguments import IDS_ONLY, ModelArguments


class Runner:
    """Implements core.ports.Runner."""

    def __init__(
        self,
        model: Any,
        info: ModelInfo,
        *,
        make_layers: MakeLayers,
        max_rows: int,
        arguments: ModelArguments = IDS_ONLY,
        speculator: Speculator = NO_SPECULATION,
        execution: Execution = PLAIN_EXECUTION,
        max_padding: int = MAX_PADDING_TOKENS,
    ) -> None:
        """arguments: what the model takes besides token ids. speculator: who drafts. execution: how
        the device computes it. max_padding: unused cells that a group may hold, in tokens.
        """
        self.info = info
        self.speculator = speculator
        self._execution = execution
        self._buckets = execution.buckets
        self._prepare = execution.prepare
        self._forward = forward_of(
            model,
            arguments,
            execution,
            layers_per_dispatch=speculator.profile.layers_per_dispatch,
        )
        self._steps = Steps(
            self._forward,
            speculator,
            vocab_size=info.vocab_size,
            pick=self._pick,
            prepare=self._prepare,
        )
        self._make_layers = make_layers
        self._batched = BatchedPrefill(model, make_layers)
        self._max_rows = max_rows if info.batchable else 1
        self._max_padding = max_padding
        self._groups: list[Group] = []
        self._memory_before = (0, 0)
        """Memory in use, and the peak so far, when the last chunk was dispatched."""

    # --- prefill ---------------------------------------------------------------------------

    def start(self, restored: Restored | None) -> Row:
        """A new row, empty or with a restored past. The past is computed now, so that it does not
        count as the first chunk's time."""
        layers = self._make_layers()
        if restored is None:
            return Row(layers)
        restored.fill(layers)
        is_soon = restored.nbytes < self._execution.soon_nbytes
        (mx.async_eval if is_soon else mx.eval)([layer.state for layer in layers])
        return Row(layers, restored.n_tokens)

    def read_picture(self, prompt: Prompt, index: int) -> bool:
        return self._forward.arguments.read_picture(prompt, index)

    def prefill(
        self, row: Row, prompt: Prompt, end: int, *, top_logprobs: int | None = None
    ) -> None:
        """Consume prompt tokens [row.n_tokens, end). Dispatched, not awaited: see `finish_chunk`.

        top_logprobs: score the prompt's tokens; None computes no logits.
        """
        start = row.n_tokens
        self._forward.look_back(row, prompt)
        self._memory_before = mx.get_active_memory(), mx.get_peak_memory()
        self._buckets.grow(row.layers, len(prompt))
        ids, layers = prompt.ids[start:end], row.layers
        padded = self._buckets.fit(layers, len(ids))
        if padded is not None:
            ids, layers = padded.pad(ids), padded.layers
        self._prepare(len(ids))
        self.speculator.disturbed()
        logits = self._forward.read(row, prompt, end, ids, layers)
        row.n_tokens = end
        row.prompt_scores = None
        if top_logprobs is not None:
            row.prompt_scores = score(
                logits[0, : end - start], prompt.ids[start + 1 : end + 1], top=top_logprobs
            )
        arrays = row.prompt_scores.arrays if row.prompt_scores else []
        hidden = [at.states for at in row.hidden]
        mx.async_eval([layer.state for layer in row.layers], arrays, hidden)

    @property
    def can_batch_prefill(self) -> bool:
        """Whether one pass can read several prompts: plain attention or states, no pictures, no head."""
        return self._max_rows > 1 and self._forward.takes_ids_only and self._batched.can_read()

    def batched_prefill(
        self, rows: Sequence[Row], prompts: Sequence[Prompt], ends: Sequence[int]
    ) -> None:
        """Consume prompt tokens [row.n_tokens, end) of each row in one pass, padded.

        Raises ValueError if the model computes padded passes incorrectly.
        """
        self._memory_before = mx.get_active_memory(), mx.get_peak_memory()
        self.speculator.disturbed()
        new = [p.ids[r.n_tokens : end] for r, p, end in zip(rows, prompts, ends, strict=True)]
        self._batched.read(rows, new, buckets=self._buckets, prepare=self._prepare)

    def finish_chunk(self, row: Row) -> ReadChunk:
        """Wait until the row's caches are computed."""
        mx.eval([layer.state for layer in row.layers])
        (active, peak_before), peak = self._memory_before, mx.get_peak_memory()
        lasting = max(active, mx.get_active_memory())
        scores, row.prompt_scores = row.prompt_scores, None
        return ReadChunk(
            scores.read() if scores else [], peak - lasting if peak > peak_before else 0
        )

    def choices(self, row: Row, job: Job, indices: Sequence[int]) -> list[Row]:
        """One row per choice, all with this row's past, each with its own sampler."""
        self._buckets.end_growth(row.layers)
        self._forward.look_back(row, job.prompt)
        rows = [row, *(fork(row) for _ in indices[1:])]
        try:
            self._set_up(rows, job, indices)
        except Exception:
            for r in rows:
                self.speculator.close(r)
            raise
        return rows

    def _set_up(self, rows: Sequence[Row], job: Job, indices: Sequence[int]) -> None:
        shift = self._forward.arguments.shift(job.prompt)
        for choice, r in zip(indices, rows, strict=True):
            r.shift = shift
            r.ends, r.limit = job.eos, len(job.prompt) + job.max_tokens
            r.picker = Picker(
                job.sampling,
                choice=choice,
                vocab_size=self.info.vocab_size,
                prompt=job.prompt.whole.ids,
                top_logprobs=job.top_logprobs,
                constraint=job.grammar.start() if job.grammar is not None else None,
            )
            self.speculator.open(r, replace(job, prompt=job.prompt.whole))

    # --- decode ----------------------------------------------------------------------------

    @property
    def rest_tokens(self) -> int:
        """How many tokens before a prompt's last one a step of several tokens can read as well."""
        return self._steps.n_read_first

    def join(self, row: Row, token: int, *, before: Sequence[int] = (), n_coming: int = 0) -> None:
        """Let the row take part in decode steps. It first consumes `before`, then `token`.

        n_coming: how many rows will follow soon; the group makes room for some of them now.
        """
        for group in self._groups:
            if group.has_room_for(row, self._max_rows, max_padding=self._max_padding):
                if not self.speculator.in_groups:
                    self._feed_pending(group)
                n_vacant = min(
                    n_coming,
                    self._max_rows - len(group.rows) - 1,
                    self._max_padding // max(group.width, row.n_tokens),
                )
                group.join(row, token, n_seats=1 + n_vacant)
                row.pending = [*before, token]
                return
        columns, backlog = self.speculator.profile.columns, self._forward.backlog()
        self._groups.append(Group.of_one(row, token, columns=columns, backlog=backlog))
        row.pending = [*before, token]

    def _feed_pending(self, group: Group) -> None:
        """Let a lone row whose step was taken back consume all but its newest token.

        For models whose rows can share a group only if all take equally many tokens per step.
        """
        group.sync()
        row, rest = group.seats[0], group.seats[0].pending[:-1]
        if len(group.seats) > 1 or not rest:
            return
        group.catch_up()
        self._forward.feed(group, rest)
        row.n_tokens += len(rest)
        row.pending = row.pending[-1:]

    def resume(self, row: Row, reply: Sequence[int], *, alone: bool = True) -> None:
        """Continue after this reply, in a row whose prompt was read again after a fault.

        alone: in a group of its own.
        """
        picker_of(row).replay(reply)
        row.alone = alone
        self.speculator.extend(row, reply)

    def force(self, row: Row, tokens: Sequence[int], *, at: int) -> None:
        """Fix the row's tokens from position `at` on. That position must not have been picked yet."""
        row.forced = dict(enumerate(tokens, start=at))

    def leave(self, rows: Sequence[Row]) -> None:
        """Drop rows; the others are not disturbed. Rows that never joined are accepted."""
        for row in rows:
            self.speculator.close(row)
        for group in {r.group for r in rows if r.group}:
            group.leave(rows)
        self._groups = [g for g in self._groups if g.seats]
        for row in rows:
            row.layers, row.group = [], None

    def groups(self) -> list[list[Row]]:
        """The rows by group: when a step fails, all rows of its group fail."""
        return [g.rows for g in self._groups]

    def launch(self, rows: Sequence[Row]) -> None:
        """Dispatch one decode step of the group that holds these rows."""
        group = rows[0].group
        assert group is not None
        self._steps.launch(group)

    def _pick(
        self,
        logits: mx.array,
        pickers: Sequence[Picker],
        forced: Sequence[int | None],
        *,
        allowed: mx.array | None,
    ) -> Picks:
        """Pick a step's tokens. Overridden for ranks: one of them picks for all."""
        return pick(logits, pickers, forced, allowed=allowed)

    def collect(self, rows: Sequence[Row], *, keep_in_flight: int) -> list[TakenTokens]:
        """Read the tokens of this group's steps, except the newest `keep_in_flight`.

        Rows that have left are skipped.
        """
        group = rows[0].group
        if group is None:
            return []
        if group.unread and not group.unread[-1].may_stay_in_flight:
            keep_in_flight = 0
        out: list[TakenTokens] = []
        while len(group.unread) > keep_in_flight:
            taken = self._steps.read(group, group.unread.pop(0))
            out += [each for each in taken if each.row.group is group]
        return out

    def confirm(self) -> None:
        """Wait for everything that was dispatched, and raise any error the device reports for it.

        MLX raises a command's error at the next use of its stream: waiting alone would not raise it.
        """
        mx.synchronize()
        mx.eval(mx.array(0) + 1)

    def free_memory(self) -> None:
        """Release the memory that MLX keeps for reuse, and the buffers of failed steps."""
        with suppress(RuntimeError):  # the fault is known
            mx.synchronize()
        self._execution.free_unused()

    def close(self) -> None:
        """Wait for the device and end this thread's streams: MLX aborts a process that exits first."""
        self._groups = []
        self._steps.end()
        mx.synchronize()
        mx.clear_streams()

    # --- accounting ------------------------------------------------------------------------

    def live_nbytes(self) -> int:
        """Bytes of the decoding rows' caches. Vacant seats do not count: the rows that will take them
        are accounted for separately."""
        return sum(group.used_nbytes for group in self._groups)
