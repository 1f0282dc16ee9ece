"""Runs the model: prefill of one row, or of several short prompts in one pass; decode of all rows.

Owner: the engine thread. Every mx.array of a live sequence is created and freed here.

Decode is pipelined. `launch` dispatches a step and returns; `collect` reads the tokens of steps that
were dispatched before. With nothing else to do, one step stays in flight, so that Python prepares the
next step while the device computes this one. A row that ends has therefore consumed its last token
already, and the next turn of the conversation can start from its state.

The next mask of a row with a grammar needs the row's last token on the host. The forward pass needs
it on the device only, so half of the pass is dispatched before the masks are computed:

    device   pick n | first half of forward n+1     | second half  | pick n+1 | first half ...
    host              read n -> masks -> dispatch the second half and pick n+1 -> first half of n+2 ...
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np

from firn.core.events import TokenLogprob
from firn.core.ports import Restored
from firn.core.values import Job, ModelInfo, Prompt
from firn.models.ahead import device_feed, launch_ahead
from firn.models.backlog import HeadBacklog
from firn.models.batch import MAX_PADDING_TOKENS, Group, PlainStep, Row, fork
from firn.models.carry import HiddenAt, carry_of
from firn.models.cpu.threads import Threads
from firn.models.device import free_unused
from firn.models.early_dispatch import dispatch, dispatched_early
from firn.models.layers import MakeLayers
from firn.models.masks import Masks
from firn.models.model_arguments import IdsOnly, ModelArguments
from firn.models.mtp import MtpModel
from firn.models.padding import in_blocks
from firn.models.placing import at_positions, shifted
from firn.models.ragged import ALL_COLUMNS, MAX_FEED, Columns
from firn.models.rewind import RaggedStep, is_rewindable
from firn.models.room import end_room, give_room
from firn.models.sampling import Picker, Picks, pick, score
from firn.models.shapes import FewShapes
from firn.models.speculation import Speculation
from firn.models.together import BatchedPrefill, can_read_together, together_fault
from firn.models.traced import LONE_COLUMNS, PLAIN, TracedSteps
from firn.models.verify import Feed, PickedToken, TakenTokens, Verification

SOON_NBYTES = 64 << 20
"""A GPU computes a restored past of up to this size in less time than a decode step."""


class Runner:
    """Implements core.ports.Runner."""

    def __init__(
        self,
        model: Any,
        info: ModelInfo,
        *,
        make_layers: MakeLayers,
        max_rows: int,
        arguments: ModelArguments | None = None,
        threads: Threads | None = None,
        speculation: Speculation | None = None,
        shapes: FewShapes | None = None,
        traced: TracedSteps | None = None,
        max_padding: int = MAX_PADDING_TOKENS,
    ) -> None:
        """arguments: what the model takes besides token ids; None for a text model.

        threads: of the BLAS, if firn chooses them. speculation: None for one token per step.
        shapes: for a device that prefers few of them. traced: for one that computes a step faster
        than the host builds it. max_padding: unused cells that a group may hold, in tokens.
        """
        self.info = info
        self._model = model
        self._arguments = arguments or IdsOnly()
        self._threads = threads
        self.speculation = speculation
        self._shapes = shapes
        self._traced = traced
        self._max_padding = max_padding
        self._mtp = model if isinstance(model, MtpModel) else None
        assert shapes is None or self._mtp is None, "a head would continue from a padded token"
        self._make_layers = make_layers
        self._max_rows = max_rows if info.batchable else 1
        self._masks = Masks(info.vocab_size)
        self._groups: list[Group] = []
        self._memory_before = (0, 0)
        """Memory in use, and the peak so far, when the last chunk was dispatched."""
        self.chunk_peak_nbytes = 0
        self._padding_is_checked = False
        """Whether the model is known to compute padded passes correctly."""

    # --- prefill ---------------------------------------------------------------------------

    def start(self, restored: Restored | None) -> Row:
        """A new row, empty or with a restored past. The past is computed now, so that it does not
        count as the first chunk's time."""
        layers = self._make_layers()
        if restored is None:
            return Row(layers)
        restored.fill(layers)
        # On CUDA, waiting would include the step in flight: compute a small past with the chunk.
        is_soon = self._shapes is not None and restored.nbytes < SOON_NBYTES
        (mx.async_eval if is_soon else mx.eval)([layer.state for layer in layers])
        row = Row(layers, restored.n_tokens)
        restored.filled(row)
        return row

    def prefill(
        self, row: Row, prompt: Prompt, end: int, *, top_logprobs: int | None = None
    ) -> None:
        """Consume prompt tokens [row.n_tokens, end). Dispatched, not awaited: see `settle`.

        top_logprobs: score the prompt's tokens; None computes no logits.
        """
        start = row.n_tokens
        self._look_back(row, prompt)
        self._memory_before = mx.get_active_memory(), mx.get_peak_memory()
        give_room(row.layers, len(prompt), few_shapes=self._shapes is not None)
        ids, layers = prompt.ids[start:end], row.layers
        padded = self._shapes.fit(layers, len(ids)) if self._shapes else None
        if padded is not None:
            ids, layers = padded.pad(ids), padded.layers
        self._prepare(len(ids))
        if self.speculation is not None:
            self.speculation.disturbed()
        arguments = self._arguments.chunk(prompt, start, end) | self._carry([row])
        n_padding = start + len(ids) - end
        with at_positions(layers, prompt, start, end, n_padding=n_padding) as placed:
            logits = self._model(mx.array(ids.astype(np.int32))[None], cache=placed, **arguments)
        row.n_tokens = end
        row.prompt_scores = None
        if top_logprobs is not None:
            row.prompt_scores = score(
                logits[0, : end - start], prompt.ids[start + 1 : end + 1], top=top_logprobs
            )
        arrays = row.prompt_scores.arrays if row.prompt_scores else []
        if self._mtp is not None:
            last = self._mtp.hidden[:, -1:]
            row.hidden = [HiddenAt(last, 0, 0)]
            arrays = [*arrays, last]
        mx.async_eval([layer.state for layer in row.layers], arrays)

    @property
    def reads_together(self) -> bool:
        """Whether one pass can read several prompts: plain attention, no pictures, no head."""
        plain = isinstance(self._arguments, IdsOnly) and self._mtp is None
        return self._max_rows > 1 and plain and can_read_together(self._make_layers())

    def prefill_together(
        self, rows: Sequence[Row], prompts: Sequence[Prompt], ends: Sequence[int]
    ) -> None:
        """Consume prompt tokens [row.n_tokens, end) of each row in one pass, padded.

        The first call checks that the model computes padded passes correctly; raises ValueError if not.
        """
        if not self._padding_is_checked:
            fault = together_fault(self._model, self._make_layers)
            if fault is not None:
                raise ValueError(fault)
            self._padding_is_checked = True
        self._memory_before = mx.get_active_memory(), mx.get_peak_memory()
        step = BatchedPrefill(
            rows,
            [p.ids[r.n_tokens : end] for r, p, end in zip(rows, prompts, ends, strict=True)],
            few_shapes=self._shapes is not None,
        )
        self._prepare(len(rows) * step.width)
        if self.speculation is not None:
            self.speculation.disturbed()
        self._model(step.feed, cache=step.layers)
        step.share_out()
        mx.async_eval([layer.state for row in rows for layer in row.layers])

    def settle(self, row: Row) -> list[TokenLogprob]:
        """Wait until the row's caches are computed. Returns the chunk's prompt logprobs, if any."""
        mx.eval([layer.state for layer in row.live_layers])
        (active, peak_before), peak = self._memory_before, mx.get_peak_memory()
        lasting = max(active, mx.get_active_memory())
        self.chunk_peak_nbytes = peak - lasting if peak > peak_before else 0
        scores, row.prompt_scores = row.prompt_scores, None
        return scores.read() if scores else []

    def choices(self, row: Row, job: Job, indices: Sequence[int]) -> list[Row]:
        """One row per choice, all with this row's past, each with its own sampler."""
        end_room(row.layers, few_shapes=self._shapes is not None)
        self._look_back(row, job.prompt)
        rows = [row, *(fork(row) for _ in indices[1:])]
        try:
            self._set_up(rows, job, indices)
        except Exception:
            if self.speculation is not None:
                for r in rows:
                    self.speculation.close(r)
            raise
        return rows

    def _set_up(self, rows: Sequence[Row], job: Job, indices: Sequence[int]) -> None:
        shift = self._arguments.shift(job.prompt)
        for choice, r in zip(indices, rows, strict=True):
            r.shift, r.gap = shift, job.prompt.gap
            r.ends, r.limit = job.eos, len(job.prompt) + job.max_tokens
            r.picker = Picker(
                job.sampling,
                choice=choice,
                vocab_size=self.info.vocab_size,
                prompt=job.prompt.whole.ids,
                top_logprobs=job.top_logprobs,
                constraint=job.grammar.start() if job.grammar is not None else None,
            )
            if self.speculation is not None:
                self.speculation.open(r, replace(job, prompt=job.prompt.whole))

    # --- decode ----------------------------------------------------------------------------

    @property
    def rest_tokens(self) -> int:
        """How many tokens before a prompt's last one a step of several tokens can read as well."""
        is_plain = isinstance(self._arguments, IdsOnly) and self._mtp is None
        return MAX_FEED - 1 if self.speculation is not None and is_plain else 0

    def join(self, row: Row, token: int, *, before: Sequence[int] = (), n_coming: int = 0) -> None:
        """Let the row take part in decode steps. It first consumes `before`, then `token`.

        n_coming: how many rows will follow soon; the group makes room for some of them now.
        """
        for group in self._groups:
            if group.has_room_for(row, self._max_rows, max_padding=self._max_padding):
                if self.speculation is not None and not self.speculation.in_groups:
                    self._feed_pending(group)
                n_vacant = min(
                    n_coming,
                    self._max_rows - len(group.rows) - 1,
                    self._max_padding // max(group.width, row.n_tokens),
                )
                group.join(row, token, n_seats=1 + n_vacant)
                row.pending = [*before, token]
                return
        columns = self.speculation.traits.columns if self.speculation else ALL_COLUMNS
        backlog = HeadBacklog(self._mtp) if self._mtp is not None else None
        self._groups.append(Group.of_one(row, token, columns=columns, backlog=backlog))
        row.pending = [*before, token]

    def _feed_pending(self, group: Group) -> None:
        """Let a lone row whose step was taken back consume all but its newest token.

        For models whose rows can share a group only if all take equally many tokens per step.
        """
        group.settle()
        row, rest = group.seats[0], group.seats[0].pending[:-1]
        if len(group.seats) > 1 or not rest:
            return
        group.catch_up()
        arguments = self._arguments.step([row], len(rest)) | self._carry([row])
        self._model(mx.array([rest]), cache=_seen(group), **arguments)
        row.n_tokens += len(rest)
        row.pending = row.pending[-1:]
        if self._mtp is not None:
            row.hidden = [HiddenAt(self._mtp.hidden, 0, len(rest) - 1)]

    def resume(self, row: Row, reply: Sequence[int], *, alone: bool = True) -> None:
        """Continue after this reply, in a row whose prompt was read again after a fault.

        alone: in a group of its own.
        """
        _picker(row).replay(reply)
        row.alone = alone
        if self.speculation is not None:
            self.speculation.took(row, reply)

    def force(self, row: Row, tokens: Sequence[int], *, at: int) -> None:
        """Fix the row's tokens from position `at` on. That position must not have been picked yet."""
        row.forced = dict(enumerate(tokens, start=at))

    def leave(self, rows: Sequence[Row]) -> None:
        """Drop rows; the others are not disturbed. Rows that never joined are accepted."""
        if self.speculation is not None:
            for row in rows:
                self.speculation.close(row)
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
        if launch_ahead(group, self.speculation, self._traced):
            return
        self._read_all(group, Verification)  # drafts follow its tokens, and seats may be removed
        group.tick()  # before drafts are made for each seat
        drafts = self._drafts(group)
        if drafts is None:
            self._launch_one(group)
        else:
            self._launch_several(group, drafts)
        if self._traced is not None:
            group.unread[-1].is_new = self._traced.had_new_shape()

    def _drafts(self, group: Group) -> list[tuple[int, ...]] | None:
        """One draft per seat; None for a step of one token each."""
        drafts = None
        if self.speculation is not None:
            drafts = self.speculation.plan(group, lambda: self._read_all(group))
        if drafts is None and any(len(r.pending) > 1 for r in group.seats):
            return [()] * len(group.seats)
        return drafts

    def _launch_one(self, group: Group) -> None:
        is_pipelined = group.has_step_in_flight
        self._prepare(len(group.seats))
        logits = self._next_logits(group)
        # The step consumes position n_tokens, so it picks the one after.
        forced = [r.forced.pop(r.n_tokens + 1, None) if r.forced else None for r in group.seats]
        pickers = [_picker(r) for r in group.seats]
        allowed = None
        if any(p.constraint for p in pickers):
            mx.async_eval(group.layers[len(group.layers) // 2].state)
            self._read_all(group)
            allowed = mx.array(self._masks.fill([p.constraint for p in pickers]))
        picks = self._pick(logits, pickers, forced, allowed=allowed)
        mx.async_eval(picks.arrays)
        group.next_tokens = picks.tokens
        group.unread.append(PlainStep(tuple(group.seats), picks, is_pipelined))
        for i, row in enumerate(group.seats):
            row.n_tokens += 1
            if self._mtp is not None:
                row.hidden = [HiddenAt(self._mtp.hidden, i, 0)]

    def _next_logits(self, group: Group) -> mx.array:
        """Logits (seats, vocabulary) of a step of one token per seat. Runs no prediction head."""
        ids, arguments = group.next_tokens, self._arguments.step(group.seats)
        logits: mx.array
        if len(group.seats) > 1 or group.width < LONE_COLUMNS:
            traced = self._traced_logits(group, ids[:, None], PLAIN)
            if traced is not None:
                return traced[:, -1, :]
        if self._mtp is None or group.backlog is None:
            logits = self._model(ids[:, None], cache=_seen(group), **arguments)
            return logits[:, -1, :]
        before = self._mtp.before(group.layers, carry_of(group.seats))
        logits = self._mtp.without_head(ids[:, None], _seen(group), **arguments)
        group.backlog.add(ids, mx.zeros_like(self._mtp.hidden[:, 0]) if before is None else before)
        if group.backlog.is_full:
            group.catch_up()
        return logits[:, -1, :]

    def _launch_several(self, group: Group, drafts: Sequence[tuple[int, ...]]) -> None:
        """Dispatch a step with drafts. All tokens of its rows are on the host: drafting needed them."""
        assert self.speculation is not None
        traits = self.speculation.traits
        group.make_ready()
        feed = Feed(tuple(group.seats), tuple(drafts))
        width = max(feed.lengths)
        if is_rewindable(group.layers):  # other layers would have to know about padding
            width = traits.shape(width)
        self._prepare(len(feed.rows) * width)
        step = RaggedStep(group.layers, feed.lengths, width)
        ids, pickers = feed.ids(width), feed.pickers()
        fed = device_feed(feed.rows, feed.drafts, ids, group.layers) if self._traced else None
        logits = self._wide_logits(group, ids)
        allowed = None
        if any(_picker(r).constraint for r in feed.rows):
            mx.async_eval(group.layers[len(group.layers) // 2].state)
            rows = [(_picker(r).constraint, d) for r, d in zip(feed.rows, drafts, strict=True)]
            allowed = mx.array(self._masks.fill_ahead(rows))
        picks = feed.pick(logits, pickers, allowed=allowed)
        mx.async_eval(picks.arrays)
        hidden = self._mtp.hidden if self._mtp else None
        group.unread.append(
            Verification(group, feed.rows, feed.drafts, step, picks, pickers, width, hidden, fed)
        )

    def _wide_logits(self, group: Group, ids: mx.array) -> mx.array:
        """Logits (seats, tokens, vocabulary); the device has begun to compute them."""
        assert self.speculation is not None
        n_layers = self.speculation.traits.layers_per_dispatch
        traced = self._traced_logits(group, ids, group.columns)
        if traced is not None:
            dispatch(traced, group.layers, n_layers=n_layers)
            return traced
        arguments = self._arguments.step(group.seats, ids.shape[1]) | self._carry(group.seats)
        layers = _seen(group, group.columns)
        with dispatched_early(layers, n_layers=n_layers):
            logits: mx.array = self._model(ids, cache=layers, **arguments)
        return logits

    def _traced_logits(self, group: Group, ids: mx.array, columns: Columns) -> mx.array | None:
        """None if the step must be built in Python."""
        if self._traced is None or any(row.gap for row in group.seats):
            return None
        return self._traced.logits(ids, group.layers, columns)

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

    def collect(self, rows: Sequence[Row], *, keep_in_flight: int) -> list[PickedToken]:
        """Read the tokens of this group's steps, except the newest `keep_in_flight`.

        Rows that have left are skipped.
        """
        group = rows[0].group
        if group is None:
            return []
        newest = group.unread[-1] if group.unread else None
        if isinstance(newest, Verification) and not newest.may_stay_in_flight:
            keep_in_flight = 0
        out: list[PickedToken] = []
        while len(group.unread) > keep_in_flight:
            for taken in self._read(group, group.unread.pop(0)):
                if taken.row.group is group:
                    out += taken.picked()
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
        free_unused()

    def _read_all(self, group: Group, kind: type = object) -> None:
        """Bring all tokens of steps of this kind to the host, where grammars and drafters see them."""
        for step in group.unread:
            if isinstance(step, kind):
                self._read(group, step)

    def _read(self, group: Group, step: PlainStep | Verification) -> list[TakenTokens]:
        taken = step.read()
        if self.speculation is not None and not step.is_counted:
            step.is_counted = True
            self.speculation.count(group, taken, step)
        return taken

    def close(self) -> None:
        """Wait for the device and end this thread's streams: MLX aborts a process that exits first."""
        self._groups, self._traced = [], None
        if self.speculation is not None:
            self.speculation.end()
        mx.synchronize()
        mx.clear_streams()

    def _look_back(self, row: Row, prompt: Prompt) -> None:
        """Give a restored row the hidden state that a prediction head continues from."""
        if self._mtp is not None and row.n_tokens and not row.hidden:
            hidden = self._mtp.look_back(int(prompt.ids[row.n_tokens - 1]), row.layers)
            row.hidden = [] if hidden is None else [HiddenAt(hidden, 0, 0)]

    def _carry(self, rows: Sequence[Row]) -> dict[str, Any]:
        """The hidden states that a prediction head continues from, as an argument of the model."""
        return {} if self._mtp is None else {"carry": carry_of(rows)}

    def _prepare(self, n_tokens: int) -> None:
        if self._threads is not None:
            self._threads.prepare(n_tokens)

    # --- accounting ------------------------------------------------------------------------

    def live_nbytes(self) -> int:
        """Bytes of the decoding rows' caches. Vacant seats do not count: the rows that will take them
        are accounted for separately."""
        return sum(group.used_nbytes for group in self._groups)


def _seen(group: Group, columns: Columns = ALL_COLUMNS) -> list[Any]:
    """The group's caches as the model sees them."""
    return shifted(in_blocks(group.layers, columns), [row.gap for row in group.seats])


def _picker(row: Row) -> Picker:
    assert row.picker is not None
    return row.picker
