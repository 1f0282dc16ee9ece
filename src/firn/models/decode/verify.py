"""One step in which rows consume several tokens: those they took before, and a draft.

    row fed     [pending ...][draft ...]
    picked              p0   p1 ...  pk       each with the row's own noise for its draw
    taken       p0 ... pa, where draft[:a] == picked[:a]: the drafted tokens that were right and one more

A row takes the tokens that it would have picked one by one, so speculation never changes a text. A
row ends at its end token, whatever was drafted after it.

Owner: the engine thread, through a group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import mlx.core as mx

from firn.core.errors import RowInDoubt
from firn.core.events import TokenLogprob
from firn.models.decode.batch import Group, Row, TakenTokens
from firn.models.decode.rewind import RaggedStep, can_be_cut_meanwhile, is_rewindable
from firn.models.decode.sampling import Picker, Picks, as_picked, pick, read_logprobs, to_host

KeepStates = Callable[[Row, int, int], None]
"""Called with a row that has advanced, its seat, and how many of the tokens it was fed it keeps."""


def keep_nothing(row: Row, seat: int, n_kept: int) -> None:
    """No head continues from the model's states."""


@dataclass(frozen=True, slots=True)
class DeviceFeed:
    """What a step was fed, on the device.

    ids: (rows, width), each row's newest token and its draft. begins: how many tokens each row held
    before. n_drafted: how many of each row's ids are drafted. places: (rows, width), the index of
    each position's pick among the step's picks; None: in order.
    """

    ids: mx.array
    begins: mx.array
    n_drafted: mx.array
    places: mx.array | None = None


@dataclass(frozen=True, slots=True)
class Feed:
    """What a step with drafts feeds its rows, and where it picks. The host knows all tokens."""

    rows: tuple[Row, ...]
    drafts: tuple[tuple[int, ...], ...]

    @property
    def lengths(self) -> list[int]:
        return [len(r.pending) + len(d) for r, d in zip(self.rows, self.drafts, strict=True)]

    def ids(self, width: int) -> mx.array:
        """(rows, width): each row's pending tokens, its draft, and padding."""
        fed = [(*r.pending, *draft) for r, draft in zip(self.rows, self.drafts, strict=True)]
        return mx.array([[*f, *[0] * (width - len(f))] for f in fed])

    def pickers(self) -> tuple[tuple[Picker, ...], ...]:
        """By row: one for the token after its last pending one, and one after each drafted one."""
        return tuple(
            tuple(r.picker.ahead(draft)) if r.picker else ()
            for r, draft in zip(self.rows, self.drafts, strict=True)
        )

    def places(self, width: int) -> list[int]:
        """Where the pickers pick, in the step's flattened positions."""
        return [
            i * width + len(r.pending) - 1 + j
            for i, (r, draft) in enumerate(zip(self.rows, self.drafts, strict=True))
            for j in range(len(draft) + 1)
        ]

    def pick(
        self,
        logits: mx.array,
        pickers: Sequence[Sequence[Picker]],
        *,
        allowed: mx.array | None = None,
    ) -> Picks:
        """logits: (rows, width, vocabulary)."""
        width, n_vocab = logits.shape[1:]
        logits = logits.reshape(-1, n_vocab)[mx.array(self.places(width))]
        flat = [p for each in pickers for p in each]
        return pick(logits, flat, self.forced(), allowed=allowed)

    def forced(self) -> list[int | None]:
        """For each of those places: the forced token, if there is one."""
        return [
            r.forced.get(r.n_tokens + len(r.pending) + j) if r.forced else None
            for r, draft in zip(self.rows, self.drafts, strict=True)
            for j in range(len(draft) + 1)
        ]


@dataclass(eq=False, slots=True)
class Verification:
    """A dispatched step with drafts, until it is collected. `read` settles it."""

    group: Group
    rows: tuple[Row, ...]
    drafts: tuple[tuple[int, ...], ...]
    step: RaggedStep | None
    picks: Picks
    pickers: tuple[tuple[Picker, ...], ...]
    """By row: the picker of each of its positions."""
    width: int
    keep: KeepStates = keep_nothing
    """Keeps the states that a prediction head continues from."""
    fed: DeviceFeed | None = None
    """For a step that is dispatched before this one is read; None: no such step is possible."""
    is_new: bool = False
    """It takes longer than others of its width, because it has a new shape."""
    is_settled: bool = False
    is_counted: bool = False
    """The speculation has counted it."""
    fault: Exception | None = None
    _taken: list[TakenTokens] = field(default_factory=list)

    @property
    def n_unread(self) -> int:
        if self.fault is not None:
            raise RowInDoubt("a decode step of this row's group has failed")
        return 0 if self.is_settled else self.width

    @property
    def may_stay_in_flight(self) -> bool:
        return can_be_cut_meanwhile(self.group.layers)

    def sync(self) -> None:
        with suppress(Exception):
            self.read()

    def read(self) -> list[TakenTokens]:
        """Wait for the tokens and take back wrong drafts."""
        if not self.is_settled:
            self.is_settled = True
            try:
                self._settle()
            except Exception as e:
                self.fault = e
        if self.fault is not None:
            raise self.fault
        return self._taken

    def _settle(self) -> None:
        picked = to_host(self.picks.tokens)
        flat = [p for each in self.pickers for p in each]
        logprobs = read_logprobs(self.picks, flat)
        all_or_none = not is_rewindable(self.group.layers)
        kept, at = [], 0
        for i, (row, draft) in enumerate(zip(self.rows, self.drafts, strict=True)):
            pickers = self.pickers[i]
            n = len(pickers)
            taken = taken_by(row, draft, picked[at : at + n], logprobs[at : at + n])
            at += n
            newest = pickers[taken.n_right]
            kept.append(advance(row, taken, newest, all_or_none=all_or_none))
            self.keep(row, i, kept[-1])
            self._taken.append(taken)
        self._end(kept)

    def _end(self, kept: Sequence[int]) -> None:
        """kept: for each row, how many of the tokens it was fed it keeps."""
        assert self.step is not None
        self.step.keep(kept)
        self.group.next_tokens = as_picked([row.pending[-1] for row in self.rows])
        self.group.width = max(row.n_tokens for row in self.rows)


def taken_by(
    row: Row, draft: Sequence[int], picked: Sequence[int], logprobs: Sequence[TokenLogprob | None]
) -> TakenTokens:
    n = 0
    while n < len(draft) and picked[n] == draft[n] and picked[n] not in row.ends:
        n += 1
    return TakenTokens(row, tuple(picked[: n + 1]), tuple(logprobs[: n + 1]), len(draft), n)


def advance(row: Row, taken: TakenTokens, newest: Picker, *, all_or_none: bool) -> int:
    """Advance a row by what it took. Returns how many of the tokens it was fed stay in its caches.

    newest: the picker of the last token that it took. all_or_none: its caches cannot be rewound, so
    one wrong token takes back the whole step.
    """
    assert row.picker is not None
    row.picker.catch_up(newest, len(taken.tokens))
    if row.picker.constraint is not None:
        row.picker.constraint.take(taken.tokens)
    first = row.n_tokens + len(row.pending)
    for position in range(first, first + len(taken.tokens)):
        row.forced.pop(position, None)
    if all_or_none and taken.n_right < taken.n_drafted:
        row.pending += taken.tokens
        return 0
    n_kept = len(row.pending) + taken.n_right
    row.n_tokens += n_kept
    row.pending = [taken.tokens[-1]]
    return n_kept
