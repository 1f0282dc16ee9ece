"""Drafts by a small model with the same tokens: what it would generate itself.

It has rows and groups of its own, and the rows resume from a prefix cache under the small model's
root. A prompt is read a chunk at a time, between the steps of the large model, which does not wait
for it: until the prompt is read there are no drafts. All tokens of a draft are computed in one
chain on the device, for all rows together:

    # [0, row.n_tokens) consumed and true   then what came since   then its draft but the last token

Wrong tokens that it consumed are cut off before it is fed again. It drafts greedily: the likeliest token
is the most likely to be right, however the row samples.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np

from firn.core.ports import Cursor, EngineCache, EngineLoad
from firn.core.values import Job
from firn.models.decode.batch import Group, Row, restored_row
from firn.models.decode.padding import in_blocks
from firn.models.decode.ragged import MAX_FEED, RaggedCache
from firn.models.decode.rewind import RaggedStep, is_rewindable
from firn.models.decode.sampling import to_host
from firn.models.decode.step_profile import PLAIN_PROFILE, StepProfile
from firn.models.layers import MakeLayers, leaves
from firn.models.speculation.drafters import MAX_CHAIN, NO_DRAFT, Draft

ODDS = 0.6
"""That a drafted token is right, before anything is known."""
CHUNK = 512


@dataclass(eq=False)
class _DraftRow:
    """The small model's copy of one row of the large one."""

    job: Job
    row: Row
    cursor: Cursor
    reply: list[int] = field(default_factory=list)
    draft: list[int] = field(default_factory=list)
    """Drafted tokens after the reply."""
    n_fed: int = 0
    """How many of those the caches hold: all but the last, until another pass of the group."""

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
        make_layers: MakeLayers,
        *,
        cache: EngineCache,
        batchable: bool,
        n_ids: int = 1 << 31,
        chunk: int = CHUNK,
        profile: StepProfile = PLAIN_PROFILE,
    ) -> None:
        """n_ids: it does not know this id and those above. profile: the device's, for this model.

        Raises ValueError for a model whose tokens cannot be taken back one by one.
        """
        if not is_rewindable(make_layers()):
            raise ValueError("its layers cannot undo single tokens")
        self._model = model
        self._make_layers = make_layers
        self._cache = cache
        self._batchable = batchable
        self._last_id = n_ids - 1
        self._chunk = chunk
        self._profile = profile
        self._readers: dict[Hashable, _DraftRow] = {}
        self._groups: list[Group] = []

    def odds(self, kind: int) -> float:
        return ODDS

    # --- rows ------------------------------------------------------------------------------

    def open(self, row: Hashable, job: Job) -> None:
        if job.prompt.picture_spans:  # it cannot see pictures
            return
        cursor = self._cache.open(job.prompt, job.namespace, job.cache)
        restored = cursor.restore()
        own = restored_row(self._make_layers(), restored)
        if restored is not None:
            cursor.filled(own)
        self._readers[row] = _DraftRow(job, own, cursor)

    def extend(self, row: Hashable, tokens: Sequence[int]) -> None:
        reader = self._readers.get(row)
        if reader is None:
            return
        # The newest token counts as not consumed in any case: the next draft follows it.
        consumed = reader.draft[: min(reader.n_fed, len(tokens) - 1)]
        for token, expected in zip(tokens, consumed, strict=False):
            if token != expected:
                break
            reader.row.n_tokens += 1
        reader.draft, reader.n_fed = [], 0
        reader.reply.extend(tokens)

    def close(self, row: Hashable) -> None:
        reader = self._readers.pop(row, None)
        if reader is None:
            return
        self._cut(reader.row.group)
        reader.cursor.close(reader.row)
        group = reader.row.group
        if group is not None:
            group.leave([reader.row])
            self._groups = [g for g in self._groups if g.seats]

    def end(self) -> None:
        """The engine is stopping."""
        for row in list(self._readers):
            self.close(row)
        self._cache.close()

    # --- reading ---------------------------------------------------------------------------

    def prepare(self, row: Hashable) -> bool:
        """Read at most another chunk; True once all but the last tokens are read."""
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
        ahead = reader.cursor.advance(own.n_tokens)
        if ahead is not None:
            layers = self._make_layers()
            ahead.fill(layers)
            own.layers, own.n_tokens = layers, ahead.n_tokens
            reader.cursor.filled(own)
        elif reader.cursor.racing:  # nothing waits for a draft, so wait for what is being loaded
            return False
        end = min(own.n_tokens + self._chunk, n_prompt - 1)
        if end > own.n_tokens:
            ids = np.minimum(reader.job.prompt.ids[own.n_tokens : end], self._last_id)
            self._model(mx.array(ids.astype(np.int32))[None], cache=own.layers)
            own.n_tokens = end
            mx.eval([layer.state for layer in own.layers])
            reader.cursor.commit(own)
        return own.n_tokens == n_prompt - 1

    def _join(self, reader: _DraftRow) -> None:
        own = reader.row
        cursor, reader.cursor = reader.cursor, reader.cursor.fork(reader.reply)
        cursor.close(None)
        last = int(reader.job.prompt.ids[-1])
        for group in self._groups:
            if self._batchable and group.has_room_for(own, 1 << 30):
                self._cut(group)
                group.join(own, last)
                break
        else:
            self._groups.append(Group.of_one(own, last, columns=self._profile.columns))

    def _catch_up(self, reader: _DraftRow) -> None:
        """Read what the row took while nothing was drafted for it."""
        own = reader.row
        group = own.group
        assert group is not None
        tokens = reader.text(own.n_tokens, own.n_tokens + MAX_FEED)
        self._feed(group, [tokens if r is own else [] for r in group.seats])
        mx.eval([layer.state for layer in group.layers])
        own.n_tokens += len(tokens)
        self._commit(reader)

    def _commit(self, reader: _DraftRow) -> None:
        """Called after each pass over true tokens: windows forget old ones."""
        if reader.cursor.commit_due(reader.row.n_tokens):
            reader.cursor.commit(reader.row)

    # --- drafting --------------------------------------------------------------------------

    def draft(self, rows: Sequence[Hashable], n_most: int) -> list[Draft]:
        drafts: dict[Hashable, Draft] = {}
        n = min(n_most, MAX_CHAIN)
        ready = [row for row in rows if row in self._readers and n > 0 and self.prepare(row)]
        for group in self._groups:
            asked = [r for r in ready if self._readers[r].row.group is group]
            fresh = [r for r in asked if not self._readers[r].draft]
            if fresh:
                self._draft(group, fresh, n)
            for row in asked:
                tokens = tuple(self._readers[row].draft[:n])
                drafts[row] = Draft(tokens, tuple(range(len(tokens))))
        return [drafts.get(row, NO_DRAFT) for row in rows]

    def _draft(self, group: Group, rows: Sequence[Hashable], n: int) -> None:
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
        for reader in readers.values():
            self._commit(reader)
        active = [1 if f else 0 for f in fed]
        for _ in range(n - 1):
            step = RaggedStep(group.layers, active)
            logits = self._model(tokens[:, None], cache=group.layers)
            step.keep(active)
            tokens = mx.argmax(logits[:, -1], axis=-1)
            chain.append(tokens)
        table = to_host(mx.stack(chain, axis=1))
        for row in rows:
            reader = self._readers[row]
            reader.draft, reader.n_fed = table[reader.row.index], n - 1

    def _feed(self, group: Group, fed: Sequence[Sequence[int]]) -> mx.array:
        """Logits after these tokens of each seat; some seats are fed nothing."""
        self._cut(group)
        lengths = [len(f) for f in fed]
        width = max(lengths)
        if width > 1:
            width = self._profile.shape(width)
        step = RaggedStep(group.layers, lengths, width)
        ids = mx.array([[*f, *[0] * (width - len(f))] for f in fed])
        layers = in_blocks(group.layers, group.columns) if width > 1 else group.layers
        logits: mx.array = self._model(mx.minimum(ids, self._last_id), cache=layers)
        step.keep(lengths)
        return logits

    def _cut(self, group: Group | None) -> None:
        """Drop what the caches hold after each row's true tokens."""
        if group is None:
            return
        group.make_ready()  # its layers are plain after a join, and where only one row is left
        for reader in self._readers.values():
            if reader.row.group is group:
                reader.n_fed = 0
        lengths = [seat.n_tokens for seat in group.seats]
        for layer in leaves(group.layers):
            if isinstance(layer, RaggedCache):
                layer.keep(lengths)
            else:
                layer.trim(int(layer.offset) - lengths[0])


DRAFTER = ModelDrafter
