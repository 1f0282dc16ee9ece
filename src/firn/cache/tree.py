"""The tree of stored prefixes: the only place that knows chains, and the only writer of their fields.

A node is a block of key tokens at one place in one chain of blocks; its key is the chained hash of all
tokens up to its end. A node with fewer tokens than a block is a tail. A node's records hold parts of the
model's state for it, in memory, in tiers below, or in both; a node without records is there for those
below it.

Three things never break a chain, because they hold for a node as soon as they hold for one under it:
leases and pins are counted for the whole branch, and a node was used, and lives, at least as long as
everything under it. So plain order of last use takes leaves before their parents (see `rank`).

Owner: the engine thread, through the prefix cache. Knows nothing of arrays: payloads are opaque.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import count
from typing import Any

import numpy as np

from firn.cache.children import Children, n_tokens_of, sortable, tokens_of
from firn.cache.parts import Part
from firn.core.keys import Key, KeyTokens, child_key
from firn.core.values import Namespace

HOUR_S, DAY_S = 3600.0, 86_400.0


class Mark(IntEnum):
    """Why a state was kept; the lowest go first when states must be thinned."""

    PROMPT_END = 0
    REPLY_END = 1
    TURN = 2
    LATTICE = 3
    BRANCH = 4
    SHARED = 5


class Record:
    """One part of one node, wherever it lies. Written by the tree alone."""

    __slots__ = ("arrays", "mark", "n_leases", "nbytes", "node", "part", "stored", "writing")

    def __init__(self, node: Node, part: Part, nbytes: int, mark: Mark) -> None:
        self.node = node
        self.part = part
        self.nbytes = nbytes
        self.mark = mark
        self.arrays: Any = None
        """What memory holds of it; None when it is not there."""
        self.stored = 0
        """Tiers that have it: one bit each, in the order of the configuration."""
        self.writing = 0
        """Tiers that it is on its way to, likewise."""
        self.n_leases = 0

    @property
    def alive(self) -> bool:
        """Still in the tree."""
        return self.node.records.get(self.part) is self


class Node:
    __slots__ = (
        "_children", "expires_at", "key", "n_leases", "n_pins", "n_uses", "parent", "records",
        "start", "text", "used_at",
    )  # fmt: skip

    def __init__(self, key: Key, parent: Node | None, start: int, text: bytes) -> None:
        self.key = key
        self.parent = parent
        self.start = start
        self.text = text
        self._children: Children[Node] | None = None
        self.records: dict[Part, Record] = {}
        self.n_leases = 0
        """Of the whole branch: of this node and of all under it."""
        self.n_pins = 0
        """Likewise."""
        self.used_at = 0.0
        """By the wall clock: it outlives the process, on the files of a tier. Never before a child's."""
        self.n_uses = 0
        """How often the node was resumed from or through; never fewer than a child's."""
        self.expires_at = math.inf

    @property
    def tokens(self) -> KeyTokens:
        return tokens_of(self.text)

    @property
    def n_tokens(self) -> int:
        return n_tokens_of(self.text)

    @property
    def end(self) -> int:
        return self.start + self.n_tokens

    @property
    def children(self) -> Children[Node]:
        return self._children if self._children is not None else _NO_CHILDREN

    def path(self) -> Iterator[Node]:
        """This node and those above it, without the root."""
        node: Node | None = self
        while node is not None and node.parent is not None:
            yield node
            node = node.parent


_NO_CHILDREN: Children[Node] = Children()


@dataclass(eq=False)
class Held:
    """Bytes and records, by part."""

    nbytes: dict[Part, int] = field(default_factory=lambda: dict.fromkeys(Part, 0))
    n_records: dict[Part, int] = field(default_factory=lambda: dict.fromkeys(Part, 0))

    def count(self, record: Record, sign: int) -> None:
        self.nbytes[record.part] += sign * record.nbytes
        self.n_records[record.part] += sign

    @property
    def total_nbytes(self) -> int:
        return sum(self.nbytes.values())


