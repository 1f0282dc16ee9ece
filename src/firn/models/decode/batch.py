"""Rows and the groups they decode in.

A `Row` is one sequence's live state: one layer cache per model layer, as mlx-lm made them. A `Group`
is a set of rows that take their decode steps together, on mlx-lm's batched cache classes. A group of
one keeps the plain classes (no padding, no mask), so a lone request pays nothing for batching, and a
model whose layers cannot batch is simply served in groups of one.

A row that leaves a larger group leaves a vacant seat, and the next row to join is written into it:
removing or adding a seat would copy the caches of all rows. While more rows are about to join, a group
that grows doubles its seats.

Owner: the engine thread, through the runner.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import BatchKVCache

from firn.core.errors import FirnError
from firn.core.events import TokenLogprob
from firn.core.ports import At, Restored, RowView
from firn.core.values import Sampling
from firn.models.decode.mtp_hidden import HiddenAt
from firn.models.decode.ragged import ALL_COLUMNS, Columns, RaggedCache
from firn.models.decode.rewind import plain, ready
from firn.models.decode.sampling import (
    Picker,
    PromptScores,
    as_picked,
)

BUFFER_TOKENS = 256
"""How many tokens mlx-lm's caches grow by."""
MAX_WASTE = 2.0
"""A group is padded to its longest row: it holds at most this many cells for each one in use."""
SLACK_TOKENS = 2048
"""Rows up to this length always share a group: padding to it costs less than a second step."""
MAX_PADDING_TOKENS = 1 << 20
"""Such rows share a group while its unused cells are at most this many tokens: they take memory."""
MAX_VACANT = 0.5
"""Share of a group's seats that may be vacant: each of them is computed for nothing."""
VACANT_STEPS = 16
"""How many steps a vacant seat waits for a row."""
MARGIN_FACTOR = 5
"""Twice the cost of copying a token's cells, relative to attending to them: see `_margin`."""


@dataclass(eq=False)
class Row:
    """One sequence on the device.

    layers: its caches while it is alone; empty once it is in a group.
    n_tokens: how many tokens the caches have consumed (decode steps in flight included).
    alone: it must not share a group.
    forced: tokens that the sampler does not choose, by position.
    pending: tokens that are known but not consumed. Only the newest, unless a step was taken back
    or the row has just joined; stale while steps without drafts are in flight.
    hidden: the states before each pending token, if the model has a prediction head.
    ends: tokens that end it. limit: how many tokens it may have in all, including the prompt's.
    shift: how far rotary positions are ahead of token counts after the prompt: see `ModelArguments`.
    prompt_scores: those of the chunk dispatched last, if requested.
    """

    layers: list[Any]
    n_tokens: int = 0
    shift: int = 0
    picker: Picker | None = None
    group: Group | None = None
    alone: bool = False
    forced: dict[int, int] = field(default_factory=dict)
    pending: list[int] = field(default_factory=list)
    hidden: list[HiddenAt] = field(default_factory=list)
    ends: frozenset[int] = frozenset()
    limit: int = 0
    prompt_scores: PromptScores | None = None

    @property
    def index(self) -> int:
        return self.group.seats.index(self) if self.group else 0

    def view(self) -> RowView:
        """Its caches, or its group's if it is in one; all of them hold the same tokens."""
        group = self.group
        if group is None:
            return RowView(self.layers, At(0, self.n_tokens))
        group.catch_up()
        return RowView(group.layers, At(self.index, self.n_tokens, group.n_unread))

    @property
    def position(self) -> int:
        """The rotary position of its next token."""
        return self.n_tokens + self.shift

    @property
    def is_live(self) -> bool:
        return bool(self.group.layers if self.group else self.layers)


@dataclass(frozen=True, slots=True)
class TakenTokens:
    """What one row took in a step. n_drafted: how many tokens were drafted for it. n_right: how
    many of those were right."""

    row: Row
    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprob | None, ...]
    n_drafted: int = 0
    n_right: int = 0

    @property
    def fault(self) -> FirnError | None:
        """Why the row cannot continue, if its grammar has failed."""
        assert self.row.picker is not None
        return self.row.picker.fault


class StepInFlight(Protocol):
    """A dispatched step of a group, until it is collected.

    rows: one for each seat. width: tokens of each row. is_counted: the speculation has learnt from it.
    is_new: it took longer than others, because its shape was new.
    """

    rows: tuple[Row, ...]
    is_new: bool
    is_counted: bool

    @property
    def width(self) -> int: ...

    @property
    def n_unread(self) -> int:
        """The most tokens that it has fed a row and may take back. Raises RowInDoubt if it has failed:
        how many it took back is not known."""
        ...

    @property
    def may_stay_in_flight(self) -> bool:
        """Whether the engine may continue with its rows before this is read."""
        ...

    def read(self) -> list[TakenTokens]:
        """Wait for its tokens. Idempotent: a fault is raised again by every call."""
        ...

    def sync(self) -> None:
        """Finish what it may take back, before anything else happens to its rows. A fault is raised
        when it is read, not here."""
        ...


