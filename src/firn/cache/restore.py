"""Finding a prompt's stored prefix and bringing it back, from memory or from below it.

A load is worth its time only if computing takes longer: the resume point with the earliest predicted
first token wins, be it the longest or not. Whatever goes wrong with a load, the request goes on from a
shorter prefix.

Owner: the engine thread, through the prefix cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from firn.cache.codecs import Arrays, slice_tokens
from firn.cache.holdings import Holdings
from firn.cache.index import Node, Record
from firn.cache.layout import Layout
from firn.cache.match import Match, find, options
from firn.cache.parts import Part
from firn.cache.trail import CacheTrail, Loading, Piece
from firn.core.ports import Restored

MAX_OPTIONS = 64
"""Resume points that are weighed against each other."""
MAX_ATTEMPTS = 3
MIN_DEADLINE_S, DEADLINE_FACTOR = 5.0, 10.0

SWITCHED_OFF = Match(0, (), (), 0, "reading switched off")


class Restorer:
    def __init__(self, holdings: Holdings, layout: Layout, *, saves_pieces: bool) -> None:
        self._held = holdings
        self._saves_pieces = saves_pieces
        self._needs = holdings.needs
        self._layout = layout

    # --- fetching --------------------------------------------------------------------------

    def fetch(self, trail: CacheTrail) -> None:
        """Start to load what the best resume point needs from below memory."""
        if self._held.store is None or not trail.control.read:
            return
        match = self.choose(trail)
        missing = [r for r in match.records if r.payload is None and r not in trail.loaded]
        if not missing:
            return
        nbytes = sum(r.nbytes for r in missing)
        predicted = self._held.estimates.load_s(nbytes)
        now = self._held.clock()
        deadline = now + max(MIN_DEADLINE_S, DEADLINE_FACTOR * predicted)
        trail.loading = Loading(set(missing), nbytes, began=now, deadline=deadline)
        trail.n_fetches += 1
        for record in match.records:
            record.n_leases += 1
            trail.leased.append(record)
        for record in missing:
            self._held.store.load(record)

    def arrived(self, trail: CacheTrail, record: Record, payload: list[Arrays] | None) -> None:
        """A load ended, well (with a payload) or not."""
        loading = trail.loading
        if loading is None or record not in loading.missing:
            return
        loading.missing.discard(record)
        if payload is None:
            loading.failed = True
        else:
            trail.loaded[record] = payload
        if loading.missing:
            return
        trail.loading = None
        if not loading.failed:
            self._held.estimates.saw_load(loading.nbytes, self._held.clock() - loading.began)
        elif trail.n_fetches < MAX_ATTEMPTS:
            self.fetch(trail)

    def choose(self, trail: CacheTrail) -> Match:
        """The resume point with the earliest predicted first token."""
        n_prompt = len(trail.prompt)
        found = options(
            trail.root,
            trail.prompt,
            trail.keys,
            self._needs,
            _obtainable,
            unbroken=trail.unbroken,
        )
        best, best_s, slower = None, 0.0, False
        for match in _spread(found):
            nbytes = sum(r.nbytes for r in match.records if r.payload is None)
            seconds = self._held.estimates.load_s(nbytes)
            seconds += self._held.estimates.prefill_s(match.n_tokens, n_prompt)
            if best is None or seconds < best_s:
                slower = best is not None
                best, best_s = match, seconds
            if not nbytes:
                break  # what is shorter and in memory too can only be slower
        assert best is not None
        if slower:
            self._held.stats.dropped["slower to load than to compute"] += 1
        return best

    # --- restoring -------------------------------------------------------------------------

    def match(self, trail: CacheTrail) -> Match:
        """The longest prefix that can be restored right now."""
        if not trail.control.read:
            return SWITCHED_OFF

        def have(record: Record) -> bool:
            return record.payload is not None or record in trail.loaded

        return find(
            trail.root, trail.prompt, trail.keys, self._needs, have, unbroken=trail.unbroken
        )

    def resume(self, trail: CacheTrail, match: Match) -> Restored:
        """Let the trail go on from the match; the layers are filled when the row is made."""
        loaded, trail.loaded = trail.loaded, {}
        self._held.used(match.records)
        whole = [s.node for s in match.segments if s.n_tokens == self._held.identity.block]
        if whole:
            trail.move(whole[-1], self._held)
        if trail.writes:
            self._held.extend_life(match.segments[-1].node, trail.control.ttl_s)
        trail.n_saved = trail.node.end
        if self._saves_pieces and match.n_tokens > trail.node.end:
            last = match.segments[-1]
            saved = _payload(last.node, Part.WINDOW, last.n_tokens, loaded)
            trail.pieces = [Piece(trail.node.end, match.n_tokens, saved)]
            trail.n_saved = match.n_tokens
        trail.due = {p: m for p, m in trail.due.items() if p > match.n_tokens}
        return Restored(
            match.n_tokens,
            lambda layers: self._fill(layers, match, loaded),
            loaded_nbytes=sum(r.nbytes for r in loaded),
        )

    def tiers(self, trail: CacheTrail, match: Match) -> tuple[tuple[str, int], ...]:
        """How many of the match's tokens came from where. A load counts, even if it is held by now."""
        return tuple(match.by_tier(lambda r: r in trail.loaded).items())

    def _fill(self, layers: list[Any], match: Match, loaded: dict[Record, list[Arrays]]) -> None:
        try:
            self._fill_parts(layers, match, loaded)
        except Exception as e:  # the engine starts an empty row instead
            self._held.failed("fill", e)
            raise

    def _fill_parts(
        self, layers: list[Any], match: Match, loaded: dict[Record, list[Arrays]]
    ) -> None:
        n = match.n_tokens
        if self._needs.pages:
            pieces = [_payload(s.node, Part.PAGES, s.n_tokens, loaded) for s in match.segments]
            self._layout.fill(Part.PAGES, layers, pieces, n)
        if self._needs.window:
            pieces, covered = [], 0
            for s in match.segments:
                covered += s.n_tokens
                if covered > n - self._needs.window:
                    pieces.append(_payload(s.node, Part.WINDOW, s.n_tokens, loaded))
            self._layout.fill(Part.WINDOW, layers, pieces, n)
        if match.state is not None:
            state = _of(match.state, loaded)
            self._layout.fill(Part.STATE, layers, [state], n)


def _spread(options: Iterable[Match]) -> Iterator[Match]:
    """So many of them, evenly over the prompt: the longest, the empty one, and some between."""
    last, gap = math.inf, 0.0
    for match in options:
        if not match.n_tokens or last - match.n_tokens >= gap:
            gap = gap or match.n_tokens / MAX_OPTIONS
            last = match.n_tokens
            yield match


def _obtainable(record: Record) -> bool:
    return record.payload is not None or record.stored


def _of(record: Record, loaded: dict[Record, list[Arrays]]) -> list[Arrays]:
    payload: list[Arrays] = loaded.get(record) or record.payload
    return payload


def _payload(
    node: Node, part: Part, n_tokens: int, loaded: dict[Record, list[Arrays]]
) -> list[Arrays]:
    layers = _of(node.records[part], loaded)
    if n_tokens == len(node.values):
        return layers
    return [slice_tokens(a, 0, n_tokens) for a in layers]
