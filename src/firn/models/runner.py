"""Runs the model: prefill of one row at a time, decode of all rows together.

Owner: the engine thread. Every mx.array of a live sequence is born and dies here.

Decode is pipelined. `launch` dispatches a step and returns; `collect` reads the tokens of steps that
were dispatched before. With nothing else to do, one step stays in flight, so that Python prepares the
next step while the device computes this one. A row that ends has therefore consumed its last token
already, which is what the next turn of the conversation wants of its state.

A row with a grammar needs its last token on the host before its next mask exists. Its group's forward
pass needs it on the device only, so half of that is dispatched first, and the masks are made meanwhile:

    device   pick n | first half of forward n+1     | second half  | pick n+1 | first half ...
    host              read n -> masks -> dispatch the second half and pick n+1 -> first half of n+2 ...
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from firn.core.errors import FirnError
from firn.core.events import TokenLogprob
from firn.core.ports import Restored
from firn.core.values import Job, ModelInfo, Prompt
from firn.models.batch import Group, Launched, Row, fork
from firn.models.cpu.threads import Threads
from firn.models.inputs import IdsOnly, Inputs
from firn.models.masks import Masks
from firn.models.room import end_room, give_room
from firn.models.sampling import Picker, pick, read_logprobs, score


@dataclass(frozen=True, slots=True)
class Picked:
    """A row's newest token. fault: its grammar has failed, and it cannot go on."""

    row: Row
    token: int
    logprob: TokenLogprob | None
    fault: FirnError | None = None


