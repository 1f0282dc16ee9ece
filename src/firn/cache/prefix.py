"""The prefix cache as the engine drives it: one for all kinds of layers and all tiers.

For a request the engine calls open and restore; advance before a chunk and commit after it; fork for
each choice, whose reply is committed as it grows; close_cursor at the end. Between two steps: tick.

No exception leaves these methods: a fault is logged, counted, and becomes a miss.

Owner: the engine thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path

from firn.cache.commit import Committer
from firn.cache.copies import Copies
from firn.cache.cursor import CacheCursor
from firn.cache.garbage import Garbage
from firn.cache.integrity import IntegrityCheck
from firn.cache.layout import Layout
from firn.cache.loading import N_ORDERED, Loader
from firn.cache.memory.parking import Parking
from firn.cache.off import BlankCursor
from firn.cache.planning import checkpoints, estimates_file
from firn.cache.planning.match import NOTHING, Match
from firn.cache.records import Records
from firn.cache.restore import NEIGHBOUR, Restorer
from firn.cache.stats import Stats
from firn.cache.storage.catalogue import CacheIdentity
from firn.cache.storage.desk import TierDesk
from firn.cache.storage.orders import (
    ReadFailed,
    RecordRead,
    ScanBatch,
    StoreAnswered,
    TierEvent,
    Worker,
)
from firn.cache.storage.spill_policy import EVERYTHING, SpillPolicy
from firn.cache.tree import Mark
from firn.core.events import Admitted
from firn.core.keys import packed_tokens
from firn.core.ports import EngineLoad, LiveRow, Restored
from firn.core.prefill_speed import PrefillSpeed
from firn.core.reuse import Cause, Reason
from firn.core.values import CacheControl, Namespace, PackedTokens, Prompt

AnyCursor = CacheCursor | BlankCursor
SAVE_ESTIMATES_S = 300.0
"""How often an idle server saves its estimates."""


@dataclass(frozen=True, slots=True)
class CacheSettings:
    limit_nbytes: int
    block: int = 256
    exact_chunk: int = 0
    """0: reuse to the token. Else: resume only at multiples of this prefill chunk."""
    weighs_hits: bool = False
    """Ignore a hit on a small part of the prompt if computing its tokens is faster than filling a
    row with them: for a device that computes a few more tokens in the same time."""

    def layout_text(self, layout: Layout, dtype: str) -> str:
        """What determines a record's content apart from the weights; a part of the root key."""
        mode = f"exact{self.exact_chunk}" if self.exact_chunk else "full"
        # Earlier builds saved windows too late: small ones of rows that draft, and all of a draft model,
        # which may be served by itself. What they stored may be of other tokens.
        windows = ";windows2" if layout.window else ""
        return f"{layout.text};{dtype};block{self.block};{mode}{windows}"


@dataclass(frozen=True, slots=True)
class Probe:
    """What a request with this prompt would reuse now."""

    match: Match
    n_shared: int
    tiers: dict[str, int]
    reason: Reason | None


