"""The prefix cache as the engine drives it: one for all kinds of layers and all tiers.

The engine opens a cursor for each request, and calls its methods; between two steps it calls tick.
No exception leaves these methods: a fault is logged, counted, and becomes a miss.

Owner: the engine thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path

from firn.cache.commit import Committer
from firn.cache.copies import Copies
from firn.cache.cursor import CacheCursor, CacheRequest, Loads, Reuse
from firn.cache.garbage import Garbage
from firn.cache.integrity import IntegrityCheck
from firn.cache.layout import Layout
from firn.cache.loading import Loader
from firn.cache.memory.parking import Parking
from firn.cache.planning.estimates_file import EstimatesFile
from firn.cache.planning.match import Match
from firn.cache.records import Records
from firn.cache.restore import Restorer
from firn.cache.stats import Stats
from firn.cache.storage.catalogue import CacheIdentity
from firn.cache.storage.orders import (
    ReadFailed,
    RecordRead,
    ScanBatch,
    StoreAnswered,
    Worker,
)
from firn.cache.storage.spill_policy import EVERYTHING, SpillPolicy
from firn.core.clock import SYSTEM_CLOCK, Clock
from firn.core.keys import packed_tokens
from firn.core.ports import Cursor, EngineLoad, LiveRow, NullCursor, Restored
from firn.core.prefill_speed import PrefillSpeed
from firn.core.reuse import Reason
from firn.core.values import CacheControl, Namespace, Prompt


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


class PrefixCache:
    """Implements core.ports.EngineCache. Its parts are here for its cursors, and for `cache/admin`."""

    def __init__(
        self,
        layout: Layout,
        settings: CacheSettings,
        *,
        fingerprint: bytes,
        dtype: str,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.settings = settings
        self.records = records = Records(
            CacheIdentity(fingerprint, settings.layout_text(layout, dtype), settings.block),
            layout.needs(grid=settings.exact_chunk or 1),
            limit_nbytes=settings.limit_nbytes,
            clock=clock,
        )
        self._copies = Copies(records)
        self.committer = Committer(records, layout, self._copies, exact_chunk=settings.exact_chunk)
        in_rows = self.committer.keeps_pages_in_rows
        self.parking = Parking(records, layout, self._copies, keeps_pages_in_rows=in_rows)
        self.loader = Loader(records)
        self.restorer = Restorer(
            records,
            layout,
            committer=self.committer,
            loader=self.loader,
            parking=self.parking,
            weighs_hits=settings.weighs_hits,
        )
        self.integrity = IntegrityCheck(records)
        self._clock = clock
        self._garbage: Garbage | None = None
        self._estimates_file: EstimatesFile | None = None

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
        self._estimates_file = EstimatesFile(path, self.records.estimates, self._clock)

    def own_process(self) -> None:
        """Take charge of this process's garbage: it is collected when the engine has time."""
        self._garbage = Garbage(self._clock)

    # --- requests --------------------------------------------------------------------------

    def open(self, prompt: Prompt, namespace: Namespace, control: CacheControl) -> Cursor:
        try:
            self.parking.sweep()
            self.records.expire()
            cursor = self._cursor(prompt, namespace, control)
        except Exception as e:
            self.records.failed("open", e, namespace=namespace)
            return NullCursor()
        try:
            self.loader.begin(cursor)
            self.loader.ask(cursor)
        except Exception as e:  # what memory has can still be restored
            self.records.failed("open", e, namespace=namespace)
            self.loader.stop(cursor)
            self.loader.unlease(cursor)
        return cursor

    def _cursor(self, prompt: Prompt, namespace: Namespace, control: CacheControl) -> PrefixCursor:
        root = self.records.catalogue.root(namespace, prompt.recipe)
        request = CacheRequest(
            root,
            prompt,
            packed_tokens(prompt),
            control,
            self._clock,
            patient_until=self._clock.elapsed() + self.records.tiers.deadline_s,
        )
        # A prompt with a recipe was looked up and counted before, as it was sent.
        reuse = Reuse(is_counted=bool(prompt.recipe))
        committed = self.committer.begin(root, writes=control.write)
        return PrefixCursor(request, committed, Loads(), reuse, self)

    def together(self) -> AbstractContextManager[None]:
        return self._copies.together()

    # --- between two steps -----------------------------------------------------------------

    def tick(self, load: EngineLoad) -> None:
        is_idle = load is EngineLoad.NONE
        with self.records.absorbing("tick"):
            self.parking.sweep()
            if is_idle:
                self.records.expire()
                self.integrity.tick()
                if self._estimates_file is not None:
                    self._estimates_file.tick()
            if self._garbage is not None:
                self._garbage.tick(idle=is_idle)
            for tier, event in self.records.poll(load):
                match event:
                    case RecordRead():
                        self.loader.was_read(tier, event)
                    case ReadFailed():
                        self.loader.read_failed(event)
                    case StoreAnswered():
                        self.loader.store_answered(tier, event)
                    case ScanBatch(changes) if self._garbage is not None:
                        self._garbage.keep(n_new=len(changes))
        for cursor in self.loader.tick():
            self.restorer.correct_reason(cursor)

    def confirm(self) -> None:
        with self.records.absorbing("confirm"):
            self.records.confirm()

    def discard_unconfirmed(self) -> None:
        with self.records.absorbing("doubt"):
            self.records.discard_unconfirmed()
            self.parking.discard_unconfirmed()

    def take_fault(self) -> Exception | None:
        return self.records.take_fault()

    def set_room(self, nbytes: int) -> None:
        limit = max(min(nbytes, self.settings.limit_nbytes), 0)
        try:
            self.parking.sweep()
            self.records.set_limit(limit)
        except Exception as e:  # most likely there is no memory to copy records out of rows
            self.records.failed("room", e)
            with self.records.absorbing("room"):
                self.parking.drop_all()
                self.records.set_limit(limit)

    @property
    def prefill(self) -> PrefillSpeed:
        return self.records.estimates.prefill

    def observe_restore(self, restored: Restored, seconds: float) -> None:
        self.records.estimates.observe_fill(restored.nbytes, seconds)

    @property
    def settled(self) -> bool:
        """Whether nothing is left to forget, to spill or to check."""
        return self.records.settled and not self.integrity.is_running

    def close(self) -> None:
        if self._estimates_file is not None:
            self._estimates_file.save()
        self.parking.sweep()
        self.records.close()

    # --- for people ------------------------------------------------------------------------

    @property
    def stats(self) -> Stats:
        """What was counted for all namespaces."""
        return self.records.counts.total

    def probe(self, prompt: Prompt, namespace: Namespace) -> Probe:
        """What a request with this prompt would resume from, by loading if that pays."""
        self.parking.sweep()
        cursor = self._cursor(prompt, namespace, CacheControl(write=False))
        try:
            match = self.restorer.preview(cursor)
            return Probe(
                match,
                self.restorer.shared(cursor),
                dict(self.restorer.stored_in(match)),
                self.restorer.why_not_more(cursor, match.n_tokens),
            )
        finally:
            self.records.unlease(cursor.committed.node)