class Root(Node):
    """The root of one namespace's prefixes, with what is held of them."""

    __slots__ = ("memory", "namespace", "pinned_nbytes", "tiers")

    def __init__(self, key: Key, namespace: Namespace, n_tiers: int) -> None:
        super().__init__(key, None, 0, sortable(np.empty(0, dtype=np.uint64)))
        self.namespace = namespace
        self.memory = Held()
        self.tiers = tuple(Held() for _ in range(n_tiers))
        self.pinned_nbytes = 0
        """In memory or below; of records that were there when they were pinned."""


class Tree:
    def __init__(self, *, n_tiers: int = 0, clock: Callable[[], float]) -> None:
        """`clock` is the wall clock: uses and lifetimes are remembered in its time."""
        self._n_tiers = n_tiers
        self._clock = clock
        self._roots: dict[Key, Root] = {}
        self._by_key: dict[Key, Node] = {}
        """Nodes that have records, for tiers name them by key."""
        self._expiring: list[tuple[float, int, Node]] = []
        self._serial = count()
        self.memory = Held()
        self.tiers = tuple(Held() for _ in range(n_tiers))

    # --- nodes -----------------------------------------------------------------------------

    def root(self, key: Key, namespace: Namespace) -> Root:
        """Made on first use."""
        found = self._roots.get(key)
        if found is None:
            found = self._roots[key] = Root(key, namespace, self._n_tiers)
        return found

    def roots(self) -> list[Root]:
        return list(self._roots.values())

    def find_root(self, key: Key) -> Root | None:
        return self._roots.get(key)

    def find(self, key: Key) -> Node | None:
        """The node of this key, if it has records."""
        return self._by_key.get(key)

    def walk(self, root: Node, tokens: KeyTokens, block: int) -> list[Node]:
        """The whole blocks that the prompt begins with."""
        path: list[Node] = []
        node = root
        while node.end + block <= len(tokens):
            child = node.children.get(tokens[node.end : node.end + block])
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def child(self, parent: Node, tokens: KeyTokens, *, key: Key | None = None) -> Node:
        """The child with these tokens, made if it is not there."""
        found = parent.children.get(tokens)
        if found is None:
            made = Node(key or child_key(parent.key, tokens), parent, parent.end, sortable(tokens))
            if parent._children is None:
                parent._children = Children()
            parent._children.add(made)
            return made
        return found

    def below(self, node: Node) -> Iterator[Node]:
        """The node and all under it; parents before their children."""
        todo = [node]
        while todo:
            node = todo.pop()
            yield node
            todo += node.children

    def prune(self, node: Node | None) -> None:
        """Drop the node and those above it that hold nothing, lead nowhere and are not in use."""
        while node is not None and not (node.records or len(node.children) or node.n_leases):
            parent = node.parent
            if parent is None:
                self._roots.pop(node.key, None)
                return
            assert parent._children is not None
            parent._children.remove(node)
            node = parent

    # --- records ---------------------------------------------------------------------------

    def add(self, node: Node, part: Part, *, nbytes: int, mark: Mark) -> Record:
        """The node's record of this part, made if it is not there. It lies nowhere yet."""
        record = node.records.get(part)
        if record is None:
            record = node.records[part] = Record(node, part, nbytes, mark)
            self._by_key[node.key] = node
        return record

    def hold(self, record: Record, arrays: Any, *, nbytes: int) -> None:
        """Memory has it from now on."""
        assert record.arrays is None
        record.arrays, record.nbytes = arrays, nbytes
        self._count_memory(record, +1)

    def release(self, record: Record) -> None:
        """Memory has it no more."""
        if record.arrays is not None:
            self._count_memory(record, -1)
            record.arrays = None

    def stored(self, record: Record, tier: int, *, nbytes: int) -> None:
        """A tier has it from now on."""
        record.writing &= ~(1 << tier)
        if not record.stored >> tier & 1:
            record.stored |= 1 << tier
            if record.arrays is None:
                record.nbytes = nbytes
            self._count_tier(record, tier, +1)

    def gone(self, record: Record, tier: int) -> None:
        """A tier has it no more."""
        if record.stored >> tier & 1:
            self._count_tier(record, tier, -1)
            record.stored &= ~(1 << tier)

    def remove(self, record: Record) -> None:
        """Forget a record, and every node that is of no use without it."""
        node = record.node
        self.release(record)
        for tier in range(self._n_tiers):
            self.gone(record, tier)
        if node.records.get(record.part) is record:
            del node.records[record.part]
        if not node.records:
            self._by_key.pop(node.key, None)
        self.prune(node)

    def lost(self, record: Record) -> bool:
        """Whether no tier has it, none is about to, and memory has not."""
        return record.arrays is None and not record.stored and not record.writing

    # --- use -------------------------------------------------------------------------------

    def lease(self, node: Node) -> None:
        """Keep the node, and with it all above it."""
        for n in _up(node):
            n.n_leases += 1

    def unlease(self, node: Node) -> None:
        for n in _up(node):
            n.n_leases -= 1
        self.prune(node)

    def move_lease(self, node: Node, child: Node) -> None:
        """From a node to one under it, which costs as much as there are nodes between the two."""
        n: Node | None = child
        while n is not None and n is not node:
            n.n_leases += 1
            n = n.parent
        assert n is node

    def used(self, node: Node, *, again: bool) -> None:
        """The node and all above it were used just now. again: what was stored was resumed from."""
        now = self._clock()
        for n in node.path():
            n.n_uses += again
            n.used_at = max(n.used_at, now)

    def remember_use(self, node: Node, used_at: float) -> None:
        """As a tier remembers it from an earlier life."""
        for n in node.path():
            if n.used_at >= used_at:
                return
            n.used_at = used_at

    def pin(self, node: Node) -> None:
        for n in _up(node):
            n.n_pins += 1

    def unpin(self, node: Node) -> None:
        for n in _up(node):
            n.n_pins -= 1

    # --- lifetimes -------------------------------------------------------------------------

    def extend_life(self, node: Node, ttl_s: float | None) -> list[Node]:
        """Let the node and all above it live at least so long; None for as long as there is room.

        Returns the nodes that were to expire and now are not.
        """
        until = math.inf if ttl_s is None else self._clock() + ttl_s
        freed = []
        for n in node.path():
            if n.expires_at >= until:
                break
            if until == math.inf:
                freed.append(n)
            else:
                heapq.heappush(self._expiring, (until, next(self._serial), n))
            n.expires_at = until
        return freed

    def begin_life(self, node: Node, ttl_s: float | None) -> None:
        """A new node's life; those above it live at least as long."""
        node.expires_at = -math.inf
        self.extend_life(node, ttl_s)

    def expired(self) -> Iterator[Node]:
        """Nodes whose time is over, one after another; those in use have another minute."""
        now = self._clock()
        while self._expiring and self._expiring[0][0] <= now:
            at, _, node = heapq.heappop(self._expiring)
            if node.expires_at != at or not (node.records or len(node.children)):
                continue  # it lives longer, or is gone
            if node.n_leases or node.n_pins:
                heapq.heappush(self._expiring, (now + 60, next(self._serial), node))
                node.expires_at = now + 60
                continue
            yield node

    # --- inside ----------------------------------------------------------------------------

    def _count_memory(self, record: Record, sign: int) -> None:
        self.memory.count(record, sign)
        _root_of(record.node).memory.count(record, sign)

    def _count_tier(self, record: Record, tier: int, sign: int) -> None:
        self.tiers[tier].count(record, sign)
        _root_of(record.node).tiers[tier].count(record, sign)


def _up(node: Node) -> Iterator[Node]:
    """The node and all above it, the root included."""
    above: Node | None = node
    while above is not None:
        yield above
        above = above.parent


def _root_of(node: Node) -> Root:
    for above in _up(node):
        if isinstance(above, Root):
            return above
    raise AssertionError("a node without a root")