class PrefixTree:
    """Implements core.ports.PrefixCache."""

    def __init__(
        self,
        layout: Layout,
        settings: CacheSettings,
        *,
        fingerprint: bytes,
        dtype: str,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.settings = settings
        self.records = Records(
            CacheIdentity(fingerprint, settings.layout_text(layout, dtype), settings.block),
            layout.needs(grid=settings.exact_chunk or 1),
            limit_nbytes=settings.limit_nbytes,
            clock=clock,
            wall=wall,
        )
        self._copies = Copies(self.records)
        committer = Committer(self.records, layout, self._copies, exact_chunk=settings.exact_chunk)
        self._committer = committer
        in_rows = committer.keeps_pages_in_rows
        self._parking = Parking(self.records, layout, self._copies, keeps_pages_in_rows=in_rows)
        self._loader = Loader(self.records)
        self._restorer = Restorer(
            self.records, layout, self._parking, saves_pieces=self._committer.piece_tokens > 0
        )
        self.integrity = IntegrityCheck(self.records)
        self._clock = clock
        self._racing: set[CacheCursor] = set()
        """Cursors for which something may still arrive."""
        self._garbage: Garbage | None = None
        self._estimates_path: Path | None = None
        self._estimates_saved_at = clock()

    @property
    def stats(self) -> Stats:
        return self.records.counts.total

    # --- before the first request ----------------------------------------------------------

    def expect_recipes(self, recipes: Sequence[str]) -> None:
        """Set the ways prompts may be prepared. Call it before tiers are added and scanned."""
        self.records.catalogue.expect_recipes(recipes)

    def add_tier(
        self,
        name: str,
        worker: Worker,
        *,
        namespaces: Sequence[Namespace],
        policy: SpillPolicy = EVERYTHING,
    ) -> None:
        """Add a tier below memory and the existing tiers.

        namespaces: whose records are recognised in it. policy: which records are written there.
        """
        self.records.catalogue.expect_namespaces(namespaces)
        self.records.add_tier(name, worker, policy)

    def keep_estimates(self, path: Path) -> None:
        """Start with the estimates that an earlier process saved at `path`, and save them there."""
        self._estimates_path = path
        estimates_file.load(path, self.records.estimates)

    def own_process(self) -> None:
        """Take charge of this process's garbage: it is collected when the engine has time."""
        self._garbage = Garbage(self._clock)

    # --- a request -------------------------------------------------------------------------

    def open(self, prompt: Prompt, namespace: Namespace, control: CacheControl) -> AnyCursor:
        try:
            self._parking.sweep()
            self.records.expire()
            cursor = self._cursor(prompt, namespace, control)
        except Exception as e:
            self.records.failed("open", e, namespace=namespace)
            return BlankCursor()
        try:
            self._loader.begin(cursor)
            self._loader.ask(cursor)
            if cursor.pending:
                self._racing.add(cursor)
        except Exception as e:  # what memory has can still be restored
            self.records.failed("open", e, namespace=namespace)
            self._stop_racing(cursor)
            self._loader.unlease(cursor)
        return cursor

    def _cursor(self, prompt: Prompt, namespace: Namespace, control: CacheControl) -> CacheCursor:
        recipe = prompt.recipe
        root = self.records.catalogue.root(namespace, recipe)
        self.records.tree.lease(root)
        return CacheCursor(
            root=root,
            source=prompt,
            prompt=packed_tokens(prompt),
            control=control,
            node=root,
            writes=control.write,
            commit_every=self._committer.commit_every,
            clock=self._clock,
            patient_until=self._clock() + self.records.tiers.deadline_s,
            counted=bool(recipe),  # the prompt as it was sent was looked up and counted before
        )

    def restore(self, cursor: AnyCursor) -> Restored | None:
        if isinstance(cursor, BlankCursor):
            return None
        try:
            self._parking.sweep()
            return self._restore(cursor)
        except Exception as e:
            self.records.failed("restore", e, namespace=cursor.root.namespace)
            self._stop_racing(cursor)
            cursor.writes = False
            cursor.hit_kind, cursor.admission = "branching", Admitted(0, reason=Reason(Cause.FAULT))
            return None

    def _restore(self, cursor: CacheCursor) -> Restored | None:
        n_prompt = len(cursor.prompt)
        match = self._restorer.match(cursor)
        if self._loader.begin_again(cursor, match):
            match = self._restorer.match(cursor)
            if cursor.pending:
                self._racing.add(cursor)
        match = self._weighed(cursor, match)
        n_shared = self._restorer.shared(cursor)
        tiers = self._restorer.origins(cursor, match)
        cursor.hit_kind = _hit_kind(match, n_prompt)
        if cursor.writes:
            self._set_points(cursor, match, n_shared)
        restored = self._restorer.resume(cursor, match) if match.n_tokens else None
        self._resumed(cursor, match)
        why = self._restorer.why_not_more(cursor, match.n_tokens)
        cursor.admission = Admitted(match.n_tokens, tuple(tiers.items()), why)
        return restored

    def _set_points(self, cursor: CacheCursor, match: Match, n_shared: int) -> None:
        """Note where later prompts will probably resume: states are kept there, and windows written."""
        needs, state = self.records.needs, match.state
        has_grown = cursor.hit_kind == "growing"
        due = checkpoints.due(
            cursor.source.boundaries,
            len(cursor.prompt),
            n_restored=match.n_tokens,
            n_shared=n_shared,
            hints=cursor.source.hints,
            grid=self.settings.exact_chunk or 1,
            replies_stay=has_grown if state is None else state.mark is Mark.REPLY_END,
        )
        if needs.state:
            cursor.due = due
        if needs.window:
            cursor.branches = [
                p for p, mark in due.items() if needs.state or mark > Mark.PROMPT_END
            ]
            if match.n_tokens and not has_grown:
                self.records.keep_window(match.segments[-1].node, match.n_tokens, Mark.BRANCH)

    def _keep_windows(self, cursor: CacheCursor) -> None:
        """Have the windows written before the points that are committed by now."""
        while cursor.branches:
            position = cursor.branches[0]
            # A state inside a block has a tail of its own, with the window's last part.
            first = position - position % self.settings.block
            if cursor.node.end < (first if self.records.needs.state else position):
                return
            self.records.keep_window(cursor.node, cursor.branches.pop(0), Mark.BRANCH)

    def _weighed(self, cursor: CacheCursor, match: Match) -> Match:
        """The match, or nothing where computing its tokens is faster than filling a row with them."""
        is_weighed = match.n_tokens and self.settings.weighs_hits
        if not is_weighed or self._restorer.saves_time(match, len(cursor.prompt)):
            return match
        cursor.is_slower = True
        return NOTHING

    def advance(self, cursor: AnyCursor, n_tokens: int) -> Restored | None:
        if isinstance(cursor, BlankCursor) or not cursor.control.read:
            return None
        try:
            self._parking.sweep()
            return self._advance(cursor, n_tokens)
        except Exception as e:
            self.records.failed("advance", e, namespace=cursor.root.namespace)
            self._stop_racing(cursor)
            return None

    def _advance(self, cursor: CacheCursor, n_tokens: int) -> Restored | None:
        self._loader.computed(cursor, n_tokens)
        if not self._restorer.may_have_more(cursor):
            return None
        match = self._restorer.match(cursor)
        pays = self._restorer.pays(cursor, match, n_tokens)
        if not pays or not self._weighed(cursor, match).n_tokens:
            return None
        restored = self._restorer.resume(cursor, match)
        cursor.hit_kind = _hit_kind(match, len(cursor.prompt))
        self._resumed(cursor, match)
        cursor.admission = self._restorer.jumped(cursor, match, n_tokens)
        return restored

    def _resumed(self, cursor: CacheCursor, match: Match) -> None:
        """Let go of what it resumed from, unless a load that still runs needs some of it later."""
        self._loader.computed(cursor, match.n_tokens)
        if cursor.loading is None:
            self._loader.unlease(cursor)

    def filled(self, cursor: AnyCursor, row: LiveRow) -> None:
        assert isinstance(cursor, CacheCursor)
        with self._counting_faults("filled", cursor.root.namespace):
            self._restorer.filled(cursor, row)

    def not_filled(self, cursor: AnyCursor, error: Exception) -> None:
        assert isinstance(cursor, CacheCursor)
        self.records.failed("fill", error, namespace=cursor.root.namespace)
        self.close_cursor(cursor, None)

    def stops(self, cursor: AnyCursor) -> Sequence[int]:
        if isinstance(cursor, BlankCursor) or self.settings.exact_chunk:
            return ()
        return list(cursor.due)

    def commit(self, cursor: AnyCursor, row: LiveRow) -> None:
        if isinstance(cursor, BlankCursor) or not self._may_write(cursor):
            return
        try:
            self._committer.commit(cursor, row)
            self._keep_windows(cursor)
        except Exception as e:
            self.records.failed("commit", e, namespace=cursor.root.namespace)
            cursor.writes = False

    def together(self) -> AbstractContextManager[None]:
        return self._copies.together()

    def fork(self, cursor: AnyCursor, reply: Sequence[int]) -> AnyCursor:
        if isinstance(cursor, BlankCursor):
            return cursor
        try:
            self._stop_racing(cursor)
            self._loader.unlease(cursor)
            self._count(cursor)
            if self.settings.exact_chunk:
                return BlankCursor()  # exact mode keeps only what prefill computed
            return self._fork(cursor, reply)
        except Exception as e:
            self.records.failed("fork", e, namespace=cursor.root.namespace)
            return BlankCursor()

    def _fork(self, cursor: CacheCursor, reply: Sequence[int]) -> CacheCursor:
        self.records.tree.lease(cursor.node)
        cursor.pages = None  # the row now belongs to the choice
        return CacheCursor(
            root=cursor.root,
            source=cursor.source,
            prompt=cursor.prompt,
            control=cursor.control,
            node=cursor.node,
            writes=cursor.writes,
            commit_every=cursor.commit_every,
            clock=cursor.clock,
            reply=reply,
            branches=list(cursor.branches),
            pieces=list(cursor.pieces),
            n_saved=cursor.n_saved,
            counted=True,
        )

    def close_cursor(self, cursor: AnyCursor, row: LiveRow | None) -> None:
        if isinstance(cursor, BlankCursor) or cursor.closed:
            return
        cursor.closed = True
        namespace = cursor.root.namespace
        self._stop_racing(cursor)
        self._count(cursor)
        with self._counting_faults("close", namespace):
            if row is not None and self._may_write(cursor) and not self.settings.exact_chunk:
                self._committer.commit(cursor, row)
                self._committer.commit_tail(cursor, row)
        with self._counting_faults("park", namespace):
            if row is not None:
                self._parking.end(row)
            else:
                self._parking.abandon(cursor)
        with self._counting_faults("close", namespace):
            self._loader.release(cursor)
        with self._counting_faults("close", namespace):
            if cursor.node.parent is not None:
                self.records.used(cursor.node)
        with self._counting_faults("close", namespace):
            self.records.unlease(cursor.node)

    def blank(self) -> BlankCursor:
        return BlankCursor()

    def _may_write(self, cursor: CacheCursor) -> bool:
        """Whether it may write: what was cleared since the request began must not come back."""
        return cursor.writes and self.records.tree.is_attached(cursor.root)

    def _stop_racing(self, cursor: CacheCursor) -> None:
        self._loader.stop(cursor)
        self._racing.discard(cursor)

    def _count(self, cursor: CacheCursor) -> None:
        """The prompt is read, or given up: count what the cache did for it."""
        if cursor.counted or not cursor.hit_kind:
            return
        cursor.counted = True
        admission = cursor.resuming.otherwise if cursor.resuming else cursor.admission
        saved = self.records.estimates.prefill_s(0, admission.n_cached)
        for stats in self.records.counts.both(cursor.root.namespace):
            stats.looked_up(
                n_prompt=len(cursor.prompt),
                n_cached=admission.n_cached,
                n_advanced=dict(admission.tiers).get(NEIGHBOUR, 0),
                kind=cursor.hit_kind,
                reason=admission.reason,
                tiers=admission.tiers,
            )
            stats.seconds_saved += saved

    # --- between two steps -----------------------------------------------------------------

    def tick(self, load: EngineLoad) -> None:
        with self._counting_faults("tick"):
            self._parking.sweep()
            if load is EngineLoad.NONE:
                self.records.expire()
                self.integrity.tick()
                self._save_estimates(SAVE_ESTIMATES_S)
            if self._garbage is not None:
                self._garbage.tick(idle=load is EngineLoad.NONE)
            for tier, event in self.records.poll(load):
                self._pass_on(tier, event)
        n_left = N_ORDERED
        for cursor in list(self._racing):
            self._loader.end_if_late(cursor)
            with self._counting_faults("tick"):
                n_left -= self._loader.order(cursor, n_left)
            if not cursor.pending:
                self._racing.discard(cursor)

    def _pass_on(self, tier: TierDesk, event: TierEvent) -> None:
        """Pass an event that the tree has processed to the cursors that wait for something."""
        match event:
            case RecordRead():
                for cursor in list(self._racing):
                    self._loader.was_read(cursor, tier, event)
            case ReadFailed(record, error):
                for cursor in list(self._racing):
                    self._loader.read_failed(cursor, record, error)
            case StoreAnswered():
                for cursor in list(self._racing):
                    self._loader.store_answered(cursor, tier, event)
                    self._restorer.correct_reason(cursor)
            case ScanBatch(changes) if self._garbage is not None:
                self._garbage.keep(n_new=len(changes))

    def confirm(self) -> None:
        with self._counting_faults("confirm"):
            self.records.rows.unconfirmed.clear()
            self.records.confirm()

    def discard_unconfirmed(self) -> None:
        with self._counting_faults("doubt"):
            self.records.discard_unconfirmed()
            self._parking.discard_unconfirmed()

    def take_fault(self) -> Exception | None:
        return self.records.take_fault()

    def set_room(self, nbytes: int) -> None:
        limit = max(min(nbytes, self.settings.limit_nbytes), 0)
        try:
            self._parking.sweep()
            self.records.set_limit(limit)
        except Exception as e:  # most likely there is no memory to copy records out of rows
            self.records.failed("room", e)
            with self._counting_faults("room"):
                self._parking.drop_all()
                self.records.set_limit(limit)

    @property
    def prefill(self) -> PrefillSpeed:
        return self.records.estimates.prefill

    def saw_restore(self, restored: Restored, seconds: float) -> None:
        self.records.estimates.saw_fill(restored.nbytes, seconds)

    @property
    def settled(self) -> bool:
        """Whether nothing is left to forget, to spill or to check."""
        return self.records.settled and not self.integrity.is_running

    def close(self) -> None:
        self._save_estimates(0.0)
        self._parking.sweep()
        self.records.close()
        if self.records.tree.announcer is not None:
            self.records.tree.announcer.close()

    def _save_estimates(self, every_s: float) -> None:
        now = self._clock()
        if self._estimates_path is not None and now - self._estimates_saved_at >= every_s:
            self._estimates_saved_at = now
            estimates_file.save(self._estimates_path, self.records.estimates)

    @contextmanager
    def _counting_faults(self, where: str, namespace: Namespace | None = None) -> Iterator[None]:
        try:
            yield
        except Exception as e:
            self.records.failed(where, e, namespace=namespace)

    # --- for people ------------------------------------------------------------------------

    def stats_of(self, namespace: Namespace) -> Stats:
        """What was counted for one namespace. Faults that concern no request are in no namespace's."""
        return self.records.counts.of(namespace)

    def probe(self, prompt: Prompt, namespace: Namespace) -> Probe:
        """What a request with this prompt would resume from, by loading if that pays."""
        self._parking.sweep()
        cursor = self._cursor(prompt, namespace, CacheControl(write=False))
        try:
            match = self._weighed(cursor, self._loader.preview(cursor))
            return Probe(
                match,
                self._restorer.shared(cursor),
                dict(self._restorer.stored_in(match)),
                self._restorer.why_not_more(cursor, match.n_tokens),
            )
        finally:
            self.records.unlease(cursor.node)


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
