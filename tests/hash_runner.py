"""A runner without a model.

The next token is a hash of everything in the row's cache: one wrong, missing or doubled token
changes all that follow, and a test notices. After a fault the state is garbage, as it may be on a
device, so using it further is noticed, too.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from firn.core.errors import FirnError
from firn.core.events import (
    TokenLogprob,
)
from firn.core.ports import At, ReadChunk, Restored, RowView
from firn.core.values import (
    Job,
    ModelInfo,
    Prompt,
    Sampling,
)

VOCAB_SIZE = 251
GARBAGE = -1
GREEDY = Sampling(temperature=0.0)


def prompt_of(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB_SIZE), k=length)


def next_token(tokens: Sequence[int], draw: tuple[int | None, int, int] | None = None) -> int:
    """The token that follows. draw: seed, choice and number of the draw, for a row that samples."""
    digest = hashlib.blake2b(np.array(tokens, dtype=np.int64).tobytes(), digest_size=8)
    digest.update(repr(draw).encode())
    return int.from_bytes(digest.digest(), "little") % VOCAB_SIZE


def reply_to(
    prompt: Sequence[int],
    n_reply: int,
    *,
    sampling: Sampling = GREEDY,
    choice: int = 0,
    eos: frozenset[int] = frozenset(),
) -> list[int]:
    """The model's reply to a prompt that is alone and undisturbed."""
    tokens = list(prompt)
    for i in range(n_reply):
        draw = (sampling.seed, choice, i) if sampling.temperature else None
        tokens.append(next_token(tokens, draw))
        if tokens[-1] in eos:
            break
    return tokens[len(prompt) :]


def scores_of(tokens: Sequence[int], start: int, end: int, top: int = 0) -> list[TokenLogprob]:
    """Logprobs of tokens [start + 1, end + 1), each of which depends on all tokens before it."""
    found = []
    for i in range(start, end):
        likeliest = next_token(tokens[: i + 1])
        logprob = -next_token([*tokens[: i + 1], tokens[i + 1]]) / VOCAB_SIZE
        best = tuple(((likeliest + k) % VOCAB_SIZE, -0.1 * k) for k in range(top))
        found.append(TokenLogprob(tokens[i + 1], logprob, best))
    return found


# --- runner --------------------------------------------------------------------------------


@dataclass(eq=False)
class HashLayer:
    """The one layer of the model: every row's tokens."""

    rows: list[list[int]]


@dataclass(eq=False)
class HashGroup:
    layer: HashLayer
    rows: list[HashRow] = field(default_factory=list)
    unread: list[list[HashTaken]] = field(default_factory=list)


@dataclass(eq=False)
class HashRow:
    """One sequence. `next` is the token it will consume; `n_drawn` is its sampler's state."""

    layer: HashLayer | None
    n_tokens: int = 0
    group: HashGroup | None = None
    job: Job | None = None
    choice: int = 0
    n_drawn: int = 0
    next: int = GARBAGE
    before: tuple[int, ...] = ()
    alone: bool = False
    forced: dict[int, int] = field(default_factory=dict)
    scores: list[TokenLogprob] = field(default_factory=list)

    def view(self) -> RowView:
        assert self.layer is not None, "this row has left"
        index = self.group.rows.index(self) if self.group else 0
        layer = self.group.layer if self.group else self.layer
        return RowView([layer], At(index, self.n_tokens))

    @property
    def is_live(self) -> bool:
        return self.layer is not None

    @property
    def tokens(self) -> list[int]:
        view = self.view()
        tokens: list[int] = view.layers[0].rows[view.at.index]
        return tokens

    def draw(self) -> int:
        assert self.job is not None
        sampling = self.job.sampling
        key = (sampling.seed, self.choice, self.n_drawn) if sampling.temperature else None
        self.n_drawn += 1
        return next_token(self.tokens, key)


@dataclass(frozen=True, slots=True)
class HashTaken:
    row: HashRow
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob | None, ...] = (None,)
    fault: FirnError | None = None
    n_drafted: int = 0
    n_right: int = 0


def _nothing(*_: Any) -> None:
    pass


@dataclass
class Faults:
    """Called at each stage, to raise a fault there or to wait for the test."""

    start: Callable[[Restored | None], None] = _nothing
    read_picture: Callable[[int], None] = _nothing
    prefill: Callable[[HashRow, Sequence[int]], None] = _nothing
    finish_chunk: Callable[[HashRow], None] = _nothing
    choices: Callable[[Job], None] = _nothing
    join: Callable[[HashRow], None] = _nothing
    launch: Callable[[Sequence[HashRow]], None] = _nothing
    collect: Callable[[Sequence[HashRow]], None] = _nothing
    leave: Callable[[Sequence[HashRow]], None] = _nothing
    confirm: Callable[[], None] = _nothing


