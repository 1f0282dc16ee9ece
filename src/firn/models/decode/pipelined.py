"""Steps with drafts that are dispatched before the previous step is read.

A row's next input depends on how many of its drafted tokens are right. The host learns that late:
it would read the tokens, draft, build the step and dispatch it while the device idles. But the
device can count the right tokens itself, and a drafter's text continues past what a step tries:

    text     t0 t1 t2 t3 t4 t5 ...     the draft after the newest token that the host knows
    step     .  t0 t1 t2               picked: t0 t1 x .     two are right, and x is the row's own
    next     x  t3 t4 t5               the text continues, with one token replaced

So the next step is the same for all outcomes except for one number per row, an array like any
other. It may be wider or narrower than the first. By the time the first step is read, the second is
being computed. The host then knows what the second must have been fed, and compares that with what
it was fed when it reads its tokens. A row that ends takes nothing from the second step.

Only for steps that need not be built, and rows whose picks depend on nothing but logits, seed and
position: no grammar, no penalties, no logit bias. Nor where positions are ahead of token counts: a
trace takes one for the other.

Owner: the engine thread, through the runner.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from firn.models.decode.batch import Group, Row
from firn.models.decode.ragged import RaggedKVCache
from firn.models.decode.rewind import RaggedStep
from firn.models.decode.sampling import Picker, pick, read_logprobs, to_host
from firn.models.decode.step_trace import NoStepTrace, RowLengths, StepTrace
from firn.models.decode.verify import DeviceFeed, Verification, advance, taken_by
from firn.models.layers import kind

log = logging.getLogger("firn.models")


@dataclass(frozen=True, slots=True)
class DraftsAhead:
    """Drafts for a step that follows an unread one.

    width: of the next step. texts: for each seat, the draft after the newest token that the host
    knows, of at most the length that the step in flight and the next one need; it may be empty.
    """

    width: int
    texts: tuple[tuple[int, ...], ...]


def device_feed(
    rows: Sequence[Row], drafts: Sequence[Sequence[int]], ids: mx.array, layers: Sequence[Any]
) -> DeviceFeed | None:
    """What a step about to be dispatched is fed; None: no step can follow it before it is read."""
    if any(len(row.pending) != 1 or row.shift or not _is_free(row.picker) for row in rows):
        return None
    first = layers[0]
    if isinstance(first, RaggedKVCache):
        begins = first.offset
    elif kind(first) == "KVCache":
        begins = mx.array([first.offset])
    else:
        return None
    places, at, width = [], 0, ids.shape[1]
    for draft in drafts:
        places.append([at + min(j, len(draft)) for j in range(width)])
        at += len(draft) + 1
    n_drafted = mx.array([len(draft) for draft in drafts])
    return DeviceFeed(ids, begins, n_drafted, mx.array(places))


def _is_free(picker: Picker | None) -> bool:
    """Whether its picks depend on nothing but logits, seed and position."""
    return picker is not None and picker.constraint is None and not picker.reshapes


class PipelineFault(RuntimeError):
    """The device fed a row tokens that differ from its text and draft."""


class Pipeline:
    """Dispatches steps with drafts before the step before them is read, until one of them fails."""

    def __init__(self, trace: StepTrace) -> None:
        self._trace = trace

    def feed(
        self, rows: Sequence[Row], drafts: Sequence[Sequence[int]], ids: mx.array, layers: Any
    ) -> DeviceFeed | None:
        """What a step about to be dispatched is fed; None: none can follow it unread."""
        return device_feed(rows, drafts, ids, layers) if self._trace.is_deep else None

    def width_of_unread(self, group: Group) -> int:
        """The width of the group's newest step, if another may follow before it is read; else 0."""
        can = self._trace.is_deep and _can_be_followed(group)
        return group.unread[-1].width if can else 0

    def launch(self, group: Group, drafts: DraftsAhead) -> PipelinedVerification | None:
        """Dispatch the step after the newest one. None: nothing was done, as its shape has no trace."""
        try:
            step = _follow(group, drafts, self._trace)
            if step is None:
                return None
            mx.async_eval(step.picks.arrays, step.readback)
        except Exception:
            self.stop()
            raise
        group.tick()
        return step

    def stop(self) -> None:
        if self._trace.is_deep:
            log.warning("from now on each step with drafts is read before the next is dispatched")
        self._trace = NoStepTrace()


def _can_be_followed(group: Group) -> bool:
    """Whether the group's newest step may be followed by another before it is read."""
    last = group.unread[-1] if group.unread else None
    return (
        isinstance(last, Verification)
        and last.fed is not None
        and not last.is_settled
        and last.rows == tuple(group.seats)
        and not any(_has_ended(row) for row in last.rows)
        and all(step.is_counted for step in group.unread[:-1])
        and group.n_steps_until_compact != 1  # seats are about to be removed
    )