class Runner:
    def __init__(
        self,
        model: Any,
        info: ModelInfo,
        *,
        make_layers: Callable[[], list[Any]],
        max_rows: int,
        inputs: Inputs | None = None,
        threads: Threads | None = None,
    ) -> None:
        """inputs: what the model takes beside token ids; None for a text model.

        threads: of the library that multiplies, where they can be chosen.
        """
        self.info = info
        self._model = model
        self._inputs = inputs or IdsOnly()
        self._threads = threads
        self._make_layers = make_layers
        self._max_rows = max_rows if info.batchable else 1
        self._masks = Masks(info.vocab_size)
        self._groups: list[Group] = []
        self._before = (0, 0)
        """Memory in use, and the peak so far, when the last chunk was dispatched."""
        self.chunk_peak_nbytes = 0

    # --- prefill ---------------------------------------------------------------------------

    def start(self, restored: Restored | None) -> Row:
        """A new row, empty or with a restored past; that is not left to the first chunk's time."""
        layers = self._make_layers()
        if restored is None:
            return Row(layers)
        restored.fill(layers)
        mx.eval([layer.state for layer in layers])
        return Row(layers, restored.n_tokens)

    def prefill(
        self, row: Row, prompt: Prompt, end: int, *, top_logprobs: int | None = None
    ) -> None:
        """Consume prompt tokens [row.n_tokens, end). Dispatched, not awaited: see `settle`.

        The logits are computed only where somebody wants to know how likely the tokens were.
        """
        start = row.n_tokens
        self._before = mx.get_active_memory(), mx.get_peak_memory()
        give_room(row.layers, len(prompt))
        self._prepare(end - start)
        ids = mx.array(prompt.ids[start:end].astype(np.int32))
        more = self._inputs.chunk(prompt, start, end)
        logits = self._model(ids[None], cache=row.layers, **more)
        row.n_tokens = end
        row.scores = None
        if top_logprobs is not None:
            row.scores = score(logits[0], prompt.ids[start + 1 : end + 1], top=top_logprobs)
        arrays = row.scores.arrays if row.scores else []
        mx.async_eval([layer.state for layer in row.layers], arrays)

    def settle(self, row: Row) -> list[TokenLogprob]:
        """Wait until the row's caches are computed; the logprobs that were asked for."""
        mx.eval([layer.state for layer in row.live_layers])
        (active, before), peak = self._before, mx.get_peak_memory()
        left = max(active, mx.get_active_memory())
        self.chunk_peak_nbytes = peak - left if peak > before else 0
        scores, row.scores = row.scores, None
        return scores.read() if scores else []

    def choices(self, row: Row, job: Job, indices: Sequence[int]) -> list[Row]:
        """One row for each choice, all with this row's past, each with its own sampler."""
        end_room(row.layers)
        rows = [row, *(fork(row) for _ in indices[1:])]
        shift = self._inputs.shift(job.prompt)
        for choice, r in zip(indices, rows, strict=True):
            r.shift = shift
            r.picker = Picker(
                job.sampling,
                choice=choice,
                vocab_size=self.info.vocab_size,
                prompt=job.prompt.ids,
                top_logprobs=job.top_logprobs,
                constraint=job.grammar.start() if job.grammar is not None else None,
            )
        return rows

    # --- decode ----------------------------------------------------------------------------

    def join(self, row: Row, token: int, *, n_coming: int = 0) -> None:
        """Let the row take part in decode steps, starting by consuming `token`.

        n_coming: how many more are to follow; a group makes room for some of them at once.
        """
        for group in self._groups:
            if group.has_room_for(row, self._max_rows):
                group.join(row, token, n_seats=min(1 + n_coming, self._max_rows - len(group.rows)))
                return
        self._groups.append(Group.of_one(row, token))

    def resume(self, row: Row, reply: Sequence[int], *, alone: bool = True) -> None:
        """The row was read again: go on behind this reply, after a fault in a group of its own."""
        _picker(row).replay(reply)
        row.alone = alone

    def force(self, row: Row, tokens: Sequence[int], *, at: int) -> None:
        """The row's tokens from position `at` on, which is not picked yet."""
        row.forced = dict(enumerate(tokens, start=at))

    def leave(self, rows: Sequence[Row]) -> None:
        """Drop rows; the others are not disturbed. Rows that never joined are fine."""
        for group in {r.group for r in rows if r.group}:
            group.leave(rows)
        self._groups = [g for g in self._groups if g.seats]
        for row in rows:
            row.layers, row.group = [], None

    @property
    def n_rows(self) -> int:
        return sum(len(g.rows) for g in self._groups)

    def groups(self) -> list[list[Row]]:
        """The rows by group: what fails together when a step fails."""
        return [g.rows for g in self._groups]

    def launch(self, rows: Sequence[Row]) -> None:
        """Dispatch one decode step of the group that holds these rows."""
        group = rows[0].group
        assert group is not None
        group.tick()
        self._prepare(len(group.seats))
        more = self._inputs.step(group.seats)
        logits = self._model(group.inputs[:, None], cache=group.layers, **more)[:, -1, :]
        # The step consumes position n_tokens, so it picks the one after.
        forced = [r.forced.pop(r.n_tokens + 1, None) if r.forced else None for r in group.seats]
        pickers = [_picker(r) for r in group.seats]
        allowed = None
        if any(p.constraint for p in pickers):
            mx.async_eval(group.layers[len(group.layers) // 2].state)
            group.read_all()
            allowed = mx.array(self._masks.fill([p.constraint for p in pickers]))
        picks = pick(logits, pickers, forced, allowed=allowed)
        mx.async_eval(picks.arrays)
        group.inputs = picks.tokens
        group.unread.append(Launched(tuple(group.seats), picks))
        for row in group.seats:
            row.n_tokens += 1

    def collect(self, rows: Sequence[Row], *, keep_in_flight: int) -> list[Picked]:
        """Read the tokens of this group's steps, but for the newest `keep_in_flight`.

        Rows that left meanwhile are skipped.
        """
        group = rows[0].group
        if group is None:
            return []
        out: list[Picked] = []
        while len(group.unread) > keep_in_flight:
            step = group.unread.pop(0)
            tokens = step.read()
            logprobs = read_logprobs(step.picks, [_picker(r) for r in step.rows])
            for row, token, logprob in zip(step.rows, tokens, logprobs, strict=True):
                if row.group is group:
                    out.append(Picked(row, token, logprob, _picker(row).fault))
        return out

    def confirm(self) -> None:
        """Wait for all that was dispatched; raises what the device has to say of any of it.

        MLX keeps the error of a command for the next use of its stream: waiting alone does not raise it.
        """
        try:
            mx.synchronize()
            mx.eval(mx.array(0) + 1)
        except RuntimeError:
            mx.clear_cache()  # most often there was too little memory
            raise

    def close(self) -> None:
        """Wait for the device and end this thread's streams: MLX aborts a process that exits first."""
        self._groups = []
        mx.synchronize()
        mx.clear_streams()

    def _prepare(self, n_tokens: int) -> None:
        if self._threads is not None:
            self._threads.prepare(n_tokens)

    # --- accounting ------------------------------------------------------------------------

    def live_nbytes(self) -> int:
        """Bytes of the decoding rows' caches. Vacant seats wait for rows with memory of their own."""
        return sum(
            sum(layer.nbytes for layer in g.layers) * len(g.rows) // len(g.seats)
            for g in self._groups
        )


def _picker(row: Row) -> Picker:
    assert row.picker is not None
    return row.picker
