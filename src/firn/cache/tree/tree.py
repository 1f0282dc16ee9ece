"""Tree: all known prefixes, and every change to a node. What becomes of a record is in the ledger.

A node counts the leases and pins of its whole branch; it counts as used at least as recently as
everything below it, and lives at least as long. So evicting in the tree's order takes leaves before
their parents, in memory and in tiers, which know nothing of chains.

Owner: the engine thread, through the prefix cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice

from firn.cache.parts import Part
from firn.cache.tree.announce import Announcer, Removed, StoredBlock
from firn.cache.tree.children import Children
from firn.cache.tree.clock import UseClock
from firn.cache.tree.lifetimes import EvictedBlocks, Lifetimes
from firn.cache.tree.nodes import NO_CHILDREN, CheckpointKind, Node, PartTotals, Record, Root
from firn.cache.tree.order import EvictionOrder
from firn.core.clock import SYSTEM_CLOCK, Clock
from firn.core.keys import Key, child_key
from firn.core.values import NARROW, Namespace, PackedTokens

N_LOOKED_AT = 64
"""Nodes that a look below a node visits."""


class Tree:
    def __init__(
        self,
        block: int,
        *,
        carrier: Part = Part.PAGES,
        window: int = 1,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        """carrier: the part of a block that every later block of its chain needs. window: how many
        tokens of windows a resume reads.
        """
        self.block = block
        self._carrier = carrier
        self.uses = UseClock(clock)
        self._roots: dict[Key, Root] = {}
        self._by_key: dict[Key, Node] = {}
        """All nodes except roots."""
        self.n_detached = 0
        """How many roots were replaced by empty ones."""
        self.version = 0
        """Changes with every node that is added or removed."""
        self.order = EvictionOrder(block, carrier, window)
        self.lifetimes = Lifetimes(clock)
        self.evicted = EvictedBlocks()
        self._n_tiers = 0
        self.announcer: Announcer | None = None
        """Told of every whole block that is added or removed."""

    def add_tier(self) -> None:
        """There is one more tier below memory."""
        self._n_tiers += 1
        for root in self._roots.values():
            root.tiers.append(PartTotals())

    # --- roots -----------------------------------------------------------------------------

    def root(self, key: Key, namespace: Namespace) -> Root:
        """The root with this key, created on first use."""
        root = self._roots.get(key)
        if root is None:
            root = self._roots[key] = Root(key, namespace, self._n_tiers)
        return root

    def roots(self) -> list[Root]:
        return list(self._roots.values())

    def is_attached(self, root: Root) -> bool:
        """Whether this root is in the tree; not once it was cleared."""
        return self._roots.get(root.key) is root

    def detach(self, root: Root, at: float) -> Root:
        """Replace this root with an empty one.

        A request that still has a lease on a part of it continues without the cache. at: records that
        were written earlier must not come back.
        """
        fresh = Root(root.key, root.namespace, self._n_tiers)
        fresh.cleared_at = at
        self._roots[root.key] = fresh
        self.n_detached += 1
        return root

    def note_written(self, root: Root, at: float) -> None:
        """A record of this root was written at this time."""
        root.written_at = max(root.written_at, at)

    # --- nodes -----------------------------------------------------------------------------

    def find(self, key: Key) -> Node | None:
        """The node of this key, whether or not it has records."""
        return self._by_key.get(key)

    def walk(self, root: Node, tokens: PackedTokens) -> list[Node]:
        """The nodes of the whole blocks that the tokens begin with."""
        path: list[Node] = []
        node = root
        for start in range(0, len(tokens) - self.block + 1, self.block):
            child = node.children.get(tokens, start, start + self.block)
            if child is None:
                break
            path.append(child)
            node = child
        return path

    def child(
        self, parent: Node, tokens: PackedTokens, start: int, end: int, *, key: Key | None = None
    ) -> Node:
        """The child with tokens [start, end), created if there is none.

        key: the key that follows from these tokens, where the caller knows it.
        """
        child = parent.children.get(tokens, start, end)
        if child is not None:
            return child
        key = key or child_key(parent.key, tokens.tokens[start:end])
        child = Node(key, parent, parent.end, *tokens.narrowest(start, end))
        child.root = parent.root
        child.used_at = parent.used_at
        self.lifetimes.begin(child)
        if parent.children is NO_CHILDREN:
            parent.children = Children()
        parent.children.add(child)
        self._by_key[key] = child
        self.version += 1
        return child

    def subtree(self, node: Node) -> Iterator[Node]:
        """The node and all below it; parents before their children."""
        todo = [node]
        while todo:
            node = todo.pop()
            yield node
            todo += node.children

    def prune(self, node: Node) -> None:
        """Drop the node, then each one above it, while it has no records, children or leases."""
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
            self.lifetimes.end(node)
            self.version += 1
            node = parent

    # --- records ---------------------------------------------------------------------------

    def add(self, node: Node, part: Part, *, nbytes: int, kind: CheckpointKind) -> Record:
        """The node's record of this part, created if there is none. A new one is not stored yet."""
        record = node.records.get(part)
        if record is None:
            if not node.records:
                node.root.n_stored_tokens += node.n_tokens
            record = node.records[part] = Record(node, part, nbytes, kind)
            if self.announcer is not None and self._is_whole_block(record):
                parent = node.parent
                above = parent.key if parent is not None and parent.parent is not None else None
                self.announcer.announce(StoredBlock(node.key, above, node.packed, node.width))
        return record

    def remove(self, record: Record) -> None:
        """Take a record out of the tree, and every node that is of no use without it. For `Ledger`."""
        node = record.node
        del node.records[record.part]
        if (
            self.announcer is not None
            and self._is_whole_block(record)
            and self._by_key.get(node.key, node) is node  # else it was cleared, and added again
        ):
            self.announcer.announce(Removed(node.key))
        if not node.records:
            node.root.n_stored_tokens -= node.n_tokens
        self.prune(node)

    def is_current(self, record: Record) -> bool:
        """Whether the record is still in the tree. Any thread may ask."""
        return record.alive and self.is_attached(record.node.root)

    def _is_whole_block(self, record: Record) -> bool:
        """Whether it carries a chain over a whole block of text."""
        whole = record.node.n_tokens == self.block and record.node.width == NARROW
        return whole and record.part is self._carrier

    # --- leases and pins -------------------------------------------------------------------

    def lease(self, node: Node) -> None:
        """Keep the node and all above it."""
        for n in node.path_to_root():
            n.n_leases += 1

    def unlease(self, node: Node) -> None:
        for n in node.path_to_root():
            n.n_leases -= 1
        self.prune(node)

    def move_lease(self, node: Node, descendant: Node) -> None:
        """Extend a lease on the node to one below it. Takes a step for each node in between."""
        n: Node | None = descendant
        while n is not node:
            assert n is not None
            n.n_leases += 1
            n = n.parent

    def pin(self, node: Node) -> None:
        """Keep the node and all above it until it is unpinned."""
        if node not in node.root.pinned:
            node.root.pinned[node] = {}
            for n in node.path_to_root():
                n.n_pins += 1

    def set_pinned_for(self, node: Node, prompt: Key, n_tokens: int) -> None:
        """Remember how many tokens of this prompt the pin on this node keeps."""
        node.root.pinned[node][prompt] = n_tokens

    def unpin(self, node: Node) -> None:
        if node in node.root.pinned:
            del node.root.pinned[node]
            for n in node.path_to_root():
                n.n_pins -= 1

    def recount(self, root: Root) -> None:
        """Make pins what they add up to, and leases at least that."""
        for node in reversed(list(self.subtree(root))):
            node.n_leases = max(node.n_leases, sum(child.n_leases for child in node.children))
            node.n_pins = sum(child.n_pins for child in node.children) + (node in root.pinned)

    def may_evict(self, record: Record) -> bool:
        """Whether memory may let go of it. A lease on a node keeps the chain that leads to it."""
        if record.n_leases or record.node.n_pins:
            return False
        return record.part is not self._carrier or not record.node.n_leases

    # --- use -------------------------------------------------------------------------------

    def use(self, node: Node, *, every_s: float = 0.0) -> None:
        """Note that the node and all above it were used now, unless that was noted recently."""
        now = self.uses.now()
        if now - node.used_at < every_s:
            return
        for n in node.path_to_root():
            n.used_at = max(n.used_at, now)

    def remember_use(self, node: Node, used_at: float) -> None:
        """Note a use that a tier remembers, perhaps from an earlier process."""
        for n in node.path_to_root():
            if n.used_at >= used_at:
                return
            n.used_at = used_at

    def set_reused(self, node: Node) -> list[Node]:
        """A request resumed from the chain that ends here; returns the nodes for which that is new.

        Tails inside its blocks that hold a state count as well: the next prompt may branch off there.
        """
        new: list[Node] = []
        for n in node.path():
            if n.reused:
                break
            n.reused = True
            assert n.parent is not None
            if len(n.parent.children) > 1:
                tails = n.parent.children.prefixes(PackedTokens(n.tokens), 0, n.n_tokens)
                new += [t for t in tails if Part.STATE in t.records and not t.reused]
            new.append(n)
        for n in new:
            n.reused = True
        return new[::-1]

    def has_state_before(self, node: Node) -> bool:
        """Whether a state is kept in the blocks before this one, at their ends or inside them."""
        n = node.parent
        while n is not None and n.parent is not None:
            tails = n.parent.children.prefixes(PackedTokens(n.tokens), 0, n.n_tokens)
            if any(Part.STATE in t.records for t in (n, *tails)):
                return True
            n = n.parent
        return False

    def goes_on(self, node: Node, n_tokens: int) -> bool:
        """Whether some chain goes on for at least this many tokens after the node, as far as a short
        look finds out. A tail goes on in the longer blocks that it begins."""
        assert node.parent is not None
        longer = node.parent.children.extensions(PackedTokens(node.tokens), 0, node.n_tokens)
        todo = list(islice(longer, N_LOOKED_AT))
        for _ in range(N_LOOKED_AT):
            if not todo:
                return False
            n = todo.pop()
            if n.end - node.end >= n_tokens:
                return True
            todo += islice(n.children, N_LOOKED_AT)
        return False
