"""Bringing a prompt's stored prefix back, from memory or from below it.

What is in memory is resumed at once. What is below is loaded while the rest is computed, and the row
jumps ahead when the two meet (see plan.py). Whatever goes wrong with a load, the request goes on.

Owner: the engine thread, through the prefix cache.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import takewhile
from typing import Any

from firn.cache import checkpoints
from firn.cache.arrays.payload import Payload, Views
from firn.cache.below import Answered, Arrived, Below
from firn.cache.cursor import Asking, CacheCursor, Loading, Piece
from firn.cache.faults import Damaged, Missing, TierError
from firn.cache.layout import Layout
from firn.cache.live import RowPages
from firn.cache.lookup import Question
from firn.cache.match import MEMORY, Match, Walk, points, walk
from firn.cache.nodes import Node, Record
from firn.cache.parking import Parking
from firn.cache.parts import Needs, Part
from firn.cache.plan import (
    EVICTED,
    GRACE_S,
    NOT_YET,
    SLOWER,
    SWITCHED_OFF,
    UNKNOWN_PATIENCE_S,
    Plan,
    make_plan,
    why_not_more,
)
from firn.cache.records import Records
from firn.core.events import Admitted
from firn.core.ports import LiveRow, Restored

MAX_PLANS = 3
"""A load that fails is planned again, so often."""
ASK_PATIENCE_S = 0.25
"""Computing waits no longer than this for a store to say what it has."""
MIN_DEADLINE_S, DEADLINE_FACTOR = 5.0, 10.0
NEIGHBOUR = "neighbour"
"""Where tokens come from that another request computed at the same time."""
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

    # --- planning and loading --------------------------------------------------------------

    def plan(self, cursor: CacheCursor, *, start: int = 0) -> Plan:
        return make_plan(
            self._walk(cursor),
            self._needs,
            self._records.estimates,
            lambda record: self._tier_of(record).name,
            start=start,
            have=_at_hand(cursor),
        )

    def begin(self, cursor: CacheCursor, *, start: int = 0) -> None:
        """Hold on to what can be resumed now, and start to load what is worth it."""
        if not cursor.control.read:
            return
        plan = self.plan(cursor, start=start)
        cursor.n_plans += 1
        cursor.is_slower = plan.is_slower
        cursor.n_hoped = max(cursor.n_hoped, plan.target.n_tokens)
        self.unlease(cursor)
        self._lease(cursor, plan.target if plan.loads else plan.now)
        if not plan.loads:
            return
        cursor.at_hand = frozenset(r for r in plan.target.records if r.arrays is not None)
        now = cursor.clock()
        loading = cursor.loading = Loading(
            plan.target.n_tokens,
            set(plan.loads),
            now,
            now + plan.patience_s,
            now + plan.busy_patience_s,
            now + max(MIN_DEADLINE_S, DEADLINE_FACTOR * plan.load_s),
            compute_s=plan.compute_s,
            start=max(plan.now.n_tokens, start),
            front=start,
        )
        for record in plan.loads:
            self._tier_of(record).load(record, _wanted(loading, record))

    def ask(self, cursor: CacheCursor) -> None:
        """Find out what shared stores have of the prompt, beyond what is known here."""
        stores = [tier for tier in self._records.tiers if tier.asks]
        if not (stores and cursor.control.read):
            return
        question, n_now = self._question(cursor)
        compute_s = self._records.estimates.prefill_s(n_now, len(cursor.prompt))
        stores = [tier for tier in stores if compute_s > 2 * (tier.ask_s or 0.0)]
        if question.is_empty or not stores:
            return
        known = [tier.ask_s for tier in stores if tier.ask_s is not None]
        patience = 2 * max(known) + GRACE_S if known else UNKNOWN_PATIENCE_S
        until = cursor.clock() + min(patience, compute_s / 2, ASK_PATIENCE_S)
        cursor.asking = Asking(question, {tier.number for tier in stores}, until)
        for tier in stores:
            tier.ask(question)

    def answered(self, cursor: CacheCursor, tier: Below, news: Answered) -> None:
        """A store has said what it has, and the tree knows of it: plan again with that."""
        asking = cursor.asking
        if asking is None or asking.question is not news.question:
            return
        asking.tiers.discard(tier.number)
        if not asking.tiers:
            cursor.asking = None
        if news.entries:
            self.end_loading(cursor)
            self.begin(cursor, start=cursor.node.end)

    def _question(self, cursor: CacheCursor) -> tuple[Question, int]:
        """What is to be asked, and where the prompt could resume without an answer."""
        way, identity = self._walk(cursor), self._records.identity
        n_now = next(points(way, self._needs, lambda record: record.obtainable)).n_tokens
        known = _known(way, self._needs)
        limit = way.before(len(way.text) - 1)
        states: Sequence[int] = ()
        if self._needs.state:
            grid, ends = self._needs.grid, {*cursor.boundaries, *cursor.hints}
            ends |= checkpoints.due(
                cursor.boundaries,
                len(way.text),
                n_restored=0,
                n_shared=0,
                hints=cursor.hints,
                grid=grid,
            ).keys()
            states = sorted({p - p % grid for p in ends if n_now < p - p % grid <= limit})
        question = Question(
            root=cursor.root.key,
            fingerprint=identity.fingerprint,
            layout=identity.layout,
            namespace=cursor.root.namespace,
            block=identity.block,
            needs=self._needs,
            text=way.text,
            known=[node.key for node in known],
            limit=limit,
            states=states,
            now=self._records.wall(),
        )
        return question, n_now

    def arrived(self, cursor: CacheCursor, tier: Below, news: Arrived) -> None:
        record = news.record
        loading = cursor.loading
        if loading is None or record not in loading.missing:
            return
        loading.missing.discard(record)
        loading.nbytes[tier.name] = loading.nbytes.get(tier.name, 0) + record.nbytes
        loading.n_arrived += 1
        loading.last_at, loading.taken_at = news.at, cursor.clock()
        loading.engine_s += news.array_s
        cursor.loaded[record] = tier.name, news.arrays
        if not loading.missing:
            self.end_loading(cursor)

    def lost(self, cursor: CacheCursor, record: Record, error: TierError) -> None:
        """A record that was to be loaded cannot be: plan again with what is left."""
        loading = cursor.loading
        if loading is None or record not in loading.missing:
            return
        self._fail(cursor, _failure(error))
        if cursor.n_plans < MAX_PLANS:
            self.begin(cursor, start=loading.front)

    def give_up(self, cursor: CacheCursor) -> bool:
        """End a load that takes far longer than it should; whether it was one."""
        if cursor.loading is None or cursor.clock() < cursor.loading.deadline:
            return False
        self._records.stats.faults["read: too slow"] += 1
        self._fail(cursor, NOT_YET)
        return True

    def _fail(self, cursor: CacheCursor, why: str) -> None:
        self.end_loading(cursor)
        cursor.failed = why
        if cursor.admission.reason:
            cursor.admission = replace(cursor.admission, reason=why)

    def passed(self, cursor: CacheCursor, n_tokens: int) -> None:
        """So many tokens are computed: what was on its way for those is not needed any more."""
        loading = cursor.loading
        if loading is None:
            return
        loading.front = cursor.node.end  # only what is committed can be resumed with the rest
        loading.missing = {r for r in loading.missing if loading.wants(r)}
        if not loading.missing or n_tokens >= loading.n_tokens:
            self.end_loading(cursor)

    def end_loading(self, cursor: CacheCursor) -> None:
        loading, cursor.loading = cursor.loading, None
        if loading is None:
            return
        loading.over = True
        for tier, nbytes in loading.nbytes.items():
            self._records.estimates.saw_load(tier, nbytes, loading.last_at - loading.began)

    # --- resuming --------------------------------------------------------------------------

    def match(self, cursor: CacheCursor) -> Match:
        """The longest prefix that can be restored right now."""
        if not cursor.control.read:
            return Match(0)
        return next(points(self._walk(cursor), self._needs, _at_hand(cursor)))

    def shared(self, cursor: CacheCursor) -> int:
        """How far the prompt agrees with anything stored."""
        return self._walk(cursor).n_shared if cursor.control.read else 0

    def is_more_at_hand(self, cursor: CacheCursor) -> bool:
        """Whether the block behind the last committed one has come to memory: a cheap look."""
        node = cursor.node
        ahead = next(node.children.closest(cursor.prompt, node.end), None)
        if ahead is None or not self._needs.pages:  # of windows only the last are read
            return ahead is not None
        there = (ahead[0].records.get(part) for part in self._needs.by_block)
        return any(r is not None and _at_hand(cursor)(r) for r in there)

    def is_worth_it(self, match: Match, n_tokens: int) -> bool:
        """Whether to leave a row of so many tokens for one that is filled to the match."""
        estimates, block = self._records.estimates, self._records.identity.block
        if match.n_tokens < n_tokens + block:
            return False
        fill_s = estimates.fill_s.value * sum(r.nbytes for r in match.records)
        return fill_s < estimates.prefill_s(n_tokens, match.n_tokens)

    def stored_in(self, match: Match) -> Counter[str]:
        """How many of the match's tokens lie where."""
        return match.origins(lambda r: MEMORY if r.arrays is not None else self._tier_of(r).name)

    def resume(self, cursor: CacheCursor, match: Match) -> Restored:
        """Let the cursor go on from the match; the layers are filled when the row is made."""
        end = match.segments[-1].node
        self._records.used(end)
        self._records.proved(end)
        whole = [s.node for s in match.segments if s.n_tokens == self._records.identity.block]
        if whole and whole[-1].end > cursor.node.end:
            self._records.tree.move_lease(cursor.node, whole[-1])
            cursor.node = whole[-1]
        if cursor.writes:
            self._records.extend_life(end, cursor.control.ttl_s)
        cursor.n_saved = cursor.node.end
        taken = self._parking.to_take(match) if self._needs.pages else None
        read = [r for r in match.records if taken is None or r.part is not Part.PAGES]
        payloads: Payloads = {
            (r.node, r.part): _arrays(cursor, r) for r in read if r.part is not Part.PAGES
        }
        pages = _pages(cursor, match) if self._needs.pages and taken is None else []
        if self._saves_pieces and match.n_tokens > cursor.node.end:
            last = match.segments[-1]
            saved = _sliced(last.node, Part.WINDOW, last.n_tokens, payloads)
            cursor.pieces = [Piece(cursor.node.end, match.n_tokens, saved)]
            cursor.n_saved = match.n_tokens
        cursor.due = {p: m for p, m in cursor.due.items() if p > match.n_tokens}
        cursor.n_restored = match.n_tokens
        return Restored(
            match.n_tokens,
            lambda layers: self._fill(layers, match, payloads, taken or pages),
            nbytes=sum(r.nbytes for r in read),
            filled=lambda row: self._filled(row, cursor, match, taken),
        )

    def origins(self, cursor: CacheCursor, match: Match, *, ahead: bool = False) -> Counter[str]:
        """How many of the match's tokens came from where. A load counts, even if it is held by now.

        ahead: what came to memory since the cursor began, a neighbour computed.
        """

        def origin(record: Record) -> str:
            if record in cursor.loaded:
                return cursor.loaded[record][0]
            return NEIGHBOUR if ahead and record not in cursor.at_hand else MEMORY

        return match.origins(origin)

    def jumped(self, cursor: CacheCursor, match: Match, n_computed: int) -> None:
        """The row skips tokens [n_computed, match.n_tokens): say where they came from."""
        n_skipped = match.n_tokens - n_computed
        tail = _tail(match, n_computed)
        tiers = Counter(dict(cursor.admission.tiers)) + self.origins(cursor, tail, ahead=True)
        n_cached = cursor.admission.n_cached + n_skipped
        why = self.why(cursor, match.n_tokens)
        if not why and n_cached < len(cursor.prompt) - 1:  # some of it was computed meanwhile
            why = cursor.failed or cursor.admission.reason
        cursor.admission = Admitted(n_cached, tuple(tiers.items()), why)

    def why(self, cursor: CacheCursor, n_tokens: int) -> str:
        """Why a prompt that goes on at this position got no further without computing."""
        if not cursor.control.read:
            return SWITCHED_OFF
        way = self._walk(cursor)
        if n_tokens >= len(way.text) - 1:
            return ""
        if cursor.loading is not None:
            return NOT_YET
        if cursor.failed and n_tokens < cursor.n_hoped:
            return cursor.failed
        if cursor.is_slower:
            return SLOWER
        return why_not_more(self._records.tree, way, self._needs, n_tokens)

    # --- inside ----------------------------------------------------------------------------

    def _walk(self, cursor: CacheCursor) -> Walk:
        return walk(self._records.tree, cursor.root, cursor.prompt, unbroken=cursor.unbroken)

    def _tier_of(self, record: Record) -> Below:
        """The first, so the fastest, that has it."""
        return next(tier for tier in self._records.tiers if tier.has(record))

    def _lease(self, cursor: CacheCursor, match: Match) -> None:
        for record in match.records:
            self._records.tree.lease_record(record)
            cursor.leased.append(record)

    def unlease(self, cursor: CacheCursor) -> None:
        for record in cursor.leased:
            self._records.tree.unlease_record(record)
        if cursor.leased:
            cursor.leased.clear()
            self._records.memory.let_go()

    def _fill(
        self, layers: list[Any], match: Match, payloads: Payloads, pages: Pieces | RowPages
    ) -> None:
        try:
            self._fill_parts(layers, match, payloads)
            if isinstance(pages, RowPages):
                self._parking.take(pages, match, layers)
            elif pages:
                self._layout.fill(Part.PAGES, layers, pages, match.n_tokens)
                pages.clear()  # views of another row, which is to go on
        except Exception as e:  # the engine starts an empty row instead
            self._records.failed("fill", e)
            raise

    def _filled(
        self, row: LiveRow, cursor: CacheCursor, match: Match, taken: RowPages | None
    ) -> None:
        try:
            if taken is not None:
                self._parking.took(cursor, taken, row)
            else:
                self._parking.move_in(cursor, match, row)
        except Exception as e:  # its records stay where they are
            self._records.failed("filled", e)

    def _fill_parts(self, layers: list[Any], match: Match, payloads: Payloads) -> None:
        n = match.n_tokens
        if self._needs.window:
            covered = 0
            pieces: Pieces = []
            for s in match.segments:
                covered += s.n_tokens
                if covered > n - self._needs.window:
                    pieces.append(_sliced(s.node, Part.WINDOW, s.n_tokens, payloads))
            self._layout.fill(Part.WINDOW, layers, pieces, n)
        if match.state is not None:
            self._layout.fill(Part.STATE, layers, [payloads[match.state.node, Part.STATE]], n)


