"""How the model is called: for a chunk of a prompt, for a step of one token a row, for one of several.

A model with a prediction head is called with the hidden states that the head continues from. The head
skips steps of one token: their tokens wait in the group's backlog until its keys are needed.

Owner: the engine thread, through the runner.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import mlx.core as mx

from firn.core.values import Prompt, TokenArray
from firn.models.decode.backlog import HeadBacklog
from firn.models.decode.batch import NO_BACKLOG, Backlog, Group, Row
from firn.models.decode.early_dispatch import dispatch, dispatched_early
from firn.models.decode.execution import Execution
from firn.models.decode.mtp_hidden import HiddenAt, first_hidden
from firn.models.decode.padding import in_blocks
from firn.models.decode.ragged import ALL_COLUMNS, Columns
from firn.models.decode.verify import KeepStates, keep_nothing
from firn.models.model_arguments import IdsOnly, ModelArguments
from firn.models.speculation.mtp import MtpModel


class Forward:
    """A model without a prediction head."""

    def __init__(
        self,
        model: Any,
        arguments: ModelArguments,
        execution: Execution,
        *,
        layers_per_dispatch: int,
    ) -> None:
        """layers_per_dispatch: how many layers of a step of several tokens are dispatched together."""
        self.model = model
        self.arguments = arguments
        self.trace = execution.trace
        self._patches = execution.patches
        self._layers_per_dispatch = layers_per_dispatch

    @property
    def takes_ids_only(self) -> bool:
        """Whether a call needs nothing but token ids."""
        return isinstance(self.arguments, IdsOnly)

    def look_back(self, row: Row, prompt: Prompt) -> None:
        """Called before a restored row is read or decoded further."""

    def backlog(self) -> Backlog:
        """For a new group."""
        return NO_BACKLOG

    def read(
        self, row: Row, prompt: Prompt, end: int, ids: TokenArray, layers: list[Any]
    ) -> mx.array:
        """Logits (1, tokens, vocabulary) of prompt tokens [row.n_tokens, end), then padding.

        ids: those tokens and the padding. layers: the row's, as the model sees them.
        """
        start = row.n_tokens
        arguments = self.arguments.chunk(prompt, start, end) | self._mtp_hidden([row])
        n_padding = start + len(ids) - end
        with self.arguments.reading(layers, prompt, start, end, n_padding=n_padding) as placed:
            logits: mx.array = self.model(
                mx.array(ids.astype("int32"))[None], cache=placed, **arguments
            )
        return logits

    def feed(self, group: Group, tokens: Sequence[int]) -> None:
        """Let the only row of a group consume tokens that it took."""
        row = group.seats[0]
        arguments = self.arguments.step([row.position], len(tokens)) | self._mtp_hidden([row])
        self.model(mx.array([tokens]), cache=self._seen(group), **arguments)

    def step(self, group: Group) -> mx.array:
        """Logits (seats, vocabulary) after the next token of each seat."""
        ids = group.next_tokens
        if _is_dense(group):
            known = self.trace.plain(ids[:, None], group.layers)
            if known is not None:
                return known[:, -1, :]
        return self._step(group, ids)

    def stepped(self, group: Group) -> None:
        """A step of one token was dispatched, and the rows count it."""

    def wide(self, group: Group, ids: mx.array) -> mx.array:
        """Logits (seats, tokens, vocabulary); the device has begun to compute them."""
        n_layers = self._layers_per_dispatch
        dense = _is_dense(group)
        known = self.trace.wide(ids, group.layers, group.columns) if dense else None
        if known is not None:
            dispatch(known, group.layers, n_layers=n_layers)
            return known
        positions = [row.position for row in group.seats]
        arguments = self.arguments.step(positions, ids.shape[1]) | self._mtp_hidden(group.seats)
        layers = self._seen(group, group.columns)
        with dispatched_early(layers, n_layers=n_layers):
            logits: mx.array = self.model(ids, cache=layers, **arguments)
        return logits

    def keeper(self) -> KeepStates:
        """Keeps for each row what a head continues from after the last call, once the row advances."""
        return keep_nothing

    def _step(self, group: Group, ids: mx.array) -> mx.array:
        arguments = self.arguments.step([row.position for row in group.seats])
        logits: mx.array = self.model(ids[:, None], cache=self._seen(group), **arguments)
        return logits[:, -1, :]

    def _seen(self, group: Group, columns: Columns = ALL_COLUMNS) -> list[Any]:
        """The group's caches as the model sees them."""
        layers = in_blocks(group.layers, columns)
        return self.arguments.seen(layers, [row.shift for row in group.seats])

    def _mtp_hidden(self, rows: Sequence[Row]) -> dict[str, Any]:
        """The hidden states that a head continues from, as an argument of the model."""
        return {}


