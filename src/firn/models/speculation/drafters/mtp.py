"""Drafts by the model's own prediction head.

The head reads along with the model (see `speculation.mtp`), so it is always ready. A draft is a chain:
the newest token and the hidden state before it give the first drafted token; that one and the
head's own hidden state give the next. The cells that the chain writes to the head's cache are taken
back: the step that verifies the draft writes them again, from the model's hidden states.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import mlx.core as mx

from firn.core.values import Job
from firn.models.decode.batch import Group, Row
from firn.models.decode.mtp_hidden import hidden_of
from firn.models.decode.rewind import RaggedStep
from firn.models.decode.sampling import to_host
from firn.models.speculation.drafters import MAX_CHAIN, NO_DRAFT, Draft, Drafter
from firn.models.speculation.mtp import MtpModel, split

ODDS = 0.6
"""That a drafted token is right, before anything is known."""


class MtpDrafter(Drafter):
    """Its rows are the runner's own. Owner: the engine thread, through the speculation."""

    is_free = False

    def __init__(self, model: MtpModel) -> None:
        self._model = model
        self._rows: set[Hashable] = set()

    def odds(self, kind: int) -> float:
        return ODDS

    def open(self, row: Hashable, job: Job) -> None:
        self._rows.add(row)

    def prepare(self, row: Hashable) -> bool:
        return row in self._rows

    def draft(self, rows: Sequence[Hashable], n_most: int) -> list[Draft]:
        drafts: dict[Hashable, Draft] = {}
        n = min(n_most, MAX_CHAIN)
        live = [r for r in rows if r in self._rows and isinstance(r, Row) and r.group is not None]
        for group in {id(r.group): r.group for r in live if r.group is not None}.values():
            asked = [r for r in live if r.group is group]
            if n > 0:
                drafts |= self._draft(group, asked, n)
        return [drafts.get(row, NO_DRAFT) for row in rows]

    def close(self, row: Hashable) -> None:
        self._rows.discard(row)

    def end(self) -> None:
        self._rows.clear()

    def _draft(self, group: Group, rows: Sequence[Row], n: int) -> dict[Hashable, Draft]:
        group.make_ready()
        head = [split(group.layers)[1]]
        fed = [seat.pending if seat in rows else [] for seat in group.seats]
        lengths = [len(f) for f in fed]
        width = max(lengths)
        ids = mx.array([[*f, *[0] * (width - len(f))] for f in fed])
        hidden = hidden_of([seat.hidden for seat in group.seats], width, like=self._model.hidden)
        step = RaggedStep(head, lengths)
        logits, out = self._model.predict(ids, hidden, head[0])
        seats, last = mx.arange(len(fed)), mx.array([max(k - 1, 0) for k in lengths])
        tokens, state = mx.argmax(logits[seats, last], axis=-1), out[seats, last]
        chain = [tokens]
        active = [min(k, 1) for k in lengths]
        for _ in range(n - 1):
            step.keep(lengths)
            logits, out = self._model.predict(tokens[:, None], state[:, None], head[0])
            tokens, state = mx.argmax(logits[:, -1], axis=-1), out[:, -1]
            chain.append(tokens)
            lengths = [k + a for k, a in zip(lengths, active, strict=True)]
            step.fed = [k + a for k, a in zip(step.fed, [1] * len(fed), strict=True)]
        table = to_host(mx.stack(chain, axis=1))
        step.keep([0] * len(fed))
        return {row: Draft(tuple(table[row.index]), tuple(range(n))) for row in rows}


DRAFTER = MtpDrafter
