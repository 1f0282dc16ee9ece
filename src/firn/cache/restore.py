"""Where a prompt resumes, and with what: a `StoredPrefix`, of which the runner makes a row.

Records that memory has, or that were loaded for the request, are copied into the layers of a new row; or
the parked row of the conversation's last turn is taken over as it is.

    resume -> StoredPrefix -> (the runner fills a row) -> filled

Owner: the engine thread, through the prefix cache.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

from firn.cache.arrays.payload import Payload, Views
from firn.cache.cursor import CacheCursor, Resuming, WindowPiece
from firn.cache.layout import Layout
from firn.cache.memory.parking import Parking
from firn.cache.memory.rows import RowPages, Slab
from firn.cache.parts import Part
from firn.cache.planning.match import MEMORY, NOTHING, Match, Segment, last_match
from firn.cache.planning.reasons import why_not_more
from firn.cache.records import Records
from firn.cache.tree import Node, Record
from firn.core.events import Admitted
from firn.core.ports import LayerCache, LiveRow
from firn.core.reuse import Cause, Reason

NEIGHBOUR = "neighbour"
"""The origin of tokens that another request computed at the same time."""
N_CLOSEST = 4
"""Sibling blocks that are checked, those that share most with the prompt first."""
CERTAIN = (Cause.OFF_THE_GRID, Cause.NO_STATE)
"""Causes that hold whatever else is stored."""
SMALL_SHARE = 1 / 8
"""A hit on at least this share of the prompt is always used."""
Payloads = dict[tuple[Node, Part], Payload]


@dataclass(frozen=True, slots=True)
class RowSlice:
    """Pages that are still in a row: its tokens [start, end)."""

    row: RowPages
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class StoredPrefix:
    """Implements core.ports.Restored: the payloads of a prefix in order, or the buffers of a parked row
    in place of its pages."""

    layout: Layout
    n_tokens: int
    nbytes: int
    pages: Sequence[Payload | RowSlice] = ()
    slab: Slab | None = None
    windows: Sequence[Payload] = ()
    state: Payload | None = None

    def fill(self, layers: list[LayerCache]) -> None:
        layout, n = self.layout, self.n_tokens
        if self.windows:
            layout.fill(Part.WINDOW, layers, self.windows, n)
        if self.state is not None:
            layout.fill(Part.STATE, layers, [self.state], n)
        if self.slab is not None:
            layout.give(layers, self.slab.layers, n)
        elif self.pages:  # views of another row's buffers must not outlive this call
            layout.fill(Part.PAGES, layers, [_in_place(p) for p in self.pages], n)


def _in_place(piece: Payload | RowSlice) -> Payload | Views:
    return piece.row.views(piece.start, piece.end) if isinstance(piece, RowSlice) else piece


class Restorer:
    def __init__(
        self, records: Records, layout: Layout, parking: Parking, *, saves_pieces: bool
    ) -> None:
        self._records = records
        self._parking = parking
        self._needs = records.needs
        self._layout = layout
        self._saves_pieces = saves_pieces

    # --- where to resume -------------------------------------------------------------------

    def match(self, cursor: CacheCursor) -> Match:
        """The longest prefix that can be restored now."""
        if not cursor.control.read:
            return NOTHING
        return last_match(cursor.walk(self._records.tree), self._needs, cursor.has)

    def shared(self, cursor: CacheCursor) -> int:
        """How many tokens the prompt shares with anything stored."""
        return cursor.walk(self._records.tree).n_shared if cursor.control.read else 0

    def may_have_more(self, cursor: CacheCursor) -> bool:
        """Whether the block after the last committed one may be in memory by now: a cheap check.

        Where a prompt ends within a block, there may be a block that continues with its reply, and
        a shorter one with a state.
        """
        node = cursor.node
        end = node.end + self._records.identity.block
        children = node.children.closest(cursor.prompt, node.end, end)
        ahead = [n for n, _ in islice(children, N_CLOSEST)]
        if not self._needs.pages:  # only the last windows are read
            return bool(ahead)
        records = (n.records.get(part) for n in ahead for part in self._needs.by_block)
        return any(r is not None and cursor.has(r) for r in records)

    def pays(self, cursor: CacheCursor, match: Match, n_tokens: int) -> bool:
        """Whether to abandon a row of `n_tokens` tokens for a new one that is filled to the match.

        A row that has computed something is abandoned only to gain a block or more: estimates are
        not precise enough for less.
        """
        estimates, has_computed = self._records.estimates, n_tokens > cursor.admission.n_cached
        if match.n_tokens < n_tokens + (self._records.identity.block if has_computed else 1):
            return False
        fill_s = estimates.fill_s(match.nbytes_of(match.records))
        return fill_s < estimates.prefill_s(n_tokens, match.n_tokens)

    def saves_time(self, match: Match, n_prompt: int) -> bool:
        """Whether a row filled to the match finishes the prompt sooner than an empty one."""
        estimates = self._records.estimates
        if match.n_tokens >= SMALL_SHARE * n_prompt:
            return True
        if self._needs.pages and self._parking.row_for(match) is not None:
            return True
        if match.n_tokens < self._records.identity.block:  # a pass without it takes as long
            return False
        if not estimates.knows_prefill:
            return True
        saved_s = estimates.prefill_s(0, n_prompt) - estimates.prefill_s(match.n_tokens, n_prompt)
        return estimates.fill_s(match.nbytes_of(match.records)) < saved_s

    # --- resuming --------------------------------------------------------------------------

    def resume(self, cursor: CacheCursor, match: Match) -> StoredPrefix:
        """Move the cursor to the match, and return what a row there is made of.

        The cursor moves last: if something fails, the request continues where it was.
        """
        end = match.segments[-1].node
        taken = self._parking.row_for(match) if self._needs.pages else None
        read = [r for r in match.records if taken is None or r.part is not Part.PAGES]
        payloads: Payloads = {
            (r.node, r.part): _payload(cursor, r) for r in read if r.part is not Part.PAGES
        }
        windows, state = self._windows(match, payloads), match.state
        pages = _pages(cursor, match) if self._needs.pages and taken is None else ()
        slab = self._parking.take(taken, match) if taken is not None else None
        self._records.used(end)
        self._records.reused(end)
        if cursor.writes:
            self._records.extend_life(end, cursor.control.ttl_s)
        self._move(cursor, match, payloads)
        otherwise = replace(cursor.admission, reason=Reason(Cause.FAULT))
        cursor.resuming = Resuming(match, taken, otherwise)
        return StoredPrefix(
            self._layout,
            match.n_tokens,
            match.nbytes_of(read),
            pages,
            slab,
            windows,
            None if state is None else payloads[state.node, Part.STATE],
        )

    def _move(self, cursor: CacheCursor, match: Match, payloads: Payloads) -> None:
        whole = [s.node for s in match.segments if s.n_tokens == self._records.identity.block]
        if whole and whole[-1].end > cursor.node.end:
            self._records.tree.move_lease(cursor.node, whole[-1])
            cursor.node = whole[-1]
        cursor.n_saved = cursor.node.end
        if self._saves_pieces and match.n_tokens > cursor.node.end:
            saved = _sliced(match.segments[-1], Part.WINDOW, payloads)
            cursor.pieces = [WindowPiece(cursor.node.end, match.n_tokens, saved)]
            cursor.n_saved = match.n_tokens
        cursor.due = {p: m for p, m in cursor.due.items() if p > match.n_tokens}

    def _windows(self, match: Match, payloads: Payloads) -> list[Payload]:
        """The window layers' pieces that overlap the window before the match's end."""
        if not self._needs.window:
            return []
        covered = 0
        pieces = []
        for segment in match.segments:
            covered += segment.n_tokens
            if covered > match.n_tokens - self._needs.window:
                pieces.append(_sliced(segment, Part.WINDOW, payloads))
        return pieces

    def filled(self, cursor: CacheCursor, row: LiveRow) -> None:
        """The row exists: the records it was made of are in it from now on."""
        made, cursor.resuming = cursor.resuming, None
        assert made is not None
        if made.taken is not None:
            self._parking.was_taken(cursor, made.taken, row)
        else:
            self._parking.move_in(cursor, made.match, row)

    # --- what is reported ------------------------------------------------------------------

    def stored_in(self, match: Match) -> Counter[str]:
        """How many of the match's tokens are stored in which tier."""
        tiers = self._records.tiers
        return match.origins(
            lambda r: MEMORY if r.arrays is not None else tiers.fastest_with(r).name
        )

    def origins(self, cursor: CacheCursor, match: Match, *, jumps: bool = False) -> Counter[str]:
        """The match's tokens by origin. What was loaded counts for its tier.

        jumps: the request has begun to compute; what entered memory since is a neighbour's work.
        """

        def origin(record: Record) -> str:
            if record in cursor.loaded:
                return cursor.loaded[record][0]
            return NEIGHBOUR if jumps and record not in cursor.in_memory_before else MEMORY

        return match.origins(origin)

    def jumped(self, cursor: CacheCursor, match: Match, n_computed: int) -> Admitted:
        """What the request got, now that its row skips tokens [n_computed, match.n_tokens)."""
        n_skipped = match.n_tokens - n_computed
        tail = match.after(n_computed)
        tiers = Counter(dict(cursor.admission.tiers)) + self.origins(cursor, tail, jumps=True)
        n_cached = cursor.admission.n_cached + n_skipped
        why = self.why_not_more(cursor, match.n_tokens)
        if why is None and n_cached < len(cursor.prompt) - 1:  # some of it was computed
            why = Reason(cursor.load_fault) if cursor.load_fault else cursor.admission.reason
        return Admitted(n_cached, tuple(tiers.items()), why)

    def why_not_more(self, cursor: CacheCursor, n_tokens: int) -> Reason | None:
        """Why a prompt that resumes at this position did not get further; None if it could not."""
        if not cursor.control.read:
            return Reason(Cause.SWITCHED_OFF)
        if n_tokens >= len(cursor.prompt) - 1:
            return None
        if cursor.loading is not None:
            return Reason(Cause.NOT_YET)
        if cursor.load_fault and n_tokens < cursor.n_target:
            return Reason(cursor.load_fault)
        if cursor.is_slower:
            return Reason(Cause.SLOWER)
        tree = self._records.tree
        why = why_not_more(tree, cursor.walk(tree), self._needs, n_tokens)
        is_unknown = cursor.was_not_answered or cursor.asking is not None
        if is_unknown and why is not None and why.cause not in CERTAIN:
            return Reason(Cause.NO_ANSWER)
        return why

    def correct_reason(self, cursor: CacheCursor) -> None:
        """A store has answered, which the reason that was given before did not expect."""
        if cursor.admission.reason == Reason(Cause.NO_ANSWER):
            why = self.why_not_more(cursor, cursor.admission.n_cached)
            cursor.admission = replace(cursor.admission, reason=why)


