"""Loading stored records for a prompt, while the prompt is computed from its front.

Loading and computing race (see planning/plan.py). Whatever goes wrong with a load, the request
continues with what is left, or by computing.

Owner: the engine thread, through the prefix cache.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import takewhile

from firn.cache.cursor import CacheCursor, Loading, LoadNews, PendingQuestion
from firn.cache.parts import Needs
from firn.cache.planning import checkpoints
from firn.cache.planning.match import ANYWHERE, Match, Walk, has_parts, resume_points
from firn.cache.planning.plan import GRACE_S, UNKNOWN_PATIENCE_S, ResumePlan, make_plan
from firn.cache.records import Records
from firn.cache.storage.desk import TierDesk
from firn.cache.storage.faults import Damaged, Missing, TierError, Unusable
from firn.cache.storage.orders import ReadFailed, RecordRead, StoreAnswered
from firn.cache.storage.store_search import StoreQuestion
from firn.cache.tree import Node, Record
from firn.core.reuse import Cause

MAX_PLANS = 3
"""How many times a prompt's loads are planned, including the first, if loads fail."""
N_ORDERED = 64
"""The most reads that are ordered between two steps."""
ASK_PATIENCE_S = 0.25
"""Computing waits no longer than this for a store's answer."""
MIN_DEADLINE_S, DEADLINE_FACTOR = 5.0, 10.0
"""A load is given up after its expected time times the factor, but not before the minimum."""


