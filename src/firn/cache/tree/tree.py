"""The tree of stored prefixes: the only place that knows chains, and the only writer of a node's fields.

Leases and pins are counted for a whole branch, and a node was used, and lives, at least as long as
everything below it. So whoever takes records by `rank` takes leaves before their parents: memory, and
tiers that know nothing of chains.

Owner: the engine thread, through the prefix cache.
"""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any

from firn.cache.parts import Part
from firn.cache.tree.announce import Announcer, Removed, StoredBlock
from firn.cache.tree.children import NARROW, Children, Text
from firn.cache.tree.nodes import NO_CHILDREN, Held, InRow, Mark, Node, Record, Root
from firn.core.keys import Key, KeyTokens, child_key
from firn.core.values import Namespace

DAY_S = 86_400.0
BLOCK_S = 2.0
"""In a tier a block counts as used so much earlier than its parent: no file system rounds by more."""
N_REMEMBERED = 1 << 16
"""Evicted blocks whose keys are remembered, so that a miss can name its reason."""
RETRY_S = 60.0
"""What should expire while it is in use is looked at again after so long."""


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
        """All but roots: tiers name them by key."""
        self._expiring: list[tuple[float, int, float, Node]] = []
        """When to look, and the life that was to end then."""
        self._serial = count()
        self._evicted: dict[bytes, None] = {}
        self.memory = Held()
        self.leaving_nbytes = 0
        self.tiers: list[Held] = []
        self.announcer: Announcer | None = None
        """Is told which whole blocks there are."""

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
        """The node of this key, whether or not it has records."""
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

    def child(
        self, parent: Node, text: Text, start: int, end: int, *, key: Key | None = None
    ) -> Node:
        """The child with tokens [start, end) of the text, made if it is not there.

        key: the one that follows from these tokens, where it is known.
        """
        there = parent.children.get(text, start, end)
        if there is not None:
            return there
        key = key or child_key(parent.key, text.tokens[start:end])
        made = Node(key, parent, parent.end, *text.stored(start, end))
        made.root = parent.root
        made.used_at = parent.used_at
        made.expires_at = -math.inf  # until somebody gives it a life
        if parent.children is NO_CHILDREN:
            parent.children = Children()
        parent.children.add(made)
        self._by_key[key] = made
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
            parent.children.remove(node)
            if self._by_key.get(node.key) is node:
                del self._by_key[node.key]
            node.parent = None
            node = parent

    # --- records ---------------------------------------------------------------------------

    def add(self, node: Node, part: Part, *, nbytes: int, mark: Mark) -> Record:
        """The node's record of this part, made if it is not there. It lies nowhere yet."""
        record = node.records.get(part)
        if record is None:
            if not node.records:
                node.root.n_stored_tokens += node.n_tokens
            record = node.records[part] = Record(node, part, nbytes, mark)
            if self.announcer is not None and self._is_block(record):
                parent = node.parent
                above = parent.key if parent is not None and parent.parent is not None else None
                self.announcer.announce(StoredBlock(node.key, above, node.text, node.width))
        return record

    def hold(self, record: Record, arrays: Any, *, nbytes: int) -> None:
        """Memory has it from now on."""
        assert record.arrays is None
        if record.nbytes != nbytes:
            self._resize(record, nbytes)
        record.arrays = arrays
        if isinstance(arrays, InRow):
            arrays.add(record)
        self._count_memory(record, +1)

    def move(self, record: Record, arrays: Any) -> None:
        """What memory holds of it lies elsewhere from now on: in arrays of its own, or in a row."""
        assert record.arrays is not None
        assert not record.leaving
        if isinstance(record.arrays, InRow):
            record.arrays.discard(record)
        if isinstance(arrays, InRow):
            arrays.add(record)
        record.arrays = arrays

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
        if isinstance(record.arrays, InRow):
            record.arrays.discard(record)
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
        if (
            self.announcer is not None
            and self._is_block(record)
            and self._by_key.get(node.key, node) is node  # else it was cleared, and is back
        ):
            self.announcer.announce(Removed(node.key))
        if not node.records:
            node.root.n_stored_tokens -= node.n_tokens
        self.prune(node)

    # --- use -------------------------------------------------------------------------------

    def lease(self, node: Node) -> None:
        """Keep the node, and with it all above it."""
        for n in node.up():
            n.n_leases += 1

    def unlease(self, node: Node) -> None:
        for n in node.up():
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

    def use(self, node: Node, *, late_s: float = 0.0) -> None:
        """The node and all above it were used just now. late_s: what counts as just now."""
        now = self._wall()
        if now - node.used_at < late_s:
            return
        for n in node.up():
            n.used_at = max(n.used_at, now)

    def remember_use(self, node: Node, used_at: float) -> None:
        """As a tier remembers it, from this life or an earlier one."""
        for n in node.up():
            if n.used_at >= used_at:
                return
            n.used_at = used_at

    def set_reused(self, node: Node) -> list[Node]:
        """The chain that ends here was used a second time; returns the nodes of which that is new.

        States inside its blocks, which end tails of their own, count as well: what is asked next may
        depart there.
        """
        new: list[Node] = []
        for n in node.path():
            if n.reused:
                break
            n.reused = True
            assert n.parent is not None
            tails = n.parent.children.prefixes(Text(n.tokens), 0, n.n_tokens)
            new += [t for t in tails if Part.STATE in t.records and not t.reused]
            new.append(n)
        for n in new:
            n.reused = True
        return new[::-1]

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
        """The rank as a tier keeps it, which knows no depths: a step lower with every block.

        A window or state is a step below its own pages, as is the next block.
        """
        return self.rank(record) - BLOCK_S * self._depth(record)

    def unstamp(self, record: Record, stamp: float) -> float:
        """When a record with this stamp counts as last used."""
        return stamp + BLOCK_S * self._depth(record)

    def _depth(self, record: Record) -> int:
        return record.node.start // self.block + (record.part is not self._chain)

    def stamped(self, record: Record, stamp: float) -> dict[Record, float]:
        """A tier has the record with this stamp. Returns what must be raised above it, to what.

        Costs nothing where stamps are in order. They may not be in a folder that was copied, or that
        an older version wrote.
        """
        raised: dict[Record, float] = {}
        if record.part is self._chain:
            if record.node.stamped > stamp:  # something that needs it was told of before it
                return {record: record.node.stamped}
            stamp -= BLOCK_S
        for n in record.node.path():
            stamp += BLOCK_S
            if n.stamped >= stamp:
                break
            n.stamped = stamp
            if self._chain in n.records:
                raised[n.records[self._chain]] = stamp
        raised.pop(record, None)
        return raised

    def outdated(self, node: Node, by_s: float) -> dict[Record, float]:
        """What tiers know too low a stamp of, in the chain that ends here; with the right stamps.

        by_s: less than that is left alone, where nothing below it is raised past it.
        """
        raised: dict[Record, float] = {}
        least = -math.inf
        for n in node.path():
            stamp = n.used_at - BLOCK_S * (n.start // self.block)
            if stamp - n.stamped >= by_s or n.stamped < least:
                n.stamped = least = stamp
                raised.update((r, self.stamp(r)) for r in n.records.values())
            least += BLOCK_S
        return raised

    def state_rank(self, record: Record) -> float:
        """Among states alone, for they have a share of their own: places that many pass go last."""
        return self.rank(record) + (DAY_S if record.mark >= Mark.LATTICE else 0.0)

    # --- pins ------------------------------------------------------------------------------

    def pin(self, node: Node) -> None:
        """Keep the node and all above it until it is unpinned."""
        if node not in node.root.pinned:
            node.root.pinned.add(node)
            for n in node.up():
                n.n_pins += 1

    def unpin(self, node: Node) -> None:
        if node in node.root.pinned:
            node.root.pinned.discard(node)
            for n in node.up():
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
        if node.parent is None:
            return
        for tokens in (node.tokens, node.tokens[:1]):
            self._evicted[child_key(node.parent.key, tokens)[:8]] = None
        while len(self._evicted) > 2 * N_REMEMBERED:
            del self._evicted[next(iter(self._evicted))]

    def was_evicted(self, parent: Node, tokens: KeyTokens) -> bool:
        """Whether a child with these tokens was here, and had to go for want of room.

        Of a single token: whether a child was here that began with it.
        """
        return bool(self._evicted) and child_key(parent.key, tokens)[:8] in self._evicted

    def detach(self, root: Root) -> Root:
        """Begin anew: everything of this root is in the tree that is returned, and in no book.

        Whoever still has a lease on a part of it works on without the cache.
        """
        fresh = Root(root.key, root.namespace, len(self.tiers))
        fresh.cleared_at = self._wall()
        self._roots[root.key] = fresh
        self.memory.subtract(root.memory)
        for mine, gone in zip(self.tiers, root.tiers, strict=True):
            mine.subtract(gone)
        return root

    # --- inside ----------------------------------------------------------------------------

    def is_attached(self, root: Root) -> bool:
        """Whether this root is the tree's: not once it was cleared."""
        return self._roots.get(root.key) is root

    def is_current(self, record: Record) -> bool:
        """Whether the record is still in the tree. May be asked from any thread."""
        return record.alive and self.is_attached(record.node.root)

    def _is_block(self, record: Record) -> bool:
        """Whether it carries a chain over a whole block of text."""
        whole = record.node.n_tokens == self.block and record.node.width == NARROW
        return whole and record.part is self._chain

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


def _is_inside(record: Record) -> bool:
    """Whether only a branch would ask for it: something goes on from here, in one way."""
    n = len(record.node.children)
    if record.part is Part.STATE:
        return record.mark is Mark.PROMPT_END or (n == 1 and record.mark < Mark.LATTICE)
    return n == 1
