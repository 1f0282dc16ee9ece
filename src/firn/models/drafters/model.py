"""Guesses by a small model that has the same tokens: what it would say itself.

It has rows of its own, in a group of its own, and they resume from and are kept in a prefix cache under
the small model's root. A prompt is read a chunk at a time, between the steps of the large model, which
does not wait for it: until it is read there are no guesses. All guesses of a step are one chain on the
device, for all rows together:

    # [0, row.n_tokens) consumed and true   then what came since   then its own guesses, but the last

What it consumed of wrong guesses is cut off before it is fed again. Greedy: the guess that is most
likely to be right is the likeliest token, however the row samples.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from firn.core.ports import Cursor, EngineLoad, PrefixCache
from firn.core.values import Job
from firn.models.batch import Group, Row
from firn.models.drafters import NOTHING, Guess
from firn.models.padding import in_blocks
from firn.models.ragged import MAX_FEED, RaggedCache
from firn.models.rewind import Step, is_rewindable, leaves
from firn.models.sampling import to_host
from firn.models.traits import TRAITS, Traits

MAX_GUESSES = 8
ODDS = (0.7, 0.65, 0.6, 0.55, 0.5, 0.5, 0.5, 0.5)
CHUNK = 512


@dataclass(eq=False)
class _DraftRow:
    """One row of the large model, as the small one has read it."""

    job: Job
    row: Row
    cursor: Cursor
    reply: list[int] = field(default_factory=list)
    guessed: list[int] = field(default_factory=list)
    """Behind all of the reply; all but the last of them consumed."""

    @property
    def n_text(self) -> int:
        return len(self.job.prompt) + len(self.reply)

    def text(self, start: int, end: int) -> list[int]:
        n_prompt = len(self.job.prompt)
        own = self.job.prompt.ids[start:end].tolist()
        return [*own, *self.reply[max(start - n_prompt, 0) : max(end - n_prompt, 0)]]


class ModelDrafter:
    """Owner: the engine thread, through the speculation."""

    is_free = False

    def __init__(
        self,
        model: Any,
        make_layers: Callable[[], list[Any]],
        *,
        cache: PrefixCache[Cursor],
        batchable: bool,
        n_ids: int = 1 << 31,
        chunk: int = CHUNK,
        traits: Traits = TRAITS["cpu"],
    ) -> None:
        """n_ids: ids from here on are unknown to it. traits: of the device, for this model.

        Raises ValueError for a model whose tokens cannot be taken back one by one.
        """
        if not is_rewindable(make_layers()):
            raise ValueError("its layers cannot take back single tokens")
        self._model = model
        self._make_layers = make_layers
        self._cache = cache
        self._batchable = batchable
        self._last_id = n_ids - 1
        self._chunk = chunk
        self._traits = traits
        self._readers: dict[Hashable, _DraftRow] = {}
        self._groups: list[Group] = []

    def odds(self, kind: int) -> float:
        return ODDS[kind]

    # --- rows ------------------------------------------------------------------------------

    def open(self, row: Hashable, job: Job) -> None:
        if job.prompt.picture_spans:  # it has no eyes
            return
        cursor = self._cache.open(job.prompt, job.namespace, job.cache)
        restored = self._cache.restore(cursor)
        layers = self._make_layers()
        if restored is not None:
            restored.fill(layers)
        own = Row(layers, restored.n_tokens if restored else 0)
        if restored is not None:
            restored.filled(own)
        self._readers[row] = _DraftRow(job, own, cursor)

    def took(self, row: Hashable, tokens: Sequence[int]) -> None:
        reader = self._readers.get(row)
        if reader is None:
            return
        # The last guess was not consumed, and the newest token is always to be: the next one follows it.
        consumed = reader.guessed[: min(len(reader.guessed), len(tokens)) - 1]
        for token, guess in zip(tokens, consumed, strict=False):
            if token != guess:
                break
            reader.row.n_tokens += 1
        reader.guessed = []
        reader.reply.extend(tokens)

    def close(self, row: Hashable) -> None:
        reader = self._readers.pop(row, None)
        if reader is None:
            return
        self._cut(reader.row.group)
        self._cache.close_cursor(reader.cursor, reader.row)
        group = reader.row.group
        if group is not None:
            group.leave([reader.row])
            self._groups = [g for g in self._groups if g.seats]

    def end(self) -> None:
        """The engine stops."""
        for row in list(self._readers):
            self.close(row)
        self._cache.close()

    # --- reading ---------------------------------------------------------------------------

    def prepare(self, row: Hashable) -> bool:
        """Read on, a chunk at most; True once all but the last tokens are read."""
        self._cache.tick(EngineLoad.DECODING)
        reader = self._readers.get(row)
        if reader is None:
            return False
        if reader.row.group is None and not self._read_prompt(reader):
            return False
        if reader.row.group is None:
            self._join(reader)
        if reader.n_text - reader.row.n_tokens > MAX_FEED:
            self._catch_up(reader)
        return reader.n_text - reader.row.n_tokens <= MAX_FEED

    def _read_prompt(self, reader: _DraftRow) -> bool:
        own, n_prompt = reader.row, len(reader.job.prompt)
        ahead = self._cache.advance(reader.cursor, own.n_tokens)
        if ahead is not None:
            layers = self._make_layers()
            ahead.fill(layers)
            own.layers, own.n_tokens = layers, ahead.n_tokens
            ahead.filled(own)
        elif reader.cursor.racing:  # nobody waits for guesses: what is on its way may come
            return False
        end = min(own.n_tokens + self._chunk, n_prompt - 1)
        if end > own.n_tokens:
            ids = np.minimum(reader.job.prompt.ids[own.n_tokens : end], self._last_id)
            self._model(mx.array(ids.astype(np.int32))[None], cache=own.layers)
            own.n_tokens = end
            mx.eval([layer.state for layer in own.layers])
            self._cache.commit(reader.cursor, own)
        return own.n_tokens == n_prompt - 1

    def _join(self, reader: _DraftRow) -> None:
        own = reader.row
        cursor, reader.cursor = reader.cursor, self._cache.fork(reader.cursor, reader.reply)
        self._cache.close_cursor(cursor, None)
        last = int(reader.job.prompt.ids[-1])
        for group in self._groups:
            if self._batchable and group.has_room_for(own, 1 << 30):
                self._cut(group)
                group.join(own, last)
                break
        else:
            group = Group.of_one(own, last, columns=self._traits.columns)
            self._groups.append(group)
        group.make_ready()

    def _catch_up(self, reader: _DraftRow) -> None:
        """What was said while nobody guessed."""
        own = reader.row
        group = own.group
        assert group is not None
        tokens = reader.text(own.n_tokens, own.n_tokens + MAX_FEED)
        self._feed(group, [tokens if r is own else [] for r in group.seats])
        mx.eval([layer.state for layer in group.layers])
        own.n_tokens += len(tokens)
        if reader.cursor.commit_due(own.n_tokens):
            self._cache.commit(reader.cursor, own)

    # --- guessing --------------------------------------------------------------------------

    def guess(self, rows: Sequence[Hashable], n_most: int) -> list[Guess]:
        found: dict[Hashable, Guess] = {}
        n = min(n_most, MAX_GUESSES)
        ready = [row for row in rows if row in self._readers and n > 0 and self.prepare(row)]
        for group in self._groups:
            asked = [r for r in ready if self._readers[r].row.group is group]
            fresh = [r for r in asked if not self._readers[r].guessed]
            if fresh:
                self._guess(group, fresh, n)
            for row in asked:
                tokens = tuple(self._readers[row].guessed[:n])
                found[row] = Guess(tokens, tuple(range(len(tokens))))
        return [found.get(row, NOTHING) for row in rows]

    def _guess(self, group: Group, rows: Sequence[Hashable], n: int) -> None:
        readers = {self._readers[r].row: self._readers[r] for r in rows}
        fed: list[Sequence[int]] = []
        for seat in group.seats:
            reader = readers.get(seat)
            fed.append(reader.text(seat.n_tokens, reader.n_text) if reader else [])
        logits = self._feed(group, fed)
        last = mx.array([max(len(f) - 1, 0) for f in fed])
        tokens = mx.argmax(logits[mx.arange(len(fed)), last], axis=-1)
        chain = [tokens]
        for seat, f in zip(group.seats, fed, strict=True):
            seat.n_tokens += len(f)
        active = [1 if f else 0 for f in fed]
        for _ in range(n - 1):
            step = Step(group.layers, active)
            logits = self._model(tokens[:, None], cache=group.layers)
            step.settle(active)
            tokens = mx.argmax(logits[:, -1], axis=-1)
            chain.append(tokens)
        table = to_host(mx.stack(chain, axis=1))
        for row in rows:
            reader = self._readers[row]
            reader.guessed = table[reader.row.index]

    def _feed(self, group: Group, fed: Sequence[Sequence[int]]) -> mx.array:
        """Logits after these tokens of each seat; some seats are fed nothing."""
        self._cut(group)
        lengths = [len(f) for f in fed]
        width = max(lengths)
        if width > 1:
            width = self._traits.shape(width)
        step = Step(group.layers, lengths, width)
        ids = mx.array([[*f, *[0] * (width - len(f))] for f in fed])
        layers = in_blocks(group.layers, group.columns) if width > 1 else group.layers
        logits: mx.array = self._model(mx.minimum(ids, self._last_id), cache=layers)
        step.settle(lengths)
        return logits

    def _cut(self, group: Group | None) -> None:
        """Of what the seats hold, only what is true stays."""
        if group is None:
            return
        lengths = [seat.n_tokens for seat in group.seats]
        for layer in leaves(group.layers):
            if isinstance(layer, RaggedCache):
                layer.keep(lengths)
            else:
                layer.trim(int(layer.offset) - lengths[0])


DRAFTER = ModelDrafter
