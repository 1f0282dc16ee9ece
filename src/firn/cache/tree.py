"""The tree of stored prefixes: the only place that knows chains, and the only writer of their fields.

A node is a block of key tokens at one place in one chain of blocks; its key is the chained hash of all
tokens up to its end. A node with fewer tokens than a block is a tail. A node's records hold parts of the
model's state for it, in memory, in tiers below, or in both; a node without records is there for those
below it.

Leases and pins are counted for a whole branch, and a node was used, and lives, at least as long as
everything below it. So whoever takes records by `rank` takes leaves before their parents: memory, and
tiers that know nothing of chains.

Owner: the engine thread, through the prefix cache. Knows nothing of arrays: payloads are opaque.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import count
from typing import Any

from firn.cache.children import NARROW, Children, Text, tokens_of
from firn.cache.parts import Part
from firn.core.keys import Key, KeyTokens, child_key
from firn.core.values import Namespace

DAY_S = 86_400.0
BLOCK_S = 2.0
"""In a tier a block counts as used so much earlier than its parent: no file system rounds by more."""
N_REMEMBERED = 1 << 16
"""Evicted blocks whose keys are remembered, so that a miss can name its reason."""
RETRY_S = 60.0
"""What should expire while it is in use is looked at again after so long."""


class Mark(IntEnum):
    """Why a state was kept; the lowest go first when states must be thinned."""

    PROMPT_END = 0
    REPLY_END = 1
    TURN = 2
    LATTICE = 3
    BRANCH = 4
    SHARED = 5


class Record:
    """One part of one node, wherever it lies."""

    __slots__ = (
        "arrays", "leaving", "mark", "n_leases", "nbytes", "node", "part", "stored", "writing",
    )  # fmt: skip

    def __init__(self, node: Node, part: Part, nbytes: int, mark: Mark) -> None:
        self.node = node
        self.part = part
        self.nbytes = nbytes
        self.mark = mark
        self.arrays: Any = None
        """What memory holds of it; None when it is not there."""
        self.leaving = False
        """Memory has let go of it, but a tier that is to have it has not got all of it yet."""
        self.n_leases = 0
        """Requests that are about to resume from it."""
        self.stored = 0
        """Tiers that have it: one bit each, in the order of the configuration."""
        self.writing = 0
        """Tiers that it is on its way to, likewise."""

    @property
    def alive(self) -> bool:
        """Still in the tree."""
        return self.node.records.get(self.part) is self

    @property
    def obtainable(self) -> bool:
        return self.arrays is not None or self.stored != 0


class Node:
    __slots__ = (
        "_children", "expires_at", "key", "n_leases", "n_pins", "parent", "records",
        "root", "start", "text", "used_at", "width",
    )  # fmt: skip

    root: Root

    def __init__(self, key: Key, parent: Node | None, start: int, text: bytes, width: int) -> None:
        self.key = key
        self.parent = parent
        self.start = start
        self.text = text
        self.width = width
        self._children: Children[Node] | None = None
        self.records: dict[Part, Record] = {}
        self.n_leases = 0
        """Of this node and of all below it."""
        self.n_pins = 0
        """Likewise."""
        self.used_at = 0.0
        """By the wall clock, for tiers remember it. Never before a child's."""
        self.expires_at = math.inf

    @property
    def tokens(self) -> KeyTokens:
        return tokens_of(self.text, self.width)

    @property
    def n_tokens(self) -> int:
        return len(self.text) // self.width

    @property
    def end(self) -> int:
        return self.start + len(self.text) // self.width

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
    """Bytes and records in one place, by part."""

    nbytes: dict[Part, int] = field(default_factory=lambda: dict.fromkeys(Part, 0))
    n_records: dict[Part, int] = field(default_factory=lambda: dict.fromkeys(Part, 0))

    def count(self, record: Record, sign: int) -> None:
        self.nbytes[record.part] += sign * record.nbytes
        self.n_records[record.part] += sign

    @property
    def total_nbytes(self) -> int:
        return sum(self.nbytes.values())

    @property
    def total_records(self) -> int:
        return sum(self.n_records.values())