class Loader:
    """The only writer of `Loads`."""

    def __init__(self, records: Records) -> None:
        self._records = records
        self._needs = records.needs
        self.racing: dict[CacheCursor, None] = {}
        """Cursors for which something may still arrive."""

    # --- beginning -------------------------------------------------------------------------

    def plan(self, cursor: CacheCursor, *, start: int = 0) -> ResumePlan:
        """start: tokens of the prompt that are already computed."""
        plan = make_plan(
            cursor.walk(self._records.tree),
            self._needs,
            self._records.estimates,
            [tier.name for tier in self._records.tiers],
            start=start,
            available=cursor,
        )
        cursor.loads.is_slower = plan.is_slower
        return plan

    def begin(self, cursor: CacheCursor, *, start: int = 0) -> None:
        """Lease what the prompt can resume from now, and load what is worth loading."""
        if not cursor.request.control.read:
            return
        loads, plan = cursor.loads, self.plan(cursor, start=start)
        loads.n_plans += 1
        loads.n_ready = plan.now.n_tokens
        loads.n_target = max(loads.n_target, plan.target.n_tokens)
        self.unlease(cursor)
        for record in {*plan.now.records, *plan.target.records}:
            self._records.ledger.lease(record)
            loads.leased.append(record)
        if not plan.loads:
            return
        loads.in_memory_before = frozenset(r for r in plan.target.records if r.arrays is not None)
        now = cursor.request.clock.elapsed()
        loads.loading = Loading(
            plan.target.n_tokens,
            set(plan.loads),
            now,
            now + plan.patience_s,
            now + plan.busy_patience_s,
            now + max(MIN_DEADLINE_S, DEADLINE_FACTOR * plan.load_s),
            compute_s=plan.compute_s,
            start=max(plan.now.n_tokens, start),
            front=start,
            to_order=deque(plan.loads),
        )
        self.racing[cursor] = None
        self._order(cursor, N_ORDERED)

    def _order(self, cursor: CacheCursor, n_most: int) -> int:
        """Order the next reads of its load, at most so many; returns how many.

        A prompt of a million tokens has thousands: ordering all of them at once would keep running
        streams waiting.
        """
        loading, n_ordered = cursor.loads.loading, 0
        while loading is not None and loading.to_order and n_ordered < n_most:
            record = loading.to_order.popleft()
            if record not in loading.missing:  # read for another request, or computed
                continue
            if not record.stored:
                self._plan_without(cursor, Missing())
                return n_ordered
            self._records.tiers.fastest_with(record).load(record, loading)
            n_ordered += 1
        return n_ordered

    def preview(self, cursor: CacheCursor) -> Match:
        """Where the prompt would resume, by loading if that pays. Loads nothing."""
        plan = self.plan(cursor)
        return plan.target if plan.loads else plan.now

    def begin_again(self, cursor: CacheCursor, match: Match) -> bool:
        """Plan again if less can be resumed from than was planned. True: a new plan was made."""
        loads = cursor.loads
        if match.n_tokens >= loads.n_ready or loads.n_plans >= MAX_PLANS:
            return False
        self._end(cursor)
        self.begin(cursor)
        return True

    def unlease(self, cursor: CacheCursor) -> None:
        """Let go of what it was about to resume from."""
        leased = cursor.loads.leased
        for record in leased:
            self._records.ledger.unlease(record)
        if leased:
            leased.clear()
            self._records.memory.let_go()

    # --- what is under way -----------------------------------------------------------------

    def was_read(self, tier: TierDesk, event: RecordRead) -> None:
        """Give a record to the cursors that wait for it."""
        for cursor in self._waiting_for(event.record):
            loads, loading = cursor.loads, cursor.loads.loading
            assert loading is not None
            loading.missing.discard(event.record)
            loading.nbytes[tier.name] = loading.nbytes.get(tier.name, 0) + event.record.nbytes
            loading.n_arrived += 1
            loading.last_at, loading.taken_at = event.at, cursor.request.clock.elapsed()
            loading.engine_s += event.array_s
            loads.loaded[event.record] = tier.name, event.arrays
            if not loading.missing:
                loads.n_ready = loading.n_tokens
                self._end(cursor)

    def read_failed(self, event: ReadFailed) -> None:
        for cursor in self._waiting_for(event.record):
            self._plan_without(cursor, event.error)

    def _waiting_for(self, record: Record) -> list[CacheCursor]:
        return [
            cursor
            for cursor in self.racing
            if (load := cursor.loads.loading) is not None and record in load.missing
        ]

    def tick(self) -> Iterator[CacheCursor]:
        """Order what is to be read next; yields the cursors that something may have happened to."""
        n_left = N_ORDERED
        for cursor in list(self.racing):
            self._end_if_late(cursor)
            with self._records.absorbing("tick"):
                n_left -= self._order(cursor, n_left)
            if not cursor.loads.are_pending:
                self.racing.pop(cursor, None)
            yield cursor

    def _plan_without(self, cursor: CacheCursor, error: TierError) -> None:
        """A record of its load cannot be read, and the tree knows that: plan again."""
        loading = cursor.loads.loading
        assert loading is not None
        self._fail(cursor, _cause(error))
        if cursor.loads.n_plans < MAX_PLANS:
            self.begin(cursor, start=loading.front)

    def _end_if_late(self, cursor: CacheCursor) -> None:
        """End a load that takes far longer than it should."""
        loading, request = cursor.loads.loading, cursor.request
        if loading is not None and request.clock.elapsed() >= loading.deadline:
            self._records.counts.failed(request.root.namespace, "read: too slow")
            self._fail(cursor, Cause.NOT_YET)

    def _fail(self, cursor: CacheCursor, why: Cause) -> None:
        self._end(cursor)
        cursor.loads.fault = why
        cursor.loads.news = LoadNews(why)

    def computed(self, cursor: CacheCursor, n_tokens: int) -> None:
        """`n_tokens` tokens of the prompt are computed: their loads are no longer needed."""
        loading = cursor.loads.loading
        if loading is None:
            return
        # What is computed but not committed cannot be resumed from.
        loading.front = cursor.committed.node.end
        loading.missing = {r for r in loading.missing if loading.wants(r)}
        if not loading.missing or n_tokens >= loading.n_tokens:
            self._end(cursor)

    def in_row(self, cursor: CacheCursor, records: Iterable[Record]) -> None:
        """What was loaded is in the cursor's row by now."""
        for record in records:
            cursor.loads.loaded.pop(record, None)

    def stop(self, cursor: CacheCursor) -> None:
        """Stop waiting: nothing that may still arrive is of use to the cursor."""
        self._end(cursor)
        cursor.loads.asking = None
        self.racing.pop(cursor, None)

    def release(self, cursor: CacheCursor) -> None:
        """The request is over: let go of what was leased and loaded for it."""
        cursor.loads.loaded.clear()
        self.unlease(cursor)

    def _end(self, cursor: CacheCursor) -> None:
        """The load is over, complete or not: learn from what has arrived and what has not."""
        loading, cursor.loads.loading = cursor.loads.loading, None
        if loading is None:
            return
        loading.over = True
        estimates, began = self._records.estimates, loading.began
        for tier in self._records.tiers:
            arrived = loading.nbytes.get(tier.name, 0)
            late = sum(r.nbytes for r in loading.missing if tier.is_reading(r))
            waited_s = tier.processed_until - began
            is_slow = late and estimates.observe_delay(tier.name, arrived + late, waited_s)
            if arrived and not is_slow:
                estimates.observe_load(tier.name, arrived, loading.last_at - began)

    # --- asking stores ---------------------------------------------------------------------

    def ask(self, cursor: CacheCursor) -> None:
        """Ask shared stores for what they have of the prompt beyond what the tree knows."""
        stores = [tier for tier in self._records.tiers if tier.is_store]
        if not (stores and cursor.request.control.read):
            return
        question, n_now = self._question(cursor)
        compute_s = self._records.estimates.prefill_s(n_now, len(cursor.request.prompt))
        stores = [tier for tier in stores if compute_s > 2 * (tier.ask_s or 0.0)]
        if question.is_empty or not stores:
            return
        known = [tier.ask_s for tier in stores if tier.ask_s is not None]
        patience = 2 * max(known) + GRACE_S if known else UNKNOWN_PATIENCE_S
        until = cursor.request.clock.elapsed() + min(patience, compute_s / 2, ASK_PATIENCE_S)
        cursor.loads.asking = PendingQuestion(question, {tier.number for tier in stores}, until)
        self.racing[cursor] = None
        for tier in stores:
            tier.ask(question)

    def store_answered(self, tier: TierDesk, event: StoreAnswered) -> None:
        """The tree now knows what the store has: plan again."""
        for cursor in list(self.racing):
            loads, asking = cursor.loads, cursor.loads.asking
            if asking is None or asking.question is not event.question:
                continue
            asking.tiers.discard(tier.number)
            loads.was_not_answered |= event.failed
            if not asking.tiers:
                loads.asking = None
            if event.entries:
                self._end(cursor)
                self.begin(cursor, start=cursor.committed.node.end)
                if loads.loading is not None or loads.is_slower:
                    cause = Cause.SLOWER if loads.loading is None else Cause.NOT_YET
                    loads.news = LoadNews(cause)

    def _question(self, cursor: CacheCursor) -> tuple[StoreQuestion, int]:
        """What to ask, and where the prompt could resume without an answer."""
        walk, identity = cursor.walk(self._records.tree), self._records.identity
        points = resume_points(walk, self._needs, ANYWHERE)
        n_now = next(points).n_tokens
        limit = walk.before(len(walk.tokens) - 1)
        question = StoreQuestion(
            root=cursor.request.root.key,
            fingerprint=identity.fingerprint,
            layout=self._records.catalogue.layout_of(cursor.request.root),
            namespace=cursor.request.root.namespace,
            block=identity.block,
            needs=self._needs,
            prompt=walk.tokens,
            known=[node.key for node in _obtainable_blocks(walk, self._needs)],
            limit=limit,
            states=self._state_positions(cursor, n_now, limit),
            now=self._records.clock.wall(),
        )
        return question, n_now

    def _state_positions(self, cursor: CacheCursor, n_now: int, limit: int) -> Sequence[int]:
        """Where another server may have kept a state, beyond `n_now`."""
        if not self._needs.state:
            return ()
        grid, source = self._needs.grid, cursor.request.source
        ends = {*source.boundaries, *source.hints}
        ends |= checkpoints.due(
            source.boundaries,
            len(cursor.request.prompt),
            n_restored=0,
            n_shared=0,
            hints=source.hints,
            grid=grid,
        ).keys()
        return sorted({p - p % grid for p in ends if n_now < p - p % grid <= limit})


def _obtainable_blocks(walk: Walk, needs: Needs) -> list[Node]:
    """The path up to the first block whose carrier is not here: stores are asked from there on."""
    carrier = needs.by_block[:1]
    return list(takewhile(lambda node: has_parts(node, carrier, ANYWHERE), walk.path))


def _cause(error: TierError) -> Cause:
    if isinstance(error, Damaged):
        return Cause.DAMAGED
    is_gone = isinstance(error, Missing) and not isinstance(error, Unusable)
    return Cause.EVICTED if is_gone else Cause.READ_FAILED
