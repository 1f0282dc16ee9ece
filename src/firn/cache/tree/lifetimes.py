"""How long nodes live if a request has set a lifetime, and which blocks were evicted.

Owner: the tree. Only `Lifetimes` writes `Node.expires_at`.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from itertools import count

from firn.cache.tree.nodes import Node
from firn.core.clock import Clock
from firn.core.keys import child_key
from firn.core.values import KeyTokens

RETRY_S = 60.0
"""A node that expires while it is in use is checked again after this time."""
N_REMEMBERED = 1 << 16
"""Evicted blocks that are remembered, so that a miss can name its reason."""


class Lifetimes:
    """A node lives at least as long as every node below it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._queue: list[tuple[float, int, Node]] = []
        """When to check a node: one entry per expiring node, however often its life is extended."""
        self._n_idle = 0
        """Entries of nodes that are gone, or no longer expire."""
        self._serial = count()

    def begin(self, node: Node) -> None:
        """A new node has no lifetime until `extend` gives it one."""
        node.expires_at = -math.inf

    def extend(self, node: Node, ttl_s: float | None) -> list[Node]:
        """Let the node and all above it live at least this long; None: until there is no room.

        Returns the nodes that would have expired and now will not.
        """
        until = math.inf if ttl_s is None else self._clock.elapsed() + ttl_s
        freed = []
        for n in node.path():
            if n.expires_at >= until:
                break
            is_new = n.expires_at == -math.inf
            n.expires_at = until
            if until == math.inf:
                freed += [] if is_new else [n]
            elif is_new:
                self._look_at(n, until)
        self._n_idle += len(freed)
        self._tidy()
        return freed

    def end(self, node: Node) -> None:
        """The node was removed from the tree, which is usually long before it expires."""
        if math.isfinite(node.expires_at):
            self._n_idle += 1
            self._tidy()

    def _tidy(self) -> None:
        """Drop idle entries before they outnumber the others."""
        if self._n_idle > 64 + len(self._queue) / 2:
            self._queue = [entry for entry in self._queue if _expires(entry[-1])]
            heapq.heapify(self._queue)
            self._n_idle = 0

    def _look_at(self, node: Node, at: float) -> None:
        heapq.heappush(self._queue, (at, next(self._serial), node))

    def expired(self) -> Iterator[Node]:
        """Nodes that have expired; one that is in use is checked again after RETRY_S."""
        now = self._clock.elapsed()
        while self._queue and self._queue[0][0] <= now:
            *_, node = heapq.heappop(self._queue)
            if not _expires(node):
                self._n_idle -= 1
                continue
            if node.expires_at > now:
                self._look_at(node, node.expires_at)
            elif node.n_leases or node.n_pins:
                self._look_at(node, now + RETRY_S)
            else:
                yield node


def _expires(node: Node) -> bool:
    return node.parent is not None and node.expires_at != math.inf


class EvictedBlocks:
    """The keys of blocks that were evicted to make room; the oldest are forgotten first."""

    def __init__(self) -> None:
        self._keys: dict[bytes, None] = {}

    def add(self, node: Node) -> None:
        if node.parent is None:
            return
        for tokens in (node.tokens, node.tokens[:1]):
            self._keys[child_key(node.parent.key, tokens)[:8]] = None
        while len(self._keys) > 2 * N_REMEMBERED:
            del self._keys[next(iter(self._keys))]

    def had(self, parent: Node, tokens: KeyTokens) -> bool:
        """Whether a child with these tokens was evicted; for a single token, whether a child that
        began with it was."""
        return bool(self._keys) and child_key(parent.key, tokens)[:8] in self._keys
