"""Where a prompt resumes, and with what: a `StoredPrefix`, of which the runner makes a row.

Records that memory has, or that were loaded for the request, are copied into the layers of a new row; or
the parked row of the conversation's last turn is taken over as it is.

    restore, advance -> StoredPrefix -> (the runner fills a row) -> filled

Owner: the engine thread, through the prefix cache.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice

from firn.cache.arrays.payload import Payload, Views
from firn.cache.commit import Committer
from firn.cache.cursor import CacheCursor, Resuming
from firn.cache.layout import Layout
from firn.cache.loading import Loader
from firn.cache.memory.parking import Parking
from firn.cache.memory.rows import RowPages, Slab
from firn.cache.parts import Part
from firn.cache.planning import checkpoints
from firn.cache.planning.match import MEMORY, NOTHING, Match, Segment, last_match
from firn.cache.planning.reasons import why_not_more
from firn.cache.records import Records
from firn.cache.tree import CheckpointKind, Node, Record
from firn.core.events import Admitted
from firn.core.ports import LayerCache, LiveRow
from firn.core.reuse import Cause, Reason
from firn.core.values import PackedTokens

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
    """The only writer of `Reuse`."""

    def __init__(
        self,
        records: Records,
        layout: Layout,
        *,
        committer: Committer,
        loader: Loader,
        parking: Parking,
        weighs_hits: bool = False,
    ) -> None:
        """weighs_hits: see `CacheSettings`."""
        self._records = records
        self._committer = committer
        self._loader = loader
        self._parking = parking
        self._needs = records.needs
        self._layout = layout
        self._weighs_hits = weighs_hits

    # --- what the engine asks for ----------------------------------------------------------

    def restore(self, cursor: CacheCursor) -> StoredPrefix | None:
        """Where the prompt begins: with what can be restored now."""
        reuse, request = cursor.reuse, cursor.request
        match = self.match(cursor)
        if self._loader.begin_again(cursor, match):
            match = self.match(cursor)
        match = self._weighed(cursor, match)
        n_shared = self.shared(cursor)
        origins = match.tokens_by(self._origins(cursor, match))
        reuse.hit_kind = _hit_kind(match, len(request.prompt))
        if cursor.writes:
            self._expect(cursor, match, n_shared)
        restored = self._resume(cursor, match) if match.n_tokens else None
        self._let_go(cursor, match)
        why = self.why_not_more(cursor, match.n_tokens)
        self._admit(cursor, Admitted(match.n_tokens, tuple(origins.items()), why))
        return restored

    def advance(self, cursor: CacheCursor, n_tokens: int) -> StoredPrefix | None:
        """What to skip to from here, if that saves time."""
        self._loader.computed(cursor, n_tokens)
        if not self._may_have_more(cursor):
            return None
        match = self.match(cursor)
        pays = self._pays(cursor, match, n_tokens)
        if not pays or not self._weighed(cursor, match).n_tokens:
            return None
        restored = self._resume(cursor, match)
        cursor.reuse.hit_kind = _hit_kind(match, len(cursor.request.prompt))
        self._let_go(cursor, match)
        self._admit(cursor, self._jumped(cursor, match, n_tokens))
        return restored

    def filled(self, cursor: CacheCursor, row: LiveRow) -> None:
        """The row exists: the records it was made of are in it from now on."""
        made, cursor.reuse.resuming = cursor.reuse.resuming, None
        assert made is not None
        old, chain = cursor.committed.pages, cursor.committed.node
        if made.taken is not None:
            self._parking.was_taken(made.taken, row, chain=chain)
            pages: RowPages | None = made.taken
        else:
            pages = self._parking.row_of(row, chain=chain)
        if pages is None:
            return
        self._committer.is_in(cursor, pages)
        self._parking.leave_old(old, pages)
        if made.taken is None:
            loaded = {r: payload.nbytes for r, (_, payload) in cursor.loads.loaded.items()}
            moved = self._parking.move_in(pages, made.match, loaded)
            self._loader.in_row(cursor, moved)

    def give_up(self, cursor: CacheCursor) -> None:
        """After a fault the prompt is computed."""
        cursor.reuse.hit_kind = "branching"
        self._admit(cursor, Admitted(0, reason=Reason(Cause.FAULT)))

    def preview(self, cursor: CacheCursor) -> Match:
        """Where the prompt would resume, by loading if that pays."""
        return self._weighed(cursor, self._loader.preview(cursor))

    # --- where to resume -------------------------------------------------------------------

    def match(self, cursor: CacheCursor) -> Match:
        """The longest prefix that can be restored now."""
        if not cursor.request.control.read:
            return NOTHING
        return last_match(cursor.walk(self._records.tree), self._needs, cursor)

    def shared(self, cursor: CacheCursor) -> int:
        """How many tokens the prompt shares with anything stored."""
        reads = cursor.request.control.read
        return cursor.walk(self._records.tree).n_shared if reads else 0

    def _may_have_more(self, cursor: CacheCursor) -> bool:
        """Whether the block after the last committed one may be in memory by now: a cheap check.

        Where a prompt ends within a block, there may be a block that continues with its reply, and
        a shorter one with a state.
        """
        node = cursor.committed.node
        end = node.end + self._records.identity.block
        children = node.children.closest(cursor.request.prompt, node.end, end)
        ahead = [n for n, _ in islice(children, N_CLOSEST)]
        if not self._needs.pages:  # only the last windows are read
            return bool(ahead)
        records = (n.records.get(part) for n in ahead for part in self._needs.by_block)
        return any(r is not None and cursor.has(r) for r in records)

    def _pays(self, cursor: CacheCursor, match: Match, n_tokens: int) -> bool:
        """Whether to abandon a row of `n_tokens` tokens for a new one that is filled to the match.

        A row that has computed something is abandoned only to gain a block or more: estimates are
        not precise enough for less.
        """
        estimates, has_computed = self._records.estimates, n_tokens > cursor.admission.n_cached
        if match.n_tokens < n_tokens + (self._records.identity.block if has_computed else 1):
            return False
        fill_s = estimates.fill_s(match.nbytes_of(match.records))
        return fill_s < estimates.prefill_s(n_tokens, match.n_tokens)

    def _weighed(self, cursor: CacheCursor, match: Match) -> Match:
        """The match, or nothing where computing its tokens is faster than filling a row with them."""
        is_weighed = self._weighs_hits and match.n_tokens
        saves_time = not is_weighed or self._saves_time(match, len(cursor.request.prompt))
        cursor.reuse.is_weighed_out = not saves_time
        return match if saves_time else NOTHING

    def _saves_time(self, match: Match, n_prompt: int) -> bool:
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

    def _expect(self, cursor: CacheCursor, match: Match, n_shared: int) -> None:
        """Note where later prompts will probably resume: states are kept there, and windows written."""
        source, state = cursor.request.source, match.state
        has_grown = cursor.reuse.hit_kind == "growing"
        due = checkpoints.due(
            source.boundaries,
            len(cursor.request.prompt),
            n_restored=match.n_tokens,
            n_shared=n_shared,
            hints=source.hints,
            grid=self._needs.grid,
            replies_stay=has_grown if state is None else state.kind is CheckpointKind.REPLY_END,
        )
        self._committer.expect(cursor, due)
        if self._needs.window and match.n_tokens and not has_grown:
            self._records.keep_window(
                match.segments[-1].node, match.n_tokens, CheckpointKind.BRANCH
            )

    # --- resuming --------------------------------------------------------------------------

    def _resume(self, cursor: CacheCursor, match: Match) -> StoredPrefix:
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
            self._records.extend_life(end, cursor.request.control.ttl_s)
        self._committer.jump(cursor, match, windows[-1] if windows else None)
        otherwise = replace(cursor.admission, reason=Reason(Cause.FAULT))
        cursor.reuse.resuming = Resuming(match, taken, otherwise)
        return StoredPrefix(
            self._layout,
            match.n_tokens,
            match.nbytes_of(read),
            pages,
            slab,
            windows,
            None if state is None else payloads[state.node, Part.STATE],
        )

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

    def _let_go(self, cursor: CacheCursor, match: Match) -> None:
        """Let go of what it resumed from, unless a load that still runs needs some of it later."""
        self._loader.computed(cursor, match.n_tokens)
        if cursor.loads.loading is None:
            self._loader.unlease(cursor)

    # --- what is reported ------------------------------------------------------------------

    def stored_in(self, match: Match) -> Counter[str]:
        """How many of the match's tokens are stored in which tier."""
        tiers = self._records.tiers
        return match.tokens_by({
            r: MEMORY if r.arrays is not None else tiers.fastest_with(r).name
            for r in match.records
        })  # fmt: skip

    def _origins(
        self, cursor: CacheCursor, match: Match, *, jumps: bool = False
    ) -> dict[Record, str]:
        """Where the match's records come from. What was loaded counts for its tier.

        jumps: the request has begun to compute; what entered memory since is a neighbour's work.
        """
        loads = cursor.loads
        origins = dict.fromkeys(match.records, NEIGHBOUR if jumps else MEMORY)
        for record in origins:
            if record in loads.loaded:
                origins[record] = loads.loaded[record][0]
            elif record in loads.in_memory_before:
                origins[record] = MEMORY
        return origins

    def _jumped(self, cursor: CacheCursor, match: Match, n_computed: int) -> Admitted:
        """What the request got, now that its row skips tokens [n_computed, match.n_tokens)."""
        n_skipped = match.n_tokens - n_computed
        tail = match.after(n_computed)
        origins = tail.tokens_by(self._origins(cursor, tail, jumps=True))
        tiers = Counter(dict(cursor.admission.tiers)) + origins
        n_cached = cursor.admission.n_cached + n_skipped
        why = self.why_not_more(cursor, match.n_tokens)
        if why is None and n_cached < len(cursor.request.prompt) - 1:  # some of it was computed
            fault = cursor.loads.fault
            why = Reason(fault) if fault else cursor.admission.reason
        return Admitted(n_cached, tuple(tiers.items()), why)

    def _admit(self, cursor: CacheCursor, admission: Admitted) -> None:
        cursor.reuse.admission, cursor.reuse.heard = admission, cursor.loads.news

    def why_not_more(self, cursor: CacheCursor, n_tokens: int) -> Reason | None:
        """Why a prompt that resumes at this position did not get further; None if it could not."""
        loads, request = cursor.loads, cursor.request
        if not request.control.read:
            return Reason(Cause.SWITCHED_OFF)
        if n_tokens >= len(request.prompt) - 1:
            return None
        if loads.loading is not None:
            return Reason(Cause.NOT_YET)
        if loads.fault and n_tokens < loads.n_target:
            return Reason(loads.fault)
        if loads.is_slower or cursor.reuse.is_weighed_out:
            return Reason(Cause.SLOWER)
        tree = self._records.tree
        why = why_not_more(tree, cursor.walk(tree), self._needs, n_tokens)
        is_unknown = loads.was_not_answered or loads.asking is not None
        if is_unknown and why is not None and why.cause not in CERTAIN:
            return Reason(Cause.NO_ANSWER)
        return why

    def correct_reason(self, cursor: CacheCursor) -> None:
        """Its load has failed, or a store has answered, since the reason was given."""
        loads, admission = cursor.loads, cursor.admission
        why = admission.reason
        if why is None:
            return
        if loads.news is not None and loads.news is not cursor.reuse.heard:
            why = Reason(loads.news.cause)
        if why.cause is Cause.NO_ANSWER and loads.asking is None:
            why = self.why_not_more(cursor, admission.n_cached)
        self._admit(cursor, replace(admission, reason=why))

    def count(self, cursor: CacheCursor) -> None:
        """The prompt is read, or given up: count once what the cache did for it."""
        reuse, request = cursor.reuse, cursor.request
        if reuse.is_counted or not reuse.hit_kind:
            return
        reuse.is_counted = True
        admission = reuse.resuming.otherwise if reuse.resuming else reuse.admission
        saved = self._records.estimates.prefill_s(0, admission.n_cached)
        for stats in self._records.counts.both(request.root.namespace):
            stats.looked_up(
                n_prompt=len(request.prompt),
                n_cached=admission.n_cached,
                n_advanced=dict(admission.tiers).get(NEIGHBOUR, 0),
                kind=reuse.hit_kind,
                reason=admission.reason,
                tiers=admission.tiers,
            )
            stats.seconds_saved += saved


