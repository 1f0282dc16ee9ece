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

import contextlib
import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import BatchKVCache

from firn.core.ports import Restored
from firn.core.values import Sampling
from firn.models.carry import HiddenAt
from firn.models.ragged import ALL_COLUMNS, Columns, RaggedCache
from firn.models.rewind import plain, ready
from firn.models.sampling import Picker, Picks, PromptScores, as_picked, read_logprobs, to_host
from firn.models.verify import TakenTokens, Verification

if TYPE_CHECKING:
    from firn.models.backlog import HeadBacklog

BUFFER_TOKENS = 256
"""How many tokens mlx-lm's caches grow by."""
MAX_WASTE = 2.0
"""A group is padded to its longest row: it holds at most this many cells for each one in use."""
SLACK_TOKENS = 2048
"""...but short rows always share a group: padding to this length costs less than a second step."""
MAX_PADDING_TOKENS = 1 << 20
"""...as long as there is memory for the padding: cells that rows in one group do not use."""
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
    shift: how far rotary positions are ahead of token counts, after the prompt's pictures.
    gap: the same for skipped parts of the prompt, which n_tokens does not count.
    prompt_scores: those of the chunk dispatched last, if requested.
    """

    layers: list[Any]
    n_tokens: int = 0
    shift: int = 0
    gap: int = 0
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

    @property
    def live_layers(self) -> list[Any]:
        """Its caches, or its group's if it is in one; all of them hold the same tokens."""
        if self.group is None:
            return self.layers
        self.group.catch_up()
        return self.group.layers

    @property
    def is_live(self) -> bool:
        return bool(self.group.layers if self.group else self.layers)


@dataclass(eq=False, slots=True)
class PlainStep:
    """A dispatched step of one token a row, until it is collected."""

    rows: tuple[Row, ...]
    picks: Picks
    is_pipelined: bool = False
    """It was dispatched while the step before it was in flight."""
    is_new: bool = False
    """It took longer than others because its shape was new."""
    is_counted: bool = False
    """The speculation has learnt from it."""
    _taken: list[TakenTokens] | None = None

    @property
    def width(self) -> int:
        return 1

    def read(self) -> list[TakenTokens]:
        """One token per row. The first call waits for them and advances the rows' grammars."""
        if self._taken is None:
            tokens = to_host(self.picks.tokens)
            logprobs = read_logprobs(self.picks, [r.picker for r in self.rows if r.picker])
            self._taken = []
            for row, token, logprob in zip(self.rows, tokens, logprobs, strict=True):
                row.pending = [token]
                if row.picker and row.picker.constraint:
                    row.picker.constraint.take([token])
                self._taken.append(TakenTokens(row, (token,), (logprob,)))
        return self._taken


@dataclass(eq=False)
class Group:
    seats: list[Row]
    """The row in each place of the batch; a vacant place holds a row that belongs to no request."""
    layers: list[Any]
    next_tokens: mx.array
    """The next token of every seat; may still be computing."""
    unread: list[PlainStep | Verification] = field(default_factory=list)
    """Steps that the engine has not collected. Drafters and grammars may already have read them."""
    width: int = 0
    """How many tokens the caches of a seat hold, padding included."""
    is_ready: bool = False
    """Whether the caches are of classes whose rows can be rewound one by one: see `rewind`."""
    n_steps_until_compact: int = 0
    """Steps until vacant seats are removed."""
    columns: Columns = ALL_COLUMNS
    """The cache columns that its steps of several tokens see."""
    backlog: HeadBacklog | None = None
    """Tokens that the model's prediction head has not read yet, if it has one."""

    @classmethod
    def of_one(
        cls,
        row: Row,
        token: int,
        *,
        columns: Columns = ALL_COLUMNS,
        backlog: HeadBacklog | None = None,
    ) -> Group:
        group = cls([row], row.layers, as_picked([token]), columns=columns, backlog=backlog)
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
        self.settle()
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
    def has_step_in_flight(self) -> bool:
        """Whether a step was dispatched whose tokens have not been read."""
        return any(not step.is_counted for step in self.unread)

    @property
    def used_nbytes(self) -> int:
        """Bytes of its caches, without the share of vacant seats."""
        nbytes = sum(int(layer.nbytes) for layer in self.layers)
        return nbytes * len(self.rows) // len(self.seats)

    def settle(self) -> None:
        """Finish a step with drafts before anything else happens to its rows.

        A fault of the step is raised when it is collected, not for the row that joins or leaves.
        """
        for step in self.unread:
            if isinstance(step, Verification):
                with contextlib.suppress(Exception):
                    step.read()

    def catch_up(self) -> None:
        """Make all layers hold the same tokens: a prediction head skips steps without drafts."""
        if self.backlog is not None and self.layers:
            self.backlog.read(self.layers)

    def make_ready(self) -> None:
        """Prepare the caches for a step with drafts."""
        self.catch_up()
        if not self.is_ready:
            self.layers = ready(self.layers, self.columns)
            self.is_ready = True

    def leave(self, gone: Sequence[Row]) -> None:
        self.settle()
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
    return Row([], row.n_tokens, row.shift, row.gap, greedy, pending=pending)


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
    row = Row(layers, restored.n_tokens)
    restored.filled(row)
    return row


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