class HashRunner:
    """Implements core.ports.Runner. Counts what it does, and records the chunks in order."""

    def __init__(self, faults: Faults | None = None, *, group_rows: int = 1 << 30) -> None:
        self.faults = faults or Faults()
        self.group_rows = group_rows
        self.prefills: list[tuple[int, int]] = []
        """Chunks [start, end), in the order in which they ran."""
        self.largest_group = 0
        self.n_launched = 0
        self.n_freed = 0
        self.can_batch_prefill = True
        self.rest_tokens = 0
        self.n_batched = 0
        self.closed = False
        self._groups: list[HashGroup] = []
        self.info = ModelInfo(
            name="hash",
            path="",
            architecture="hash",
            fingerprint=b"hash",
            context_length=1 << 20,
            vocab_size=VOCAB_SIZE,
            dtype="none",
            weights_nbytes=0,
            layer_kinds=("HashLayer",),
            batchable=True,
            unbatchable_why=None,
        )

    def start(self, restored: Restored | None) -> HashRow:
        self.faults.start(restored)
        layer = HashLayer([[]])
        if restored is None:
            return HashRow(layer)
        restored.fill([layer])
        return HashRow(layer, restored.n_tokens)

    def read_picture(self, prompt: Prompt, index: int) -> bool:
        self.faults.read_picture(index)
        return True

    def prefill(
        self, row: HashRow, prompt: Prompt, end: int, *, top_logprobs: int | None = None
    ) -> None:
        if top_logprobs is not None:
            row.scores = scores_of(prompt.ids.tolist(), row.n_tokens, end, top_logprobs)
        chunk = [int(t) for t in prompt.ids[row.n_tokens : end]]
        assert chunk, "an empty chunk"
        row.tokens.insert(0, GARBAGE)
        self.faults.prefill(row, chunk)
        row.tokens[:] = row.tokens[1:] + chunk
        self.prefills.append((row.n_tokens, end))
        row.n_tokens = end

    def batched_prefill(
        self, rows: Sequence[HashRow], prompts: Sequence[Prompt], ends: Sequence[int]
    ) -> None:
        self.n_batched += 1
        for row, prompt, end in zip(rows, prompts, ends, strict=True):
            self.prefill(row, prompt, end)

    def finish_chunk(self, row: HashRow) -> ReadChunk:
        self.faults.finish_chunk(row)
        scores, row.scores = row.scores, []
        return ReadChunk(scores)

    def choices(self, row: HashRow, job: Job, indices: Sequence[int]) -> list[HashRow]:
        self.faults.choices(job)
        assert indices
        rows = [row]
        rows += [HashRow(HashLayer([list(row.tokens)]), row.n_tokens) for _ in indices[1:]]
        for choice, r in zip(indices, rows, strict=True):
            r.job, r.choice = job, choice
        return rows

    def join(
        self, row: HashRow, token: int, *, before: Sequence[int] = (), n_coming: int = 0
    ) -> None:
        self.faults.join(row)
        assert len(before) <= self.rest_tokens
        tokens = row.tokens
        row.next, row.before = token, tuple(before)
        row.group = self._room_for(row)
        row.group.rows.append(row)
        row.group.layer.rows.append(tokens)
        self.largest_group = max(self.largest_group, len(row.group.rows))

    def _room_for(self, row: HashRow) -> HashGroup:
        for group in self._groups:
            shared = not row.alone and not any(r.alone for r in group.rows)
            if shared and len(group.rows) < self.group_rows:
                return group
        self._groups.append(HashGroup(HashLayer([])))
        return self._groups[-1]

    def resume(self, row: HashRow, reply: Sequence[int], *, alone: bool = True) -> None:
        row.n_drawn = len(reply)
        row.alone = alone

    def force(self, row: HashRow, tokens: Sequence[int], *, at: int) -> None:
        assert at > row.n_tokens, "picked already"
        row.forced = dict(enumerate(tokens, start=at))

    def leave(self, rows: Sequence[HashRow]) -> None:
        self.faults.leave(rows)
        for row in rows:
            if row.group is not None:
                del row.group.layer.rows[row.view().at.index]
                row.group.rows.remove(row)
            row.group = row.layer = None
        self._groups = [g for g in self._groups if g.rows]

    def groups(self) -> list[list[HashRow]]:
        return [list(g.rows) for g in self._groups]

    def launch(self, rows: Sequence[HashRow]) -> None:
        group = rows[0].group
        assert group is not None
        assert list(rows) == group.rows
        for row in rows:
            row.tokens.insert(0, GARBAGE)
        self.faults.launch(rows)
        self.n_launched += 1
        step = []
        for row in rows:
            row.tokens[:] = [*row.tokens[1:], *row.before, row.next]
            row.n_tokens += len(row.before) + 1
            row.before = ()
            picked = row.draw()
            row.next = row.forced.pop(row.n_tokens, picked)
            step.append(HashTaken(row, (row.next,)))
        group.unread.append(step)

    def collect(self, rows: Sequence[HashRow], *, keep_in_flight: int) -> list[HashTaken]:
        group = rows[0].group
        assert group is not None
        self.faults.collect(rows)
        out: list[HashTaken] = []
        while len(group.unread) > keep_in_flight:
            out += [p for p in group.unread.pop(0) if p.row.group is group]
        return out

    def confirm(self) -> None:
        self.faults.confirm()

    def free_memory(self) -> None:
        self.n_freed += 1

    def live_nbytes(self) -> int:
        """One byte per token."""
        return sum(row.n_tokens for group in self._groups for row in group.rows)

    def close(self) -> None:
        self.closed = True