class HeadForward(Forward):
    """A model with a prediction head."""

    model: MtpModel

    @property
    def takes_ids_only(self) -> bool:
        return False

    def look_back(self, row: Row, prompt: Prompt) -> None:
        if row.n_tokens and not row.hidden:
            hidden = self.model.look_back(int(prompt.ids[row.n_tokens - 1]), row.layers)
            row.hidden = [] if hidden is None else [HiddenAt(hidden, 0, 0)]

    def backlog(self) -> Backlog:
        return HeadBacklog(self.model)

    def read(
        self, row: Row, prompt: Prompt, end: int, ids: TokenArray, layers: list[Any]
    ) -> mx.array:
        logits = super().read(row, prompt, end, ids, layers)
        row.hidden = [HiddenAt(self.model.hidden[:, -1:], 0, 0)]
        return logits

    def feed(self, group: Group, tokens: Sequence[int]) -> None:
        super().feed(group, tokens)
        group.seats[0].hidden = [HiddenAt(self.model.hidden, 0, len(tokens) - 1)]

    def stepped(self, group: Group) -> None:
        for i, row in enumerate(group.seats):
            row.hidden = [HiddenAt(self.model.hidden, i, 0)]

    def keeper(self) -> KeepStates:
        return partial(_keep_hidden, self.model.hidden)

    def _step(self, group: Group, ids: mx.array) -> mx.array:
        """Without the head, which reads the token later."""
        arguments = self.arguments.step([row.position for row in group.seats])
        before = self.model.before(group.layers, first_hidden([row.hidden for row in group.seats]))
        logits = self.model.without_head(ids[:, None], self._seen(group), **arguments)
        backlog = group.backlog
        assert isinstance(backlog, HeadBacklog)
        backlog.add(ids, mx.zeros_like(self.model.hidden[:, 0]) if before is None else before)
        if backlog.is_full:
            group.catch_up()
        return logits[:, -1, :]

    def _mtp_hidden(self, rows: Sequence[Row]) -> dict[str, Any]:
        return {"mtp_hidden": first_hidden([row.hidden for row in rows])}


def _keep_hidden(states: mx.array, row: Row, seat: int, n_kept: int) -> None:
    """Record where the states before the row's pending tokens are."""
    if n_kept:
        row.hidden = [HiddenAt(states, seat, n_kept - 1)]
    elif row.hidden:  # taken back: each pending token but the newest was fed
        fed = [HiddenAt(states, seat, k) for k in range(len(row.pending) - 1)]
        row.hidden = [row.hidden[0], *fed]


def forward_of(
    model: Any, arguments: ModelArguments, execution: Execution, *, layers_per_dispatch: int
) -> Forward:
    kind = HeadForward if isinstance(model, MtpModel) else Forward
    return kind(model, arguments, execution, layers_per_dispatch=layers_per_dispatch)


def _is_dense(group: Group) -> bool:
    """Whether every row's cells are its positions, for which a trace takes them."""
    return not any(row.shift for row in group.seats)