@dataclass(eq=False)
class PrefixCursor(CacheCursor):
    """Implements core.ports.Cursor: what the engine asks of the cache for one request."""

    cache: PrefixCache
    closed: bool = False

    def restore(self) -> Restored | None:
        cache = self.cache
        try:
            cache.parking.sweep()
            return cache.restorer.restore(self)
        except Exception as e:
            self._failed("restore", e)
            cache.loader.stop(self)
            cache.committer.stop(self)
            cache.restorer.give_up(self)
            return None

    def advance(self, n_tokens: int) -> Restored | None:
        if not self.request.control.read:
            return None
        try:
            self.cache.parking.sweep()
            return self.cache.restorer.advance(self, n_tokens)
        except Exception as e:
            self._failed("advance", e)
            self.cache.loader.stop(self)
            return None

    def filled(self, row: LiveRow) -> None:
        with self._absorbing("filled"):
            self.cache.restorer.filled(self, row)

    def not_filled(self, error: Exception) -> None:
        self._failed("fill", error)
        self.close(None)

    def stops(self) -> Sequence[int]:
        return () if self.cache.settings.exact_chunk else list(self.committed.due)

    def commit_due(self, n_tokens: int) -> bool:
        return self.cache.committer.is_due(self, n_tokens)

    def commit(self, row: LiveRow) -> None:
        if not self._may_write:
            return
        try:
            self.cache.committer.commit(self, row)
        except Exception as e:
            self._failed("commit", e)
            self.cache.committer.stop(self)

    def fork(self, reply: Sequence[int]) -> Cursor:
        cache = self.cache
        with self._absorbing("fork"):
            cache.loader.stop(self)
            cache.loader.unlease(self)
            cache.restorer.count(self)
            if not cache.settings.exact_chunk:  # exact mode keeps only what prefill computed
                request, committed = replace(self.request, reply=reply), cache.committer.fork(self)
                return PrefixCursor(request, committed, Loads(), Reuse(is_counted=True), cache)
        return NullCursor()

    def hand_over(self, row: LiveRow) -> None:
        with self._absorbing("hand over"):
            self.cache.parking.move_out(row)
            self.cache.committer.is_in(self, None)
        self.close(None)

    def close(self, row: LiveRow | None) -> None:
        if self.closed:
            return
        self.closed = True
        cache, records, committed = self.cache, self.cache.records, self.committed
        cache.loader.stop(self)
        cache.restorer.count(self)
        with self._absorbing("close"):
            if row is not None and self._may_write and not cache.settings.exact_chunk:
                cache.committer.commit(self, row)
                cache.committer.commit_tail(self, row)
        with self._absorbing("park"):
            if row is not None:
                cache.parking.end(row)
            else:
                cache.parking.abandon(committed.pages)
                cache.committer.is_in(self, None)
        with self._absorbing("close"):
            cache.loader.release(self)
        with self._absorbing("close"):
            if committed.node.parent is not None:
                records.used(committed.node)
        with self._absorbing("close"):
            records.unlease(committed.node)

    @property
    def _may_write(self) -> bool:
        """Whether it may write: what was cleared since the request began must not come back."""
        return self.writes and self.cache.records.tree.is_attached(self.request.root)

    def _failed(self, where: str, error: Exception) -> None:
        self.cache.records.failed(where, error, namespace=self.request.root.namespace)

    def _absorbing(self, where: str) -> AbstractContextManager[None]:
        return self.cache.records.absorbing(where, namespace=self.request.root.namespace)