def _follow(group: Group, follow_up: DraftsAhead, trace: StepTrace) -> PipelinedVerification | None:
    """Build the step after the newest one. None: nothing was done, as its shape has no trace."""
    last, width, texts = group.unread[-1], follow_up.width, follow_up.texts
    assert isinstance(last, Verification)
    assert last.fed is not None
    fed, n_right = next_feed(last.picks.tokens, last.fed, texts, width)
    # If the step before the last was read since, the layers do not count what the last one wrote.
    lengths = RowLengths(
        fed.begins, n_more=last.width if isinstance(last, PipelinedVerification) else 0
    )
    logits = trace.wide(fed.ids, group.layers, group.columns, lengths=lengths)
    if logits is None:
        return None
    rows = last.rows
    # The positions of this step's picks, counted from the first pick of the last step.
    at = n_right[:, None] + 1 + mx.arange(width)
    pickers = [row.picker for row in rows if row.picker for _ in range(width)]
    logits = logits.reshape(-1, logits.shape[-1])
    forced = _forced(rows, at, n_most=last.width + width)
    picks = pick(logits, pickers, forced, keys=_keys(rows, at))
    arrays = (picks.tokens, fed.ids, fed.begins)
    readback = mx.concatenate([a.reshape(-1).astype(mx.int32) for a in arrays])
    more: dict[str, Any] = {"fed": fed, "follows": last, "texts": texts, "readback": readback}
    more["is_new"] = trace.had_new_shape()
    return PipelinedVerification(group, rows, (), None, picks, (), width, **more)


def next_feed(
    tokens: mx.array, fed: DeviceFeed, texts: Sequence[Sequence[int]], width: int
) -> tuple[DeviceFeed, mx.array]:
    """What each row is fed in a step of this width, after one that picked these tokens; and how
    many of that one's drafted tokens were right.

    texts: for each row, the draft after the newest token that the host knows; it may be empty.
    """
    n_rows, last_width = fed.ids.shape
    in_rows = tokens.reshape(n_rows, last_width) if fed.places is None else tokens[fed.places]
    picked = in_rows.astype(fed.ids.dtype)
    is_drafted = mx.arange(last_width - 1) < fed.n_drafted[:, None]
    n_right = _n_leading_true((picked[:, :-1] == fed.ids[:, 1:]) & is_drafted)
    newest = mx.take_along_axis(picked, n_right[:, None], axis=1)
    n_text = last_width + width - 1
    padded = [[*text[:n_text], *[-1] * (n_text - len(text))] for text in texts]
    at = n_right[:, None] + 1 + mx.arange(width - 1)
    draft = mx.take_along_axis(mx.array(padded), at, axis=1)
    ids = mx.concatenate([newest, mx.maximum(draft, 0).astype(newest.dtype)], axis=1)
    return DeviceFeed(ids, fed.begins + 1 + n_right, _n_leading_true(draft >= 0)), n_right


def _n_leading_true(holds: mx.array) -> mx.array:
    """How many leading values of each row are true."""
    n = holds.shape[1]
    return mx.min(mx.where(holds, n, mx.arange(n)), axis=1)


def _forced(rows: Sequence[Row], at: mx.array, *, n_most: int) -> mx.array | None:
    """The forced token of each pick of the step, or -1. None: nothing is forced.

    n_most: how many picks this step and the last one have together, at most.
    """
    if not any(row.forced for row in rows):
        return None
    table = [[row.forced.get(row.n_tokens + 1 + j, -1) for j in range(n_most)] for row in rows]
    return mx.take_along_axis(mx.array(table), at, axis=1).reshape(-1)


def _keys(rows: Sequence[Row], at: mx.array) -> mx.array | None:
    """The random key of each pick, as if the tokens before it were drawn one by one. None: all
    picks are greedy."""
    if all(row.picker.greedy for row in rows if row.picker):
        return None
    streams, drawn = zip(*(row.picker.stream for row in rows if row.picker), strict=True)
    n_drawn = mx.array(drawn, dtype=mx.uint32)[:, None] + 1 + at.astype(mx.uint32)
    stream = mx.broadcast_to(mx.array(streams, dtype=mx.uint32)[:, None], n_drawn.shape)
    return mx.stack([stream, n_drawn], axis=-1).reshape(-1, 2)


@dataclass(eq=False, slots=True)
class PipelinedVerification(Verification):
    """A step dispatched before `follows` was read; until that is read, the host lacks its input.

    follows: None once this step is read, or each step would keep all earlier ones alive. readback: the
    picks, what the device fed the rows and where it began, in one array to read.
    """

    follows: Verification | None = field(kw_only=True)
    texts: tuple[Sequence[int], ...] = field(kw_only=True)
    readback: mx.array = field(kw_only=True)

    def _settle(self) -> None:
        follows, self.follows = self.follows, None
        assert follows is not None
        taken_before = {taken.row: taken for taken in follows.read()}
        width, n_rows = self.width, len(self.rows)
        readback = to_host(self.readback)
        picked, ids, begins = (readback[i * n_rows * width :][: n_rows * width] for i in range(3))
        self.step = RaggedStep(self.group.layers, [width] * n_rows, width, follows=follows.step)
        flat = [row.picker for row in self.rows if row.picker for _ in range(width)]
        logprobs = read_logprobs(self.picks, flat)
        kept = []
        for i, (row, text) in enumerate(zip(self.rows, self.texts, strict=True)):
            if _has_ended(row):
                kept.append(0)
                continue
            n, at = len(taken_before[row].tokens), i * width
            draft = tuple(text[n : n + width - 1])
            assert row.picker is not None
            mine = slice(at, at + len(draft) + 1)
            is_so = ids[mine] == [row.pending[-1], *draft] and begins[i] == row.n_tokens
            if row.group is self.group and not is_so:
                raise PipelineFault(
                    "the device fed a row tokens that differ from its text and draft"
                )
            taken = taken_by(row, draft, picked[mine], logprobs[mine])
            kept.append(advance(row, taken, row.picker, all_or_none=False))
            self._taken.append(taken)
        self._end(kept)


def _has_ended(row: Row) -> bool:
    """Whether the engine is about to drop it. A vacant seat's row has no end token and no limit."""
    n_tokens = row.n_tokens + len(row.pending)
    return row.pending[-1] in row.ends or 0 < row.limit <= n_tokens
