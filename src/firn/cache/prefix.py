"""The prefix cache as the engine drives it. One for all kinds of layers, one for all tiers.

Nothing raises out of these methods: a fault is logged, counted, and becomes a miss.

Owner: the engine thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from firn.cache import checkpoints, memo
from firn.cache.below import Answered, Arrived, Lost, Seen, takes_all
from firn.cache.catalogue import Identity
from firn.cache.children import Text
from firn.cache.commit import Committer
from firn.cache.cursor import CacheCursor
from firn.cache.garbage import Garbage
from firn.cache.io import Io
from firn.cache.layout import Layout
from firn.cache.match import Match
from firn.cache.nodes import Record
from firn.cache.off import BlankCursor
from firn.cache.parking import Parking
from firn.cache.records import Records
from firn.cache.restore import NEIGHBOUR, Restorer
from firn.cache.stats import Stats
from firn.core.events import Admitted
from firn.core.keys import Key, KeyTokens, key_tokens, placed_tokens
from firn.core.ports import EngineLoad, LiveRow, Restored
from firn.core.values import CacheControl, Namespace, Prompt

AnyCursor = CacheCursor | BlankCursor
REMEMBER_EVERY_S = 300.0


@dataclass(frozen=True, slots=True)
class CacheSettings:
    limit_nbytes: int
    block: int = 256
    exact_chunk: int = 0
    """0: reuse to the token. Else: resume only at multiples of this prefill chunk."""

    def layout(self, layout: Layout, dtype: str) -> str:
        mode = f"exact{self.exact_chunk}" if self.exact_chunk else "full"
        return f"{layout.text};{dtype};block{self.block};{mode}"


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
        self._garbage: Garbage | None = None
        self.records = Records(
            Identity(fingerprint, settings.layout(layout, dtype), settings.block),
            layout.needs(grid=settings.exact_chunk or 1),
            limit_nbytes=settings.limit_nbytes,
            clock=clock,
            wall=wall,
        )
        self._committer = Committer(self.records, layout, exact_chunk=settings.exact_chunk)
        in_rows = self._committer.in_rows
        self._parking = Parking(self.records, layout, in_rows=in_rows)
        self._restorer = Restorer(
            self.records, layout, self._parking, saves_pieces=self._committer.piece_tokens > 0
        )
        self._clock = clock
        self._racing: set[CacheCursor] = set()
        self._stats_by_root: dict[Key, Stats] = {}
        self._memo: Path | None = None
        self._remembered_at = clock()

    @property
    def stats(self) -> Stats:
        return self.records.stats

    def expect(self, recipes: Sequence[str]) -> None:
        """Prompts may be thinned in these ways. Before tiers are added: they are looked through once."""
        self.records.catalogue.expect(recipes)

    def add_tier(
        self,
        name: str,
        io: Io,
        *,
        namespaces: Sequence[Namespace],
        wake: Callable[[], None],
        takes: Callable[[Record], bool] = takes_all,
    ) -> None:
        """Put a tier below memory, and below those that are there. `wake` gets the engine to tick.

        takes: which records are written there.
        """
        self.records.catalogue.know(namespaces)
        self.records.add_tier(name, io, wake=wake, takes=takes)

    def keep_estimates(self, path: Path) -> None:
        """Begin with what an earlier process learned, and leave what this one learns."""
        self._memo = path
        memo.recall(path, self.records.estimates)

    def own_process(self) -> None:
        """Nobody else needs this process: let its garbage be collected when there is time for it."""
        self._garbage = Garbage(self._clock)

    # --- a request's way -------------------------------------------------------------------

    def open(self, prompt: Prompt, namespace: Namespace, control: CacheControl) -> AnyCursor:
        try:
            self._parking.sweep()
            self.records.expire()
            cursor = self._cursor(prompt, namespace, control)
        except Exception as e:
            self.records.failed("open", e)
            return BlankCursor()
        try:
            self._restorer.begin(cursor)
            self._restorer.ask(cursor)
            if cursor.pending:
                self._racing.add(cursor)
        except Exception as e:  # what is in memory can be restored all the same
            self.records.failed("open", e)
            self._stop_racing(cursor)
            self._restorer.unlease(cursor)
        return cursor

    def restore(self, cursor: AnyCursor) -> Restored | None:
        if isinstance(cursor, BlankCursor):
            return None
        try:
            self._parking.sweep()
            return self._restore(cursor)
        except Exception as e:
            self.records.failed("restore", e)
            self._stop_racing(cursor)
            cursor.writes = False
            cursor.kind, cursor.admission = "branching", Admitted(0, reason="fault")
            return None

    def advance(self, cursor: AnyCursor, n_tokens: int) -> Restored | None:
        if isinstance(cursor, BlankCursor) or not cursor.control.read:
            return None
        try:
            self._parking.sweep()
            return self._advance(cursor, n_tokens)
        except Exception as e:
            self.records.failed("advance", e)
            self._stop_racing(cursor)
            return None

    def stops(self, cursor: AnyCursor) -> Sequence[int]:
        if isinstance(cursor, BlankCursor) or self.settings.exact_chunk:
            return ()
        return list(cursor.due)

    def commit(self, cursor: AnyCursor, row: LiveRow) -> None:
        if isinstance(cursor, BlankCursor) or not self._may_write(cursor):
            return
        try:
            self._committer.commit(cursor, row)
        except Exception as e:
            self.records.failed("commit", e)
            cursor.writes = False

    def fork(self, cursor: AnyCursor, reply: Sequence[int]) -> AnyCursor:
        if isinstance(cursor, BlankCursor):
            return cursor
        try:
            self._stop_racing(cursor)
            self._restorer.unlease(cursor)
            self._count(cursor)
            if self.settings.exact_chunk:
                return BlankCursor()  # exact mode keeps only what prefill computed
            return self._fork(cursor, reply)
        except Exception as e:
            self.records.failed("fork", e)
            return BlankCursor()

    def _fork(self, cursor: CacheCursor, reply: Sequence[int]) -> CacheCursor:
        self.records.tree.lease(cursor.node)
        cursor.pages = None  # the row is the choice's now
        return CacheCursor(
            root=cursor.root,
            prompt=cursor.prompt,
            boundaries=cursor.boundaries,
            hints=cursor.hints,
            control=cursor.control,
            node=cursor.node,
            writes=cursor.writes,
            step=cursor.step,
            clock=cursor.clock,
            reply=reply,
            reply_at=cursor.reply_at,
            pieces=list(cursor.pieces),
            n_saved=cursor.n_saved,
            counted=True,
        )

    def close_cursor(self, cursor: AnyCursor, row: LiveRow | None) -> None:
        if isinstance(cursor, BlankCursor) or cursor.closed:
            return
        cursor.closed = True
        self._stop_racing(cursor)
        self._count(cursor)
        try:
            if row is not None and self._may_write(cursor) and not self.settings.exact_chunk:
                self._committer.commit(cursor, row)
                self._committer.commit_tail(cursor, row)
        except Exception as e:
            self.records.failed("close", e)
        try:
            if row is not None:
                self._parking.end(row)
            else:
                self._parking.abandon(cursor)
        except Exception as e:
            self.records.failed("park", e)
        for release in (self._restorer.unlease, self._mark_used, self._leave_node):
            try:
                release(cursor)
            except Exception as e:
                self.records.failed("close", e)

    def _mark_used(self, cursor: CacheCursor) -> None:
        cursor.loaded.clear()
        if cursor.node.parent is not None:
            self.records.used(cursor.node)

    def _leave_node(self, cursor: CacheCursor) -> None:
        self.records.unlease(cursor.node)

    def blank(self) -> BlankCursor:
        return BlankCursor()

    # --- upkeep ----------------------------------------------------------------------------

    def confirm(self) -> None:
        try:
            self.records.rows.unconfirmed.clear()
            self.records.confirm()
        except Exception as e:
            self.records.failed("confirm", e)

    def doubt(self) -> None:
        try:
            self.records.doubt()
            self._parking.doubt()
        except Exception as e:
            self.records.failed("doubt", e)

    def set_room(self, nbytes: int) -> None:
        try:
            self._parking.sweep()
            memory = self.records.memory
            memory.limit_nbytes = max(min(nbytes, self.settings.limit_nbytes), 0)
            memory.shrink_to(memory.limit_nbytes)
        except Exception as e:
            self.records.failed("room", e)

    def tick(self, load: EngineLoad) -> None:
        try:
            self._parking.sweep()
            if load is EngineLoad.NONE:
                self.records.expire()
                self._remember(REMEMBER_EVERY_S)
            if self._garbage is not None:
                self._garbage.tick(idle=load is EngineLoad.NONE)
            for tier, news in self.records.poll(load):
                if isinstance(news, Arrived):
                    for cursor in list(self._racing):
                        self._restorer.arrived(cursor, tier, news)
                elif isinstance(news, Lost):
                    for cursor in list(self._racing):
                        self._restorer.lost(cursor, news.record, news.error)
                elif isinstance(news, Answered):
                    for cursor in list(self._racing):
                        self._restorer.answered(cursor, tier, news)
                elif isinstance(news, Seen) and self._garbage is not None:
                    self._garbage.keep(n_new=len(news.changes))
        except Exception as e:
            self.records.failed("tick", e)
        for cursor in list(self._racing):
            self._restorer.give_up(cursor)
            if not cursor.pending:
                self._racing.discard(cursor)

    @property
    def settled(self) -> bool:
        """Nothing is left to spill."""
        return self.records.settled

    def saw_prefill(self, start: int, end: int, seconds: float) -> None:
        self.records.estimates.saw_prefill(start, end, seconds)

    def saw_restore(self, restored: Restored, seconds: float) -> None:
        self.records.estimates.saw_fill(restored.nbytes, seconds)

    def close(self) -> None:
        self._remember(0.0)
        self._parking.sweep()
        self.records.close()
        if self.records.tree.announcer is not None:
            self.records.tree.announcer.close()

    def _remember(self, every_s: float) -> None:
        now = self._clock()
        if self._memo is not None and now - self._remembered_at >= every_s:
            self._remembered_at = now
            memo.remember(self._memo, self.records.estimates)

    # --- views -----------------------------------------------------------------------------

    def stats_of(self, namespace: Namespace) -> Stats:
        """One namespace's own lookups and commits."""
        return self._stats_by_root.get(self.records.identity.root(namespace), Stats())

    def look_up(self, prompt: Prompt, namespace: Namespace) -> Look:
        """What a request with this prompt would resume at, by loading if that pays."""
        self._parking.sweep()
        cursor = self._cursor(prompt, namespace, CacheControl(write=False))
        try:
            plan = self._restorer.plan(cursor)
            cursor.is_slower = plan.is_slower
            match = plan.target if plan.loads else plan.now
            return Look(
                match,
                self._restorer.shared(cursor),
                dict(self._restorer.stored_in(match)),
                self._restorer.why(cursor, match.n_tokens),
            )
        finally:
            self.records.unlease(cursor.node)

    # --- inside ----------------------------------------------------------------------------

    def _cursor(self, prompt: Prompt, namespace: Namespace, control: CacheControl) -> CacheCursor:
        thinned = prompt.thinned
        root = self.records.catalogue.root(namespace, thinned.recipe if thinned else "")
        text = Text(_key_tokens(prompt))
        self.records.tree.lease(root)
        return CacheCursor(
            root=root,
            prompt=text,
            boundaries=prompt.boundaries,
            hints=prompt.hints,
            control=control,
            node=root,
            writes=control.write,
            step=self._committer.step,
            clock=self._clock,
            unbroken=prompt.unbroken,
            reply_at=None if thinned is None else prompt.position(len(prompt)),
            counted=thinned is not None,  # its whole prompt was looked up, and counted, before
        )

    def _may_write(self, cursor: CacheCursor) -> bool:
        """What was cleared away since must not come back."""
        return cursor.writes and self.records.tree.is_attached(cursor.root)

    def _restore(self, cursor: CacheCursor) -> Restored | None:
        n_prompt = len(cursor.prompt)
        match, n_shared = self._restorer.match(cursor), self._restorer.shared(cursor)
        tiers = self._restorer.origins(cursor, match)
        if self.records.needs.state and cursor.writes:
            cursor.due = checkpoints.due(
                cursor.boundaries,
                n_prompt,
                n_restored=match.n_tokens,
                n_shared=n_shared,
                hints=cursor.hints,
                grid=self.settings.exact_chunk or 1,
            )
        cursor.kind = _kind(match, n_prompt)
        restored = self._restorer.resume(cursor, match) if match.n_tokens else None
        self._restorer.passed(cursor, match.n_tokens)
        if cursor.loading is None:
            self._restorer.unlease(cursor)
        why = self._restorer.why(cursor, match.n_tokens)
        cursor.admission = Admitted(match.n_tokens, tuple(tiers.items()), why)
        return restored

    def _advance(self, cursor: CacheCursor, n_tokens: int) -> Restored | None:
        self._restorer.passed(cursor, n_tokens)
        if not self._restorer.is_more_at_hand(cursor):
            return None
        match = self._restorer.match(cursor)
        if not self._restorer.is_worth_it(match, n_tokens):
            return None
        cursor.kind = _kind(match, len(cursor.prompt))
        restored = self._restorer.resume(cursor, match)
        self._restorer.passed(cursor, match.n_tokens)
        self._restorer.unlease(cursor)
        self._restorer.jumped(cursor, match, n_tokens)
        return restored

    def _stop_racing(self, cursor: CacheCursor) -> None:
        self._restorer.end_loading(cursor)
        cursor.asking = None
        self._racing.discard(cursor)

    def _count(self, cursor: CacheCursor) -> None:
        """The prompt is read, or given up: what was it that the cache did for it."""
        if cursor.counted or not cursor.kind:
            return
        cursor.counted = True
        found = cursor.admission
        saved = self.records.estimates.prefill_s(0, found.n_cached)
        for stats in (self.stats, self._stats_by_root.setdefault(cursor.root.key, Stats())):
            stats.looked_up(
                n_prompt=len(cursor.prompt),
                n_cached=found.n_cached,
                n_advanced=dict(found.tiers).get(NEIGHBOUR, 0),
                kind=cursor.kind,
                reason=found.reason,
                tiers=found.tiers,
            )
            stats.seconds_saved += saved


@dataclass(frozen=True, slots=True)
class Look:
    """What a request would get."""

    match: Match
    n_shared: int
    tiers: dict[str, int]
    reason: str


def _key_tokens(prompt: Prompt) -> KeyTokens:
    if prompt.thinned is None:
        return key_tokens(prompt.ids, prompt.picture_spans)
    return placed_tokens(prompt.ids, prompt.thinned.positions)


def _kind(match: Match, n_prompt: int) -> str:
    if match.n_tokens >= n_prompt - 1:
        return "whole"
    return "growing" if match.segments and _is_the_end(match) else "branching"


def _is_the_end(match: Match) -> bool:
    """Whether nothing stored goes on from here: the prompt has used all there was."""
    last = match.segments[-1]
    node = last.node
    if len(node.children) or node.parent is None or last.n_tokens < node.n_tokens:
        return False
    longer = node.parent.children.longer(Text(node.tokens), 0, node.n_tokens)
    return all(other is node for other in longer)
