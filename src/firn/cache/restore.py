"""Restores a prompt's stored prefix into a row.

Records that memory has, or that were loaded for the request, are copied into the layers of a new row; or
the parked row of the conversation's last turn is taken over as it is.

Owner: the engine thread, through the prefix cache.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import islice

from firn.cache.arrays.payload import Payload, Views
from firn.cache.cursor import CacheCursor, WindowPiece
from firn.cache.layout import Layout
from firn.cache.memory.parking import Parking
from firn.cache.memory.rows import RowPages
from firn.cache.parts import Part
from firn.cache.planning.match import MEMORY, NOTHING, Match, Segment, last_match
from firn.cache.planning.reasons import (
    FAULT,
    NO_ANSWER,
    NO_STATE,
    NOT_YET,
    OFF_THE_GRID,
    SLOWER,
    SWITCHED_OFF,
    why_not_more,
)
from firn.cache.records import Records
from firn.cache.tree import Node, Record
from firn.core.events import Admitted
from firn.core.ports import LayerCache, LiveRow, Restored

NEIGHBOUR = "neighbour"
"""The origin of tokens that another request computed at the same time."""
N_CLOSEST = 4
"""Sibling blocks that are checked, those that share most with the prompt first."""
FROM_WHAT_IS_KNOWN = ("", OFF_THE_GRID, NO_STATE)
"""Reasons that hold whatever else is stored."""
SMALL_SHARE = 1 / 8
"""A hit on at least this share of the prompt is always used."""
Payloads = dict[tuple[Node, Part], Payload]
Pieces = list[Payload | Views]


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

    def resume(self, cursor: CacheCursor, match: Match) -> Restored:
        """Move the cursor to the match. The layers are filled when the row is created.

        The cursor moves last: if something fails, the request continues where it was.
        """
        end = match.segments[-1].node
        taken = self._parking.row_for(match) if self._needs.pages else None
        read = [r for r in match.records if taken is None or r.part is not Part.PAGES]
        payloads: Payloads = {
            (r.node, r.part): _payload(cursor, r) for r in read if r.part is not Part.PAGES
        }
        pages = _pages(cursor, match) if self._needs.pages and taken is None else []
        self._records.used(end)
        self._records.reused(end)
        if cursor.writes:
            self._records.extend_life(end, cursor.control.ttl_s)
        self._move(cursor, match, payloads)
        return Restored(
            match.n_tokens,
            lambda layers: self._fill(layers, cursor, match, payloads, taken or pages),
            nbytes=match.nbytes_of(read),
            filled=lambda row: self._filled(row, cursor, match, taken),
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
        cursor.unfilled = replace(cursor.admission, reason=FAULT)

    def _fill(
        self,
        layers: list[LayerCache],
        cursor: CacheCursor,
        match: Match,
        payloads: Payloads,
        pages: Pieces | RowPages,
    ) -> None:
        try:
            self._fill_windows_and_state(layers, match, payloads)
            if isinstance(pages, RowPages):
                self._parking.take(pages, match, layers)
            elif pages:
                self._layout.fill(Part.PAGES, layers, pages, match.n_tokens)
                pages.clear()  # views of another row's buffers must not outlive this call
        except Exception as e:  # the engine starts an empty row instead
            self._records.failed("fill", e, namespace=cursor.root.namespace)
            raise

    def _fill_windows_and_state(
        self, layers: list[LayerCache], match: Match, payloads: Payloads
    ) -> None:
        n = match.n_tokens
        if self._needs.window:
            covered = 0
            pieces: Pieces = []
            for segment in match.segments:
                covered += segment.n_tokens
                if covered > n - self._needs.window:
                    pieces.append(_sliced(segment, Part.WINDOW, payloads))
            self._layout.fill(Part.WINDOW, layers, pieces, n)
        if match.state is not None:
            self._layout.fill(Part.STATE, layers, [payloads[match.state.node, Part.STATE]], n)

    def _filled(
        self, row: LiveRow, cursor: CacheCursor, match: Match, taken: RowPages | None
    ) -> None:
        cursor.unfilled = None
        try:
            if taken is not None:
                self._parking.was_taken(cursor, taken, row)
            else:
                self._parking.move_in(cursor, match, row)
        except Exception as e:  # its records stay where they are
            self._records.failed("filled", e, namespace=cursor.root.namespace)

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
        if not why and n_cached < len(cursor.prompt) - 1:  # some of it was computed
            why = cursor.load_fault or cursor.admission.reason
        return Admitted(n_cached, tuple(tiers.items()), why)

    def why_not_more(self, cursor: CacheCursor, n_tokens: int) -> str:
        """Why a prompt that resumes at this position did not get further; '' if it could not."""
        if not cursor.control.read:
            return SWITCHED_OFF
        if n_tokens >= len(cursor.prompt) - 1:
            return ""
        if cursor.loading is not None:
            return NOT_YET
        if cursor.load_fault and n_tokens < cursor.n_target:
            return cursor.load_fault
        if cursor.is_slower:
            return SLOWER
        tree = self._records.tree
        why = why_not_more(tree, cursor.walk(tree), self._needs, n_tokens)
        is_unknown = cursor.was_not_answered or cursor.asking is not None
        return NO_ANSWER if why not in FROM_WHAT_IS_KNOWN and is_unknown else why

    def correct_reason(self, cursor: CacheCursor) -> None:
        """A store has answered, which the reason that was given before did not expect."""
        if cursor.admission.reason == NO_ANSWER:
            why = self.why_not_more(cursor, cursor.admission.n_cached)
            cursor.admission = replace(cursor.admission, reason=why)


def _pages(cursor: CacheCursor, match: Match) -> Pieces:
    """The pages of a match in order. Consecutive ones in the same row are one piece."""
    pieces: Pieces = []
    start, end = 0, 0
    row: RowPages | None = None

    def flush() -> None:
        if row is not None:
            pieces.append(row.views(start, end))

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
