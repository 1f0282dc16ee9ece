"""The prefix cache as the engine drives it. One for all kinds of layers, one for all tiers.

Nothing raises out of these methods: a fault is logged, counted, and becomes a miss.

Owner: the engine thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from firn.cache import checkpoints
from firn.cache.commit import Committer
from firn.cache.holdings import Holdings, Identity
from firn.cache.index import Node
from firn.cache.io import Io
from firn.cache.layout import Layout
from firn.cache.match import Match, Segment, common_prefix
from firn.cache.off import BlankTrail
from firn.cache.restore import Restorer
from firn.cache.stats import Stats
from firn.cache.store import Arrived, Lost
from firn.cache.trail import CacheTrail
from firn.core.events import Admitted
from firn.core.keys import Key, block_keys, key_tokens
from firn.core.ports import LiveRow, Load, Restored
from firn.core.values import CacheControl, Namespace, Prompt

AnyTrail = CacheTrail | BlankTrail
NO_MATCH = Match(0, (), (), 0, "fault")


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
    ) -> None:
        self.settings = settings
        identity = Identity(fingerprint, settings.layout(layout, dtype), settings.block)
        needs = layout.needs(grid=settings.exact_chunk or 1)
        self.held = Holdings(identity, needs, settings.limit_nbytes, clock)
        self._committer = Committer(self.held, layout, exact_chunk=settings.exact_chunk)
        self._restorer = Restorer(self.held, layout, saves_pieces=self._committer.piece_tokens > 0)
        self._clock = clock
        self._open: set[CacheTrail] = set()
        """Trails that wait for a load."""
        self._stats_by_root: dict[Key, Stats] = {}

    @property
    def stats(self) -> Stats:
        return self.held.stats

    def open_store(
        self, io: Io, *, namespaces: Sequence[Namespace], wake: Callable[[], None]
    ) -> None:
        """Put a tier below memory. `wake` gets the engine to poll. Blocks for the first scan."""
        for namespace in namespaces:
            self.held.root(namespace)
        self.held.open_store(io, wake=wake)

    # --- a request's way -------------------------------------------------------------------

    def open(self, prompt: Prompt, namespace: Namespace, control: CacheControl) -> AnyTrail:
        try:
            self.held.expire()
            trail = self._trail(prompt, namespace, control)
        except Exception as e:
            self.held.failed("open", e)
            return BlankTrail()
        try:
            self._restorer.fetch(trail)
            if not trail.ready:
                self._open.add(trail)
        except Exception as e:  # what is in memory can be restored all the same
            self.held.failed("open", e)
            trail.loading = None
            trail.unlease_records()
        return trail

    def restore(self, trail: AnyTrail) -> Restored | None:
        if isinstance(trail, BlankTrail):
            return None
        try:
            return self._restore(trail)
        except Exception as e:
            self.held.failed("restore", e)
            trail.writes = False
            trail.found = Admitted(0, reason="fault")
            self._count(NO_MATCH, trail.found, len(trail.prompt), trail.root.key)
            return None

    def advance(self, trail: AnyTrail, n_tokens: int) -> Restored | None:
        if isinstance(trail, BlankTrail) or not trail.control.read:
            return None
        block = self.settings.block
        i = trail.node.end // block
        ahead = trail.node.children.get(trail.keys[i]) if i < len(trail.keys) else None
        if ahead is None:
            return None
        if ahead.records and all(r.payload is None for r in ahead.records.values()):
            return None  # below memory, and not worth a load
        try:
            match = self._restorer.match(trail)
            if match.n_tokens < n_tokens + block:
                return None
            self.stats.advanced(match.n_tokens - n_tokens)
            return self._restorer.resume(trail, match)
        except Exception as e:
            self.held.failed("advance", e)
            return None

    def stops(self, trail: AnyTrail) -> Sequence[int]:
        if isinstance(trail, BlankTrail) or self.settings.exact_chunk:
            return ()
        return list(trail.due)

    def commit(self, trail: AnyTrail, row: LiveRow) -> None:
        if isinstance(trail, BlankTrail) or not trail.writes:
            return
        try:
            self._committer.commit(trail, row)
        except Exception as e:
            self.held.failed("commit", e)
            trail.writes = False

    def fork(self, trail: AnyTrail, reply: Sequence[int]) -> AnyTrail:
        if isinstance(trail, BlankTrail) or self.settings.exact_chunk:
            return BlankTrail()  # exact mode keeps only what prefill computed
        self.held.lease(trail.node)
        return CacheTrail(
            root=trail.root,
            prompt=trail.prompt,
            keys=trail.keys,
            boundaries=trail.boundaries,
            hints=trail.hints,
            control=trail.control,
            node=trail.node,
            writes=trail.writes,
            step=trail.step,
            clock=trail.clock,
            reply=reply,
            pieces=list(trail.pieces),
            n_saved=trail.n_saved,
        )

    def close_trail(self, trail: AnyTrail, row: LiveRow | None) -> None:
        if isinstance(trail, BlankTrail) or trail.closed:
            return
        trail.closed = True
        self._open.discard(trail)
        try:
            if row is not None and trail.writes and not self.settings.exact_chunk:
                self._committer.commit(trail, row)
                self._committer.commit_tail(trail, row)
        except Exception as e:
            self.held.failed("close", e)
        try:
            trail.unlease_records()
            self.held.unlease(trail.node)
        except Exception as e:
            self.held.failed("close", e)

    def blank(self) -> BlankTrail:
        return BlankTrail()

    # --- upkeep ----------------------------------------------------------------------------

    def set_room(self, nbytes: int) -> None:
        try:
            self.held.pool.limit_nbytes = max(min(nbytes, self.settings.limit_nbytes), 0)
            self.held.pool.shrink_to(self.held.pool.limit_nbytes)
        except Exception as e:
            self.held.failed("room", e)

    def tick(self, load: Load) -> None:
        try:
            if load is Load.NONE:
                self.held.expire()
            if self.held.store is not None:
                for news in self.held.store.poll(load):
                    self.held.note(news)
                    if isinstance(news, Arrived | Lost):
                        payload = news.payload if isinstance(news, Arrived) else None
                        for trail in [t for t in self._open if t.loading is not None]:
                            self._restorer.arrived(trail, news.record, payload)
        except Exception as e:
            self.held.failed("tick", e)

    @property
    def settled(self) -> bool:
        """Nothing is left to spill."""
        return self.held.store is None or self.held.store.idle

    def saw_prefill(self, start: int, end: int, seconds: float) -> None:
        self.held.estimates.saw_prefill(start, end, seconds)

    def saw_restore(self, restored: Restored, seconds: float) -> None:
        if restored.loaded_nbytes:
            self.held.estimates.saw_fill(restored.loaded_nbytes, seconds)

    def close(self) -> None:
        if self.held.store is not None:
            self.held.store.close()

    # --- views -----------------------------------------------------------------------------

    def stats_of(self, namespace: Namespace) -> Stats:
        """One namespace's own lookups and commits."""
        return self._stats_by_root.get(self.held.identity.root(namespace), Stats())

    def nodes_of(self, namespace: Namespace) -> list[Node]:
        root = self.held.root(namespace)
        nodes = [n for n in self.held.index.below(root) if n is not root]
        self.held.index.prune(root)
        return nodes

    def look_up(self, prompt: Prompt, namespace: Namespace) -> Match:
        """What a request with this prompt would resume at. Changes nothing."""
        trail = self._trail(prompt, namespace, CacheControl(write=False))
        try:
            return self._restorer.choose(trail)
        finally:
            self.held.unlease(trail.node)

    # --- inside ----------------------------------------------------------------------------

    def _trail(self, prompt: Prompt, namespace: Namespace, control: CacheControl) -> CacheTrail:
        values = key_tokens(prompt.ids, prompt.media)
        keys = block_keys(self.held.identity.root(namespace), values, self.settings.block)
        root = self.held.root(namespace)
        self.held.lease(root)
        return CacheTrail(
            root=root,
            prompt=values,
            keys=keys,
            boundaries=prompt.boundaries,
            hints=prompt.hints,
            control=control,
            node=root,
            writes=control.write,
            step=self._committer.step,
            clock=self._clock,
            unbroken=prompt.unbroken,
        )

    def _restore(self, trail: CacheTrail) -> Restored | None:
        n_prompt = len(trail.prompt)
        self._open.discard(trail)
        match = self._restorer.match(trail)
        if trail.loading is not None:
            self.stats.faults["read: too slow"] += 1
            trail.loading = None
        tiers = self._restorer.tiers(trail, match)
        if self.held.needs.state and trail.writes:
            trail.due = checkpoints.due(
                trail.boundaries,
                n_prompt,
                n_restored=match.n_tokens,
                n_shared=match.n_shared,
                hints=trail.hints,
                grid=self.settings.exact_chunk or 1,
            )
        restored = self._restorer.resume(trail, match) if match.n_tokens else None
        trail.unlease_records()
        trail.found = Admitted(match.n_tokens, tiers, match.reason)
        self._count(match, trail.found, n_prompt, trail.root.key)
        return restored

    def _count(self, match: Match, found: Admitted, n_prompt: int, root: Key) -> None:
        kind = "branching"
        if match.n_tokens >= n_prompt - 1:
            kind = "whole"
        elif match.segments and _is_the_end(match.segments[-1]):
            kind = "growing"
        saved = self.held.estimates.prefill_s(0, match.n_tokens)
        for stats in (self.stats, self._stats_by_root.setdefault(root, Stats())):
            stats.looked_up(
                n_prompt=n_prompt,
                n_cached=match.n_tokens,
                kind=kind,
                reason=match.reason,
                tiers=found.tiers,
            )
            stats.seconds_saved += saved


def _is_the_end(last: Segment) -> bool:
    """Whether nothing stored goes on from here: the prompt has used all there was."""
    node = last.node
    if node.children or node.parent is None or last.n_tokens < len(node.values):
        return False
    n = len(node.values)
    siblings = node.parent.children.values()
    return not any(
        len(c.values) > n and common_prefix(c.values, node.values) == n for c in siblings
    )
