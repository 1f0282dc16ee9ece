"""The prefix tree: which prefixes are stored, and in which records.

A node is a block of key tokens at one place in one chain of blocks; its key is the chained hash of all
tokens up to its end. A node with fewer tokens than a block is a tail. A node's records hold parts of the
model's state for it; a node without records is there for those below it.

Owner: the engine thread, through the prefix cache. Knows nothing of arrays: payloads are opaque.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import numpy as np

from firn.cache.parts import Part
from firn.core.keys import Key, KeyTokens, child_key


class Mark(IntEnum):
    """Why a state was kept; the lowest go first when states must be thinned."""

    PROMPT_END = 0
    REPLY_END = 1
    TURN = 2
    LATTICE = 3
    BRANCH = 4
    SHARED = 5


@dataclass(eq=False)
class Record:
    """One part of one node. `payload` is what the memory tier holds, None when it is not there."""

    node: Node
    part: Part
    nbytes: int
    payload: Any = None
    mark: Mark = Mark.TURN
    rank: tuple[float, int] = (0.0, 0)
    """The pool's eviction order: lowest first; the number of its last use breaks ties."""
    n_leases: int = 0
    stored: bool = False
    """A tier below memory has it."""
    writing: bool = False
    """It is on its way there."""

    @property
    def alive(self) -> bool:
        """Still in the tree."""
        return self.node.records.get(self.part) is self


@dataclass(eq=False)
class Node:
    key: Key
    parent: Node | None
    start: int
    values: KeyTokens
    children: dict[Key, Node] = field(default_factory=dict)
    records: dict[Part, Record] = field(default_factory=dict)
    n_leases: int = 0
    n_occupied: int = 0
    """How many children are occupied: hold a record in memory, or lead to one that does."""
    n_pins: int = 0
    expires_at: float = 0.0
    """On the cache's clock; infinity for nodes that live as long as there is room."""

    @property
    def end(self) -> int:
        return self.start + len(self.values)

    @property
    def occupied(self) -> bool:
        return self.n_occupied > 0 or any(r.payload is not None for r in self.records.values())

    def has(self, part: Part) -> bool:
        return part in self.records

    def path(self) -> Iterator[Node]:
        """This node and those above it, without the root."""
        node: Node | None = self
        while node is not None and node.parent is not None:
            yield node
            node = node.parent


class Index:
    def __init__(self) -> None:
        self._roots: dict[Key, Node] = {}

    def root(self, key: Key) -> Node:
        """The root of a namespace, made on first use."""
        found = self._roots.get(key)
        if found is None:
            found = self._roots[key] = Node(key, None, 0, np.empty(0, dtype=np.uint64))
        return found

    def roots(self) -> Iterator[Node]:
        yield from list(self._roots.values())

    def child(self, parent: Node, values: KeyTokens, *, key: Key | None = None) -> Node:
        """The child with these tokens, made if it is not there."""
        key = key or child_key(parent.key, values)
        found = parent.children.get(key)
        if found is None:
            found = Node(key, parent, parent.end, values.copy())
            parent.children[key] = found
        return found

    def add(self, node: Node, part: Part, *, nbytes: int, payload: Any, mark: Mark) -> Record:
        assert part not in node.records
        was = node.occupied
        record = Record(node, part, nbytes, payload, mark)
        node.records[part] = record
        self._occupancy_changed(node, was)
        return record

    def set_payload(self, record: Record, payload: Any) -> None:
        was = record.node.occupied
        record.payload = payload
        self._occupancy_changed(record.node, was)

    def remove(self, record: Record) -> None:
        """Forget a record, and every node that is of no use without it."""
        node = record.node
        was = node.occupied
        del node.records[record.part]
        record.payload = None
        self._occupancy_changed(node, was)
        self.prune(node)

    def prune(self, node: Node | None) -> None:
        """Drop the node and those above it that hold nothing, lead nowhere and are not in use."""
        while node is not None and not (node.records or node.children or node.n_leases):
            parent = node.parent
            if parent is None:
                self._roots.pop(node.key, None)
                return
            parent.children.pop(node.key, None)
            node = parent

    def nodes(self) -> Iterator[Node]:
        """All nodes but roots."""
        todo = [c for r in self._roots.values() for c in r.children.values()]
        while todo:
            node = todo.pop()
            yield node
            todo += node.children.values()

    def below(self, node: Node) -> Iterator[Node]:
        """The node and all under it."""
        todo = [node]
        while todo:
            node = todo.pop()
            yield node
            todo += node.children.values()

    @staticmethod
    def _occupancy_changed(node: Node, was: bool) -> None:
        """Keep n_occupied true up the path after a node's own records changed."""
        while node.occupied != was and node.parent is not None:
            parent = node.parent
            parent_was = parent.occupied
            parent.n_occupied += 1 if node.occupied else -1
            node, was = parent, parent_was