class Backlog(Protocol):
    """Tokens that a group's rows have consumed and some of its layers have not read yet."""

    def read(self, layers: list[Any]) -> None:
        """Let those layers catch up."""
        ...


class NoBacklog:
    """All layers read along."""

    def read(self, layers: list[Any]) -> None:
        pass


NO_BACKLOG = NoBacklog()


@dataclass(eq=False)
class Group:
    seats: list[Row]
    """The row in each place of the batch; a vacant place holds a row that belongs to no request."""
    layers: list[Any]
    next_tokens: mx.array
    """The next token of every seat; may still be computing."""
    unread: list[StepInFlight] = field(default_factory=list)
    """Steps that the engine has not collected. Drafters and grammars may already have read them."""
    width: int = 0
    """How many tokens the caches of a seat hold, padding included."""
    is_ready: bool = False
    """Whether the caches are of classes whose rows can be rewound one by one: see `rewind`."""
    n_steps_until_compact: int = 0
    """Steps until vacant seats are removed."""
    columns: Columns = ALL_COLUMNS
    """The cache columns that its steps of several tokens see."""
    backlog: Backlog = field(default_factory=NoBacklog)

    @classmethod
    def of_one(
        cls,
        row: Row,
        token: int,
        *,
        columns: Columns = ALL_COLUMNS,
        backlog: Backlog = NO_BACKLOG,
    ) -> Group:
        group = cls(
            [row],
            row.layers,
            as_picked([token]),
            columns=columns,
            backlog=backlog,
        )
        group.width = row.n_tokens
        row.layers, row.group, row.pending = [], group, [token]
        return group

    @property
    def rows(self) -> list[Row]:
        return [r for r in self.seats if r.group is self]

    def has_room_for(self, row: Row, limit: int, *, max_padding: int = MAX_PADDING_TOKENS) -> bool:
        rows = self.rows
        if len(rows) >= limit or row.alone or rows[0].alone:
            return False
        lengths = [r.n_tokens for r in rows] + [row.n_tokens]
        # Merging turns an empty cache into zeros, which not every model treats as empty.
        if 0 in lengths:
            return False
        padded, used = max(lengths) * len(lengths), sum(lengths)
        if max(lengths) <= SLACK_TOKENS and padded - used <= max_padding:
            return True
        return padded <= MAX_WASTE * used

    def join(self, row: Row, token: int, *, n_seats: int = 1) -> None:
        """Give the row a seat. n_seats: how many to add at most, for this row and later ones."""
        self.sync()
        self.catch_up()
        seat = next((i for i, r in enumerate(self.seats) if r.group is not self), None)
        if seat is not None:
            self._seat(row, token, seat)
        else:
            self._append(row, token, max(min(n_seats, len(self.seats)), 1))
        row.layers, row.group, row.pending = [], self, [token]
        self.width = max(self.width, row.n_tokens)
        if self.width > self._n_longest + _margin(self._n_longest):
            self._compact()

    @property
    def _n_longest(self) -> int:
        return max(r.n_tokens for r in self.rows)

    def _seat(self, row: Row, token: int, seat: int) -> None:
        for mine, other in zip(self.layers, row.layers, strict=True):
            place(mine, other, seat)
        before, after = self.next_tokens[:seat], self.next_tokens[seat + 1 :]
        self.next_tokens = mx.concatenate([before, as_picked([token]), after])
        self.seats[seat] = row

    def _append(self, row: Row, token: int, n_seats: int) -> None:
        """Add seats for this row and the next ones; until those join, their seats hold its past."""
        if len(self.seats) == 1:
            pairs = zip(map(plain, self.layers), row.layers, strict=True)
            self.layers = [type(a).merge([a, *[b] * n_seats]) for a, b in pairs]
            self.is_ready = False
        else:
            for mine, other in zip(self.layers, row.layers, strict=True):
                mine.extend(type(other).merge([other] * n_seats))
        self.next_tokens = mx.concatenate([self.next_tokens, as_picked([token] * n_seats)])
        self.seats += [row, *(_vacancy(row) for _ in range(n_seats - 1))]
        if n_seats > 1:
            self.n_steps_until_compact = VACANT_STEPS

    @property
    def n_unread(self) -> int:
        """The most tokens that its steps have fed a row and may take back. Raises RowInDoubt if one of
        them has failed."""
        return sum(step.n_unread for step in self.unread)

    @property
    def has_step_in_flight(self) -> bool:
        """Whether a step was dispatched whose tokens have not been read."""
        return any(not step.is_counted for step in self.unread)

    @property
    def used_nbytes(self) -> int:
        """Bytes of its caches, without the share of vacant seats."""
        nbytes = sum(int(layer.nbytes) for layer in self.layers)
        return nbytes * len(self.rows) // len(self.seats)

    def sync(self) -> None:
        """Finish steps with drafts before anything else happens to its rows."""
        for step in self.unread:
            step.sync()

    def catch_up(self) -> None:
        """Make all layers hold the same tokens: a prediction head skips steps without drafts."""
        if self.layers:
            self.backlog.read(self.layers)

    def make_ready(self) -> None:
        """Prepare the caches for a step with drafts."""
        self.catch_up()
        if not self.is_ready:
            self.layers = ready(self.layers, self.columns)
            self.is_ready = True

    def leave(self, gone: Sequence[Row]) -> None:
        self.sync()
        for row in gone:
            if row.group is self:
                self.seats[row.index] = _vacancy(row)
                row.group = None
        n_rows = len(self.rows)
        if not n_rows:
            self.seats, self.layers = [], []
        elif n_rows < (1 - MAX_VACANT) * len(self.seats):
            self._compact()
        else:
            self.n_steps_until_compact = VACANT_STEPS

    def tick(self) -> None:
        """Called before each step: counts it, and removes seats that stayed vacant for too long."""
        self.width += 1
        if self.n_steps_until_compact:
            self.n_steps_until_compact -= 1
            if not self.n_steps_until_compact and len(self.rows) < len(self.seats):
                self._compact()

    def _compact(self) -> None:
        """Remove the vacant seats and the padding that no row needs."""
        self.catch_up()
        self.n_steps_until_compact = 0
        self.width = self._n_longest
        keep = [i for i, r in enumerate(self.seats) if r.group is self]
        self.seats = [self.seats[i] for i in keep]
        self.next_tokens = self.next_tokens[mx.array(keep)]
        for layer in self.layers:
            layer.filter(keep)
        if len(keep) == 1:
            self.layers = [single_row_cache(layer) for layer in self.layers]
            self.is_ready = False


