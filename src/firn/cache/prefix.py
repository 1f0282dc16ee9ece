"""The prefix cache: match, restore, commit. One for all kinds of layers.

Owner: the engine thread. Nothing raises out of the methods that the engine drives: a fault is logged,
counted, and becomes a miss.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from firn.cache import checkpoints
from firn.cache.codecs import Arrays, At, evaluate, joined_copy, nbytes_of, slice_tokens
from firn.cache.index import Index, Mark, Node, Record
from firn.cache.layout import Layout
from firn.cache.match import Match, common_prefix, find
from firn.cache.off import BlankTrail
from firn.cache.parts import Needs, Part
from firn.cache.pool import Pool
from firn.cache.stats import Stats
from firn.cache.trail import CacheTrail, Piece
from firn.core.events import Admitted
from firn.core.keys import Key, block_keys, key_tokens, root_key
from firn.core.ports import LiveRow, Restored
from firn.core.values import CacheControl, Namespace, Prompt

log = logging.getLogger("firn.cache")
DEFAULT_SECONDS_PER_TOKEN = 1e-3


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
        self.stats = Stats()
        self.index = Index()
        self.pool = Pool(
            self.index,
            limit_nbytes=settings.limit_nbytes,
            worth=self._worth,
            on_evict=self._on_evict,
        )
        self.needs: Needs = layout.needs(grid=settings.exact_chunk or 1)
        self._layout = layout
        self._layout_text = settings.layout(layout, dtype)
        self._fingerprint = fingerprint
        self._mortal: set[Node] = set()
        self._stats_by_root: dict[Key, Stats] = {}
        self._clock = clock
        self._seconds_per_token = DEFAULT_SECONDS_PER_TOKEN
        # A ring smaller than a block loses tokens before the block is whole: save them in pieces.
        # One token more may be in flight when the pieces are cut.
        small = 0 < layout.smallest_window < settings.block + 2
        self._piece_tokens = max(layout.smallest_window - 2, 1) if small else 0

    # --- the engine's side -----------------------------------------------------------------

    def open(
        self, prompt: Prompt, namespace: Namespace, control: CacheControl
    ) -> CacheTrail | BlankTrail:
        try:
            return self._open(prompt, namespace, control)
        except Exception as e:
            self._fault("open", e)
            return BlankTrail()

    def restore(self, trail: CacheTrail | BlankTrail) -> Restored | None:
        if isinstance(trail, BlankTrail):
            return None
        try:
            return self._restore(trail)
        except Exception as e:
            self._fault("restore", e)
            trail.writes = False
            return None

    def advance(self, trail: CacheTrail | BlankTrail, n_tokens: int) -> Restored | None:
        """What a neighbour with the same prefix has committed meanwhile, if it is a block or more."""
        if isinstance(trail, BlankTrail) or not trail.control.read:
            return None
        i = n_tokens // self.settings.block
        if i >= len(trail.keys) or trail.keys[i] not in self._children_at(trail, i):
            return None
        try:
            match = find(trail.root, trail.prompt, trail.keys, self.needs)
            if match.n_tokens < n_tokens + self.settings.block:
                return None
            self.stats.advanced(match.n_tokens - n_tokens)
            return self._resume(trail, match)
        except Exception as e:
            self._fault("advance", e)
            return None

    def stops(self, trail: CacheTrail | BlankTrail) -> Sequence[int]:
        if isinstance(trail, BlankTrail) or self.settings.exact_chunk:
            return ()
        return list(trail.due)

    def commit(self, trail: CacheTrail | BlankTrail, row: LiveRow) -> None:
        if isinstance(trail, BlankTrail) or not trail.writes:
            return
        try:
            self._commit(trail, row)
        except Exception as e:
            self._fault("commit", e)
            trail.writes = False

    def fork(self, trail: CacheTrail | BlankTrail, reply: Sequence[int]) -> CacheTrail | BlankTrail:
        if isinstance(trail, BlankTrail) or self.settings.exact_chunk:
            return BlankTrail()  # exact mode keeps only what prefill computed
        trail.node.n_leases += 1
        return CacheTrail(
            root=trail.root,
            prompt=trail.prompt,
            keys=trail.keys,
            boundaries=trail.boundaries,
            control=trail.control,
            node=trail.node,
            writes=trail.writes,
            step=trail.step,
            reply=reply,
            pieces=list(trail.pieces),
            n_saved=trail.n_saved,
        )

    def close_trail(self, trail: CacheTrail | BlankTrail, row: LiveRow | None) -> None:
        if isinstance(trail, BlankTrail) or trail.closed:
            return
        trail.closed = True
        try:
            if row is not None and trail.writes and not self.settings.exact_chunk:
                self._commit(trail, row)
                self._commit_tail(trail, row, Mark.REPLY_END)
        except Exception as e:
            self._fault("close", e)
        finally:
            self._unlease(trail.node)
            self.index.prune(trail.node)

    def blank(self) -> BlankTrail:
        return BlankTrail()

    def set_room(self, nbytes: int) -> None:
        self.pool.limit_nbytes = max(min(nbytes, self.settings.limit_nbytes), 0)
        self.pool.shrink_to(self.pool.limit_nbytes)

    def idle(self) -> None:
        self._expire()

    def close(self) -> None:
        pass

    def observe_prefill(self, n_tokens: int, seconds: float) -> None:
        """A chunk took this long: what recomputing costs."""
        if n_tokens >= 16:
            self._seconds_per_token += 0.1 * (seconds / n_tokens - self._seconds_per_token)

    def stats_of(self, namespace: Namespace) -> Stats:
        """One namespace's own lookups and commits."""
        return self._stats_by_root.get(self.root_of(namespace), Stats())

    def nodes_of(self, namespace: Namespace) -> list[Node]:
        root = self.index.root(self.root_of(namespace))
        nodes = [n for n in self.index.below(root) if n is not root]
        self.index.prune(root)
        return nodes

    # --- match and restore -----------------------------------------------------------------

    def root_of(self, namespace: Namespace) -> Key:
        return root_key(
            fingerprint=self._fingerprint, layout=self._layout_text, namespace=namespace
        )

    def _open(self, prompt: Prompt, namespace: Namespace, control: CacheControl) -> CacheTrail:
        self._expire()
        values = key_tokens(prompt.ids, prompt.media)
        root = self.index.root(self.root_of(namespace))
        root.n_leases += 1
        return CacheTrail(
            root=root,
            prompt=values,
            keys=block_keys(root.key, values, self.settings.block),
            boundaries=prompt.boundaries,
            control=control,
            node=root,
            writes=control.write,
            step=self._piece_tokens or self.settings.block,
        )

    def _restore(self, trail: CacheTrail) -> Restored | None:
        n_prompt = len(trail.prompt)
        if trail.control.read:
            match = find(trail.root, trail.prompt, trail.keys, self.needs)
        else:
            match = Match(0, (), None, 0, "reading switched off")
        self._count(match, n_prompt, trail.root.key)
        tiers = (("memory", match.n_tokens),) if match.n_tokens else ()
        trail.found = Admitted(match.n_tokens, tiers, match.reason)
        if self.needs.state and trail.writes:
            trail.due = checkpoints.due(
                trail.boundaries,
                n_prompt,
                n_restored=match.n_tokens,
                n_shared=match.n_shared,
                grid=self.settings.exact_chunk or 1,
            )
        return self._resume(trail, match) if match.n_tokens else None

    def _resume(self, trail: CacheTrail, match: Match) -> Restored:
        self.pool.touch(match.records)
        self._move_to(trail, match)
        trail.due = {p: m for p, m in trail.due.items() if p > match.n_tokens}
        return Restored(match.n_tokens, lambda layers: self._fill(layers, match))

    def _children_at(self, trail: CacheTrail, i: int) -> dict[Key, Node]:
        """Children of the trail's committed node, if that is where block i begins."""
        return trail.node.children if trail.node.end == i * self.settings.block else {}

    def _fill(self, layers: list[Any], match: Match) -> None:
        n = match.n_tokens
        if self.needs.pages:
            pieces = [self._payload(s.node, Part.PAGES, s.n_tokens) for s in match.segments]
            self._layout.fill(Part.PAGES, layers, pieces, n)
        if self.needs.window:
            pieces, covered = [], 0
            for s in match.segments:
                covered += s.n_tokens
                if covered > n - self.needs.window:
                    pieces.append(self._payload(s.node, Part.WINDOW, s.n_tokens))
            self._layout.fill(Part.WINDOW, layers, pieces, n)
        if match.state is not None:
            self._layout.fill(Part.STATE, layers, [match.state.payload], n)

    def _payload(self, node: Node, part: Part, n_tokens: int) -> list[Arrays]:
        layers: list[Arrays] = node.records[part].payload
        if n_tokens == len(node.values):
            return layers
        return [slice_tokens(a, 0, n_tokens) for a in layers]

    def _move_to(self, trail: CacheTrail, match: Match) -> None:
        """The trail goes on from the last whole block of what was restored."""
        whole = [s.node for s in match.segments if s.n_tokens == self.settings.block]
        if whole:
            self._lease(trail, whole[-1])
        if trail.writes:
            self._extend_life(trail.node, trail.control.ttl_s)
        trail.n_saved = trail.node.end
        if self._piece_tokens and match.n_tokens > trail.node.end:
            last = match.segments[-1]
            saved = self._payload(last.node, Part.WINDOW, last.n_tokens)
            trail.pieces = [Piece(trail.node.end, match.n_tokens, saved)]
            trail.n_saved = match.n_tokens

    # --- commit ----------------------------------------------------------------------------

    def _commit(self, trail: CacheTrail, row: LiveRow) -> None:
        """Whole blocks, then a state if one is due here. Costs what the new tokens cost."""
        new: list[Record] = []
        at = At(row.index, row.n_tokens)
        self._save_pieces(trail, row, at)
        end = min(row.n_tokens, trail.n_known)
        if self.settings.exact_chunk:
            end -= end % self.settings.exact_chunk
        block = self.settings.block
        while trail.writes and trail.node.end + block <= end:
            start = trail.node.end
            values = trail.values(start, start + block)
            i = start // block
            key = trail.keys[i] if i < len(trail.keys) else None
            node = self.index.child(trail.node, values, key=key)
            if not self._store(trail, node, row, at, new):
                break
            self._supersede(node)
            self._lease(trail, node)
            trail.pieces = [p for p in trail.pieces if p.end > node.end]
            trail.n_saved = max(trail.n_saved, node.end)
        mark = trail.due.pop(row.n_tokens, None)
        if mark is not None:
            self._commit_state(trail, row, at, mark, new)
        evaluate([r.payload for r in new if r.payload])

    def _commit_tail(self, trail: CacheTrail, row: LiveRow, mark: Mark) -> None:
        """What the row holds beyond its last whole block, so that reuse is exact to the token."""
        if not trail.writes or row.n_tokens > trail.n_known or row.n_tokens <= trail.node.start:
            return
        new: list[Record] = []
        at = At(row.index, row.n_tokens)
        if self.needs.state:
            self._commit_state(trail, row, at, mark, new)
        elif row.n_tokens > trail.node.end:
            values = trail.values(trail.node.end, row.n_tokens)
            if not self._covered(trail.node, values):
                tail = self.index.child(trail.node, values)
                self._store(trail, tail, row, at, new)
                self._supersede(tail)
        evaluate([r.payload for r in new if r.payload])

    def _commit_state(
        self, trail: CacheTrail, row: LiveRow, at: At, mark: Mark, new: list[Record]
    ) -> None:
        """Keep the state at the row's position, with the pages of its unfinished block."""
        n = row.n_tokens
        if n == trail.node.end:
            node = trail.node
            if node.parent is None:
                return
        else:
            node = self.index.child(trail.node, trail.values(trail.node.end, n))
            if not self._store(trail, node, row, at, new):
                return
        if node.has(Part.STATE):
            self.pool.touch([node.records[Part.STATE]])
            return
        payload = self._layout.cut(Part.STATE, row.live_layers, at, 0, n)
        self._add(node, Part.STATE, payload, mark, new)
        self.index.prune(node)

    def _store(
        self, trail: CacheTrail, node: Node, row: LiveRow, at: At, new: list[Record]
    ) -> bool:
        """Give the node its pages and window, unless it has them. False: there is no room."""
        node.n_leases += 1
        try:
            for part in self.needs.by_block:
                if part in node.records:
                    self.pool.touch([node.records[part]])
                    continue
                payload = self._cut(part, trail, node, row, at)
                if not self._add(node, part, payload, Mark.TURN, new):
                    trail.writes = False
                    self.forget(node)
                    return False
            self._extend_life(node, trail.control.ttl_s)
            return True
        finally:
            node.n_leases -= 1
            if not node.records and self.needs.by_block:
                self.index.prune(node)

    def _cut(self, part: Part, trail: CacheTrail, node: Node, row: LiveRow, at: At) -> list[Arrays]:
        if part is Part.WINDOW and self._piece_tokens:
            return _join_pieces(trail.pieces, node.start, node.end)
        return self._layout.cut(part, row.live_layers, at, node.start, node.end)

    def _save_pieces(self, trail: CacheTrail, row: LiveRow, at: At) -> None:
        if not self._piece_tokens or row.n_tokens <= trail.n_saved:
            return
        cut = self._layout.cut(Part.WINDOW, row.live_layers, at, trail.n_saved, row.n_tokens)
        evaluate([cut])
        trail.pieces.append(Piece(trail.n_saved, row.n_tokens, cut))
        trail.n_saved = row.n_tokens

    def _add(
        self, node: Node, part: Part, payload: list[Arrays], mark: Mark, new: list[Record]
    ) -> bool:
        nbytes = sum(nbytes_of(a) for a in payload)
        if not self.pool.make_room(nbytes, part=part):
            self.stats.dropped["no room"] += 1
            return False
        record = self.index.add(node, part, nbytes=nbytes, payload=payload, mark=mark)
        self.pool.admit(record)
        self.stats.commits[part.value] += 1
        new.append(record)
        return True

    # --- the tree's upkeep -----------------------------------------------------------------

    def _covered(self, parent: Node, values: Any) -> bool:
        return any(
            len(c.values) >= len(values)
            and common_prefix(c.values, values) == len(values)
            and all(c.has(p) for p in self.needs.by_block)
            for c in parent.children.values()
        )

    def _supersede(self, node: Node) -> None:
        """Tails that a longer node contains are of no more use, unless they hold a state."""
        assert node.parent is not None
        for other in list(node.parent.children.values()):
            if len(other.values) >= len(node.values) or other.has(Part.STATE) or other.n_leases:
                continue
            if common_prefix(other.values, node.values) == len(other.values):
                self.forget(other)

    def forget(self, node: Node) -> None:
        """Remove a node's records, in whatever tier they are."""
        parent = node.parent
        for record in list(node.records.values()):
            self.pool.drop(record)
            self.index.remove(record)
        if parent is not None:
            self.pool.rejoin(parent)

    def _extend_life(self, node: Node, ttl_s: float | None) -> None:
        """Let the node and all above it live at least this long: a child never outlives its parent."""
        until = math.inf if ttl_s is None else self._clock() + ttl_s
        for n in node.path():
            if n.expires_at >= until:
                return
            n.expires_at = until
            if until == math.inf:
                self._mortal.discard(n)
            else:
                self._mortal.add(n)

    def _expire(self) -> None:
        now = self._clock()
        for node in [n for n in self._mortal if n.expires_at <= now]:
            below = list(self.index.below(node))
            if any(n.n_leases for n in below):
                continue  # in use: the next sweep takes it
            for n in reversed(below):
                self.forget(n)
                self._mortal.discard(n)

    def _on_evict(self, record: Record) -> None:
        """A record left memory. Without its pages a node's other records cannot be used."""
        self.stats.evictions[record.part.value] += 1
        node = record.node
        self.index.remove(record)
        if record.part is Part.PAGES:
            self.forget(node)

    def _lease(self, trail: CacheTrail, node: Node) -> None:
        node.n_leases += 1
        previous, trail.node = trail.node, node
        self._unlease(previous)

    def _unlease(self, node: Node) -> None:
        node.n_leases -= 1
        self.pool.touch(r for r in node.records.values())

    def _worth(self, record: Record) -> float:
        """Seconds of recompute saved per megabyte."""
        n = len(record.node.values)
        if record.part is Part.WINDOW and record.node.n_occupied:
            n //= 8  # inside a chain only a branch would ask for it
        if record.part is Part.STATE:
            n = max(n, self.settings.block)
        return n * self._seconds_per_token / max(record.nbytes / 1e6, 1e-6)

    def _count(self, match: Match, n_prompt: int, root: Key) -> None:
        kind = "branching"
        if match.n_tokens >= n_prompt - 1:
            kind = "whole"
        elif match.segments and not match.segments[-1].node.children:
            last = match.segments[-1]
            kind = "growing" if last.n_tokens == len(last.node.values) else "branching"
        saved = match.n_tokens * self._seconds_per_token
        for stats in (self.stats, self._stats_by_root.setdefault(root, Stats())):
            stats.looked_up(
                n_prompt=n_prompt, n_cached=match.n_tokens, kind=kind, reason=match.reason
            )
            stats.seconds_saved += saved

    def _fault(self, where: str, error: Exception) -> None:
        self.stats.faults[where] += 1
        log.warning("the cache failed in %s, which costs a miss: %r", where, error, exc_info=error)


def _join_pieces(pieces: Sequence[Piece], start: int, end: int) -> list[Arrays]:
    """Window layers' tokens [start, end) out of pieces that cover them."""
    parts: list[list[Arrays]] = []
    covered = start
    for piece in pieces:
        if piece.end <= covered or piece.start >= end:
            continue
        first, last = covered - piece.start, min(piece.end, end) - piece.start
        parts.append([slice_tokens(a, first, last) for a in piece.layers])
        covered = piece.start + last
    if covered != end:
        raise ValueError(f"window pieces end at {covered}, not at {end}")
    return [joined_copy(p) for p in zip(*parts, strict=True)]