def _pages(cursor: CacheCursor, match: Match) -> list[Payload | RowSlice]:
    """The pages of a match in order. Consecutive ones in the same row are one piece."""
    pieces: list[Payload | RowSlice] = []
    start, end = 0, 0
    row: RowPages | None = None

    def flush() -> None:
        if row is not None:
            pieces.append(RowSlice(row, start, end))

    for segment in match.segments:
        node, n_tokens = segment.node, segment.n_tokens
        arrays = _arrays(cursor, node.records[Part.PAGES])
        if isinstance(arrays, RowPages):
            if arrays is not row:
                flush()
                row, start = arrays, node.start
            end = node.start + n_tokens
        else:
            flush()
            row = None
            pieces.append(arrays if n_tokens == node.n_tokens else arrays.tokens(0, n_tokens))
    flush()
    return pieces


def _arrays(cursor: CacheCursor, record: Record) -> Payload | RowPages:
    if record in cursor.loaded:
        return cursor.loaded[record][1]
    arrays: Payload | RowPages = record.arrays
    return arrays


def _payload(cursor: CacheCursor, record: Record) -> Payload:
    """The payload of a record that is never in a row: a window or a state."""
    arrays = _arrays(cursor, record)
    assert isinstance(arrays, Payload)
    return arrays


def _sliced(segment: Segment, part: Part, payloads: Payloads) -> Payload:
    payload = payloads[segment.node, part]
    whole = segment.n_tokens == segment.node.n_tokens
    return payload if whole else payload.tokens(0, segment.n_tokens)