def _hit_kind(match: Match, n_prompt: int) -> str:
    if match.n_tokens >= n_prompt - 1:
        return "whole"
    return "growing" if match.segments and _used_all(match) else "branching"


def _used_all(match: Match) -> bool:
    """Whether nothing stored continues from here: the prompt has used all there was."""
    last = match.segments[-1]
    node = last.node
    if len(node.children) or node.parent is None or last.n_tokens < node.n_tokens:
        return False
    longer = node.parent.children.extensions(PackedTokens(node.tokens), 0, node.n_tokens)
    return all(other is node for other in longer)


def _pages(cursor: CacheCursor, match: Match) -> list[Payload | RowSlice]:
    """The pages of a match in order. Consecutive ones in the same row are one piece."""
    pieces: list[Payload | RowSlice] = []
    loaded = cursor.loads.loaded
    row: RowPages | None = None
    start = at = 0
    for node, n_tokens in match.segments:
        record = node.records[Part.PAGES]
        arrays = loaded[record][1] if record in loaded else record.arrays
        if arrays is not row:
            if row is not None:
                pieces.append(RowSlice(row, start, at))
            row, start = (arrays if isinstance(arrays, RowPages) else None), at
        if row is None:
            pieces.append(arrays if n_tokens == node.n_tokens else arrays.tokens(0, n_tokens))
        at += n_tokens
    if row is not None:
        pieces.append(RowSlice(row, start, at))
    return pieces


def _arrays(cursor: CacheCursor, record: Record) -> Payload | RowPages:
    if record in cursor.loads.loaded:
        return cursor.loads.loaded[record][1]
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
