"""Nodes and records: what the tree of stored prefixes is made of.

A node is a block of key tokens at one place in one chain of blocks; its key is the chained hash of all
tokens up to its end. A node with fewer tokens than a block is a tail. A node's records hold parts of the
model's state for it, in memory, in tiers below, or in both; a node without records is there for those
below it.

Owner: the tree, which alone writes their fields. Knows nothing of arrays: payloads are opaque.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from firn.cache.parts import Part
from firn.cache.tree.children import NARROW, Children, tokens_of
from firn.core.keys import Key, KeyTokens
from firn.core.values import Namespace


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
        """What memory holds of it: arrays of its own, or an `InRow`; None when it is not there."""
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


class InRow:
    """A row that holds the content of records in the place of arrays: which records, and their bytes."""

    __slots__ = ("nbytes", "records")

    def __init__(self) -> None:
        self.records: dict[Record, None] = {}
        self.nbytes = 0

    def add(self, record: Record) -> None:
        self.records[record] = None
        self.nbytes += record.nbytes

    def discard(self, record: Record) -> None:
        del self.records[record]
        self.nbytes -= record.nbytes


class Node:
    __slots__ = (
        "children", "expires_at", "key", "n_leases", "n_pins", "parent", "records", "reused",
        "root", "stamped", "start", "text", "used_at", "width",
    )  # fmt: skip

    root: Root

    def __init__(self, key: Key, parent: Node | None, start: int, text: bytes, width: int) -> None:
        self.key = key
        self.parent = parent
        self.start = start
        self.text = text
        self.width = width
        self.children: Children[Node] = NO_CHILDREN
        self.records: dict[Part, Record] = {}
        self.n_leases = 0
        """Of this node and of all below it."""
        self.n_pins = 0
        """Likewise."""
        self.used_at = 0.0
        """By the wall clock, for tiers remember it. Never before a child's."""
        self.stamped = -math.inf
        """The stamp that tiers were told for its chain: always a step above a child's."""
        self.expires_at = math.inf
        self.reused = False
        """Somebody has resumed from it, or from something below it."""

    @property
    def tokens(self) -> KeyTokens:
        return tokens_of(self.text, self.width)

    @property
    def n_tokens(self) -> int:
        return len(self.text) // self.width

    @property
    def end(self) -> int:
        return self.start + len(self.text) // self.width

    def path(self) -> Iterator[Node]:
        """This node and those above it, without the root."""
        node: Node | None = self
        while node is not None and node.parent is not None:
            yield node
            node = node.parent

    def up(self) -> Iterator[Node]:
        """Likewise, with the root."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent


NO_CHILDREN: Children[Node] = Children()
"""Of every node that has none."""


@dataclass(eq=False)
class Held:
    """Bytes and records in one place, by part."""

    nbytes: dict[Part, int] = field(default_factory=lambda: dict.fromkeys(Part, 0))
    n_records: dict[Part, int] = field(default_factory=lambda: dict.fromkeys(Part, 0))

    def count(self, record: Record, sign: int) -> None:
        self.nbytes[record.part] += sign * record.nbytes
        self.n_records[record.part] += sign

    def add(self, other: Held) -> None:
        for part in Part:
            self.nbytes[part] += other.nbytes[part]
            self.n_records[part] += other.n_records[part]

    def subtract(self, other: Held) -> None:
        for part in Part:
            self.nbytes[part] -= other.nbytes[part]
            self.n_records[part] -= other.n_records[part]

    @property
    def total_nbytes(self) -> int:
        return sum(self.nbytes.values())

    @property
    def total_records(self) -> int:
        return sum(self.n_records.values())


class Root(Node):
    """Where one namespace's prefixes begin, with what is held of them; thinned prompts have others."""

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