def _margin(n_longest: int) -> int:
    """How many columns may be padding in every row, once the longest row has left.

    Such padding grows by a column per step, and every step reads it; removing it copies the whole
    width. The total cost is lowest if it is removed at sqrt(2 * width * copy / read) columns.
    """
    return math.isqrt(MARGIN_FACTOR * n_longest)


def _vacancy(row: Row) -> Row:
    """A row for a vacant seat: it decodes greedily like the others; its tokens are discarded."""
    greedy = Picker(
        Sampling(temperature=0.0),
        choice=0,
        vocab_size=0,
        prompt=np.zeros(0, dtype=np.int64),
        top_logprobs=None,
    )
    pending = row.pending[-1:]
    return Row([], row.n_tokens, row.shift, greedy, pending=pending)


def place(layer: Any, other: Any, seat: int) -> None:
    """Write the plain cache `other` over one seat of a batched one."""
    if hasattr(layer, "caches"):
        for mine, theirs in zip(layer.caches, other.caches, strict=True):
            place(mine, theirs, seat)
    elif isinstance(layer, RaggedCache):
        layer.place(other, seat)
    elif type(layer) is BatchKVCache and other.size() <= layer.size():
        end, n = layer.size(), other.size()
        layer.keys[seat : seat + 1, :, end - n : end] = other.keys[..., :n, :]
        layer.values[seat : seat + 1, :, end - n : end] = other.values[..., :n, :]
        layer.left_padding[seat], layer.offset[seat] = end - n, n
    else:  # append it, then move it into the seat
        n_seats = _n_seats(layer)
        layer.extend(type(other).merge([other]))
        layer.filter([n_seats if i == seat else i for i in range(n_seats)])


def _n_seats(layer: Any) -> int:
    if hasattr(layer, "cache"):  # ArraysCache
        return int(layer.batch_size)
    return len(layer.offset)


def single_row_cache(layer: Any) -> Any:
    """The plain cache of a batched one that has a single row left."""
    if hasattr(layer, "caches"):
        layer.caches = tuple(single_row_cache(c) for c in layer.caches)
        return layer
    if hasattr(layer, "cache"):  # ArraysCache is its own batched class
        layer.left_padding = layer.lengths = None
        return layer
    return layer.extract(0)


def restored_row(layers: list[Any], restored: Restored | None) -> Row:
    """A new row, empty or with a restored past."""
    if restored is None:
        return Row(layers)
    restored.fill(layers)
    return Row(layers, restored.n_tokens)


def fork(row: Row) -> Row:
    """A second row with the same past. Arrays are shared until one of the two writes."""
    return Row(copy.deepcopy(row.layers), row.n_tokens, hidden=list(row.hidden))


def why_not_batchable(layers: Sequence[Any]) -> str | None:
    """Why rows of these caches cannot share a group; None if they can."""
    for layer in layers:
        if hasattr(layer, "caches"):
            why = why_not_batchable(layer.caches)
            if why:
                return why
            continue
        if getattr(layer, "keep", 0):
            return f"{type(layer).__name__} keeps its first {layer.keep} tokens"
        if not hasattr(type(layer), "merge"):
            return f"{type(layer).__name__} has no batched form in mlx-lm"
    return None