def _known(way: Walk, needs: Needs) -> list[Node]:
    """The whole blocks that can be had: where something of one cannot, a store is asked for it."""
    carrier = needs.by_block[:1]
    there = takewhile(
        lambda node: all(p in node.records and node.records[p].obtainable for p in carrier),
        way.path,
    )
    return list(there)


def _pages(cursor: CacheCursor, match: Match) -> Pieces:
    """The pages of a match in their order; those that lie in one row as one piece."""
    pieces: Pieces = []
    start, end = 0, 0
    lies_in: RowPages | None = None

    def flush() -> None:
        if lies_in is not None:
            pieces.append(lies_in.views(start, end))

    for segment in match.segments:
        node, n_tokens = segment.node, segment.n_tokens
        held = _held(cursor, node.records[Part.PAGES])
        if isinstance(held, RowPages):
            if held is not lies_in:
                flush()
                lies_in, start = held, node.start
            end = node.start + n_tokens
        else:
            flush()
            lies_in = None
            pieces.append(held if n_tokens == node.n_tokens else held.tokens(0, n_tokens))
    flush()
    return pieces


def _at_hand(cursor: CacheCursor) -> Callable[[Record], bool]:
    return lambda record: record.arrays is not None or record in cursor.loaded


def _wanted(loading: Loading, record: Record) -> Callable[[], bool]:
    return lambda: loading.wants(record)


def _held(cursor: CacheCursor, record: Record) -> Payload | RowPages:
    if record in cursor.loaded:
        return cursor.loaded[record][1]
    held: Payload | RowPages = record.arrays
    return held


def _arrays(cursor: CacheCursor, record: Record) -> Payload:
    """Of a record that lies in no row."""
    held = _held(cursor, record)
    assert isinstance(held, Payload)
    return held


def _sliced(node: Node, part: Part, n_tokens: int, payloads: Payloads) -> Payload:
    payload = payloads[node, part]
    return payload if n_tokens == node.n_tokens else payload.tokens(0, n_tokens)


def _tail(match: Match, start: int) -> Match:
    """The match's tokens from here on, cut inside a block if need be."""
    segments, at = [], 0
    for segment in match.segments:
        end = at + segment.n_tokens
        if end > start:
            segments.append(type(segment)(segment.node, end - max(at, start)))
        at = end
    return Match(match.n_tokens - start, tuple(segments), match.records)


def _failure(error: TierError) -> str:
    if isinstance(error, Damaged):
        return "damaged"
    return EVICTED if isinstance(error, Missing) else "read failed"