class Root(Node):
    """Where one namespace's prefixes begin, with what is held of them."""

    __slots__ = ("cleared_at", "memory", "n_stored_tokens", "namespace", "pinned", "tiers")

    def __init__(self, key: Key, namespace: Namespace, n_tiers: int) -> None:
        super().__init__(key, None, 0, b"", NARROW)
        self.root = self
        self.namespace = namespace
        self.memory = Held()
        self.tiers = [Held() for _ in range(n_tiers)]
        self.n_stored_tokens = 0
        """Of nodes that have records."""
        self.pinned: set[Node] = set()
        """The ends of pinned prefixes."""
        self.cleared_at = -math.inf
        """Wall clock. What was written before is to be deleted, whoever finds it."""

    @property
    def pinned_nbytes(self) -> int:
        """Of all records of pinned prefixes, wherever they lie."""
        nodes = {n for end in self.pinned for n in end.path()}
        return sum(r.nbytes for n in nodes for r in n.records.values())


class Tree:
    def __init__(
        self,
        block: int,
        *,
        chain: Part = Part.PAGES,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """chain: the part that whatever goes on from a block needs of it.

        clock: for lifetimes. wall: for uses, which outlive the process.
        """
        self.block = block
        self._chain = chain
        self._clock = clock
        self._wall = wall
        self._roots: dict[Key, Root] = {}
        self._by_key: dict[Key, Node] = {}
        """Nodes that have records: tiers name them by key."""
        self._expiring: list[tuple[float, int, float, Node]] = []
        """When to look, and the life that was to end then."""
        self._serial = count()
        self._evicted: dict[bytes, None] = {}
        self.memory = Held()
        self.leaving_nbytes = 0
        self.tiers: list[Held] = []

    def add_tier(self) -> int:
        """Another place below memory; returns its number."""
        self.tiers.append(Held())
        for root in self._roots.values():
            root.tiers.append(Held())
        return len(self.tiers) - 1

    # --- nodes -----------------------------------------------------------------------------

    def root(self, key: Key, namespace: Namespace) -> Root:
        """Made on first use."""
        there = self._roots.get(key)
        if there is None:
            there = self._roots[key] = Root(key, namespace, len(self.tiers))
        return there

    def roots(self) -> list[Root]:
        return list(self._roots.values())

    def find_root(self, key: Key) -> Root | None:
        return self._roots.get(key)

    def find(self, key: Key) -> Node | None:
        """The node of this key, if it has records."""
        return self._by_key.get(key)

    def walk(self, root: Node, text: Text) -> list[Node]:
        """The whole blocks that the text begins with."""
        path: list[Node] = []
        node = root
        for start in range(0, len(text) - self.block + 1, self.block):
            child = node.children.get(text, start, start + self.block)
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def child(self, parent: Node, text: Text, start: int, end: int) -> Node:
        """The child with tokens [start, end) of the text, made if it is not there."""
        there = parent.children.get(text, start, end)
        if there is not None:
            return there
        key = child_key(parent.key, text.tokens[start:end])
        made = Node(key, parent, parent.end, *text.stored(start, end))
        made.root = parent.root
        made.used_at = parent.used_at
        made.expires_at = -math.inf  # until somebody gives it a life
        if parent._children is None:
            parent._children = Children()
        parent._children.add(made)
        return made

    def below(self, node: Node) -> Iterator[Node]:
        """The node and all below it; parents before their children."""
        todo = [node]
        while todo:
            node = todo.pop()
            yield node
            todo += node.children

    def nodes(self) -> Iterator[Node]:
        """All but roots. Cost by what is stored: for people and tests."""
        for root in self.roots():
            for node in self.below(root):
                if node is not root:
                    yield node

    def prune(self, node: Node) -> None:
        """Drop the node and those above it that hold nothing, lead nowhere and are not in use."""
        while not (node.records or len(node.children) or node.n_leases):
            if node in node.root.pinned:
                self.unpin(node)
            parent = node.parent
            if parent is None:
                if self.is_attached(node.root) and node.root.cleared_at == -math.inf:
                    del self._roots[node.key]
                return
            assert parent._children is not None
            parent._children.remove(node)
            node.parent = None
            node = parent

    # --- records ---------------------------------------------------------------------------

    def add(self, node: Node, part: Part, *, nbytes: int, mark: Mark) -> Record:
        """The node's record of this part, made if it is not there. It lies nowhere yet."""
        record = node.records.get(part)
        if record is None:
            if not node.records:
                self._by_key[node.key] = node
                node.root.n_stored_tokens += node.n_tokens
            record = node.records[part] = Record(node, part, nbytes, mark)
        return record

    def hold(self, record: Record, arrays: Any, *, nbytes: int) -> None:
        """Memory has it from now on."""
        assert record.arrays is None
        if record.nbytes != nbytes:
            self._resize(record, nbytes)
        record.arrays = arrays
        self._count_memory(record, +1)

    def leave(self, record: Record) -> None:
        """Memory counts it no more, but keeps its arrays until it is written."""
        assert record.arrays is not None
        assert not record.leaving
        self._count_memory(record, -1)
        record.leaving = True
        self.leaving_nbytes += record.nbytes

    def stay(self, record: Record) -> None:
        """It was to leave, and is wanted again."""
        assert record.leaving
        record.leaving = False
        self.leaving_nbytes -= record.nbytes
        self._count_memory(record, +1)

    def release(self, record: Record) -> None:
        """Memory has it no more."""
        if record.arrays is None:
            return
        if record.leaving:
            record.leaving = False
            self.leaving_nbytes -= record.nbytes
        else:
            self._count_memory(record, -1)
        record.arrays = None

    def set_mark(self, record: Record, mark: Mark) -> None:
        record.mark = mark

    def set_writing(self, record: Record, tier: int, *, on: bool) -> None:
        record.writing = record.writing | 1 << tier if on else record.writing & ~(1 << tier)

    def set_stored(self, record: Record, tier: int) -> None:
        """A tier has it from now on."""
        record.writing &= ~(1 << tier)
        if not record.stored >> tier & 1:
            record.stored |= 1 << tier
            self._count_tier(record, tier, +1)

    def set_gone(self, record: Record, tier: int) -> None:
        """A tier has it no more."""
        if record.stored >> tier & 1:
            record.stored &= ~(1 << tier)
            self._count_tier(record, tier, -1)

    def remove(self, record: Record) -> None:
        """Forget a record, and every node that is of no use without it."""
        node = record.node
        self.release(record)
        for tier in range(len(self.tiers)):
            self.set_gone(record, tier)
        if not record.alive:
            return
        del node.records[record.part]
        if not node.records:
            if self._by_key.get(node.key) is node:
                del self._by_key[node.key]
            node.root.n_stored_tokens -= node.n_tokens
        self.prune(node)

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
        """From a node to one below it: costs as much as there is between the two."""
        n: Node | None = child
        while n is not node:
            assert n is not None
            n.n_leases += 1
            n = n.parent

    def lease_record(self, record: Record) -> None:
        """Keep the record itself: somebody is about to resume from it."""
        record.n_leases += 1

    def unlease_record(self, record: Record) -> None:
        record.n_leases -= 1

    def may_go(self, record: Record) -> bool:
        """Whether memory may let go of it. A lease on a node keeps the chain that leads to it."""
        if record.n_leases or record.node.n_pins:
            return False
        return record.part is not self._chain or not record.node.n_leases

    def use(self, node: Node) -> None:
        """The node and all above it were used just now."""
        now = self._wall()
        for n in _up(node):
            n.used_at = max(n.used_at, now)

    def remember_use(self, node: Node, used_at: float) -> None:
        """As a tier remembers it, from this life or an earlier one."""
        for n in _up(node):
            if n.used_at >= used_at:
                return
            n.used_at = used_at

    def rank(self, record: Record) -> float:
        """When a record counts as last used, by the wall clock: the lowest goes first, everywhere.

        How often it was used counts for nothing: a long conversation that has ended was used more
        often than a new one. A window or state in the midst of a chain, which only a branch asks for,
        counts as used a day earlier. What carries the chain never ranks below what it carries; of
        equals the deeper goes first, and so a chain goes from its end.
        """
        at = record.node.used_at
        if record.part is not self._chain and _is_inside(record):
            at -= DAY_S
        return at

    def stamp(self, record: Record) -> float:
        """The rank as a tier keeps it, which knows no depths: a little lower with every block."""
        return self.rank(record) - BLOCK_S * (record.node.start // self.block)

    def state_rank(self, record: Record) -> float:
        """Among states alone, for they have a share of their own: places that many pass go last."""
        return self.rank(record) + (DAY_S if record.mark >= Mark.LATTICE else 0.0)

    # --- pins ------------------------------------------------------------------------------

    def pin(self, node: Node) -> None:
        """Keep the node and all above it until it is unpinned."""
        if node not in node.root.pinned:
            node.root.pinned.add(node)
            for n in _up(node):
                n.n_pins += 1

    def unpin(self, node: Node) -> None:
        if node in node.root.pinned:
            node.root.pinned.discard(node)
            for n in _up(node):
                n.n_pins -= 1

    # --- lifetimes -------------------------------------------------------------------------

    def extend_life(self, node: Node, ttl_s: float | None) -> list[Node]:
        """Let the node and all above it live at least so long; None for while there is room.

        Returns those that were to expire and now are not.
        """
        until = math.inf if ttl_s is None else self._clock() + ttl_s
        freed = []
        for n in node.path():
            if n.expires_at >= until:
                break
            if until == math.inf:
                freed += [n] if n.expires_at > -math.inf else []
            else:
                heapq.heappush(self._expiring, (until, next(self._serial), until, n))
            n.expires_at = until
        return freed

    def expired(self) -> Iterator[Node]:
        """Nodes whose time is over; those in use have another minute."""
        now = self._clock()
        while self._expiring and self._expiring[0][0] <= now:
            *_, life, node = heapq.heappop(self._expiring)
            if node.expires_at != life or node.parent is None:
                continue  # it lives longer, or is gone
            if node.n_leases or node.n_pins:
                again = (now + RETRY_S, next(self._serial), life, node)
                heapq.heappush(self._expiring, again)
            else:
                yield node

    # --- what was --------------------------------------------------------------------------

    def remember_evicted(self, node: Node) -> None:
        self._evicted[node.key[:8]] = None
        if len(self._evicted) > N_REMEMBERED:
            del self._evicted[next(iter(self._evicted))]

    def was_evicted(self, parent: Node, tokens: KeyTokens) -> bool:
        """Whether the child with these tokens was here, and had to go for want of room."""
        return bool(self._evicted) and child_key(parent.key, tokens)[:8] in self._evicted

    def detach(self, root: Root) -> Root:
        """Begin anew: everything of this root is in the tree that is returned, and in no book.

        Whoever still has a lease on a part of it works on without the cache.
        """
        fresh = Root(root.key, root.namespace, len(self.tiers))
        fresh.cleared_at = self._wall()
        self._roots[root.key] = fresh
        _subtract(self.memory, root.memory)
        for mine, gone in zip(self.tiers, root.tiers, strict=True):
            _subtract(mine, gone)
        return root

    # --- inside ----------------------------------------------------------------------------

    def is_attached(self, root: Root) -> bool:
        """Whether this root is the tree's: not once it was cleared."""
        return self._roots.get(root.key) is root

    def is_current(self, record: Record) -> bool:
        """Whether the record is still in the tree. May be asked from any thread."""
        return record.alive and self.is_attached(record.node.root)

    def _count_memory(self, record: Record, sign: int) -> None:
        root = record.node.root
        root.memory.count(record, sign)
        if self.is_attached(root):
            self.memory.count(record, sign)

    def _count_tier(self, record: Record, tier: int, sign: int) -> None:
        root = record.node.root
        root.tiers[tier].count(record, sign)
        if self.is_attached(root):
            self.tiers[tier].count(record, sign)

    def _resize(self, record: Record, nbytes: int) -> None:
        """Bytes on disk and in memory differ a little; the books know one figure a record."""
        held = [t for t in range(len(self.tiers)) if record.stored >> t & 1]
        for tier in held:
            self._count_tier(record, tier, -1)
        record.nbytes = nbytes
        for tier in held:
            self._count_tier(record, tier, +1)


def _up(node: Node) -> Iterator[Node]:
    """The node and all above it, the root included."""
    above: Node | None = node
    while above is not None:
        yield above
        above = above.parent


def _is_inside(record: Record) -> bool:
    """Whether only a branch would ask for it: something goes on from here, in one way."""
    n = len(record.node.children)
    if record.part is Part.STATE:
        return record.mark is Mark.PROMPT_END or (n == 1 and record.mark < Mark.LATTICE)
    return n == 1


def _subtract(held: Held, gone: Held) -> None:
    for part in Part:
        held.nbytes[part] -= gone.nbytes[part]
        held.n_records[part] -= gone.n_records[part]
