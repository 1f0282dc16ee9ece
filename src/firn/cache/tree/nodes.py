"""What the tree is made of: nodes, their records, and the root of each namespace.

A node is one block of key tokens in one chain of blocks; its key is the chained hash of all tokens up to
its end. A node with fewer tokens than a block is a tail. The records of a node hold the parts of the
model's state that belong to its tokens, in memory, in tiers, or in both. A node without records exists
only for those below it.

`EvictionOrder` writes `stamped`, `Lifetimes` writes `expires_at`, `Ledger` writes what a record is in;
`Tree` writes everything else. Payloads are opaque here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

from firn.cache.parts import Part
from firn.cache.tree.children import Children
from firn.core.keys import Key
from firn.core.values import NARROW, KeyTokens, Namespace, unpacked


class CheckpointKind(IntEnum):
    """Why a state was kept. When states must be evicted, the lowest kinds go first."""

    PROMPT_END = 0
    REPLY_END = 1
    TURN = 2
    LATTICE = 3
    BRANCH = 4
    SHARED = 5


class Record:
    """One part of one node's state, wherever it is stored."""

    __slots__ = (
        "arrays",
        "kind",
        "leaving",
        "n_leases",
        "nbytes",
        "node",
        "part",
        "reading",
        "stored",
        "verified",
        "writing",
    )  # fmt: skip

    def __init__(self, node: Node, part: Part, nbytes: int, kind: CheckpointKind) -> None:
        self.node = node
        self.part = part
        self.nbytes = nbytes
        self.kind = kind
        self.arrays: Any = None
        """What memory holds: a payload of its own, or an `InRow`; None when memory has nothing."""
        self.leaving = False
        """Evicted, but its arrays stay until every tier that should have it has written it."""
        self.n_leases = 0
        """Requests that are about to resume from it."""
        self.stored = 0
        """Tiers that have it: one bit each, in the order of the configuration."""
        self.writing = 0
        """Tiers that are writing it: bits as in `stored`."""
        self.reading = 0
        """Tiers that it is being read from: bits as in `stored`."""
        self.verified = True
        """False: it was computed, and the device has not confirmed yet that it had no fault."""

    @property
    def alive(self) -> bool:
        """Whether it is still its node's record."""
        return self.node.records.get(self.part) is self

    @property
    def obtainable(self) -> bool:
        """Whether memory or a tier has it."""
        return self.arrays is not None or self.stored != 0

    @property
    def fastest_tier(self) -> int:
        """The first tier that has it; one must."""
        if not self.stored:
            raise LookupError("no tier has it")
        return (self.stored & -self.stored).bit_length() - 1

    def is_stored(self, tier: int) -> bool:
        """Whether this tier has it."""
        return bool(self.stored >> tier & 1)

    def is_being_written(self, tier: int) -> bool:
        """Whether it is being written to this tier."""
        return bool(self.writing >> tier & 1)

    def is_being_read(self, tier: int) -> bool:
        """Whether it is being read from this tier."""
        return bool(self.reading >> tier & 1)


class InRow:
    """Stands for the arrays of records whose content is in a row."""

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
        "children", "expires_at", "key", "n_leases", "n_pins", "packed", "parent", "records",
        "reused", "root", "stamped", "start", "used_at", "width",
    )  # fmt: skip

    root: Root

    def __init__(
        self, key: Key, parent: Node | None, start: int, packed: bytes, width: int
    ) -> None:
        """packed: its tokens, each of `width` bytes (see `PackedTokens`)."""
        self.key = key
        self.parent = parent
        self.start = start
        self.packed = packed
        self.width = width
        self.children: Children[Node] = NO_CHILDREN
        self.records: dict[Part, Record] = {}
        self.n_leases = 0
        """Leases on this node and on all below it."""
        self.n_pins = 0
        """Pins, likewise."""
        self.used_at = 0.0
        """By the tree's `UseClock`. Never earlier than a child's."""
        self.stamped = -math.inf
        """The highest stamp that tiers were given for its chain: always a step above a child's."""
        self.expires_at = math.inf
        self.reused = False
        """Whether a request has resumed from it, or from a node below it."""

    @property
    def tokens(self) -> KeyTokens:
        return unpacked(self.packed, self.width)

    @property
    def n_tokens(self) -> int:
        return len(self.packed) // self.width

    @property
    def end(self) -> int:
        return self.start + len(self.packed) // self.width

    def path(self) -> Iterator[Node]:
        """This node and those above it, without the root."""
        node: Node | None = self
        while node is not None and node.parent is not None:
            yield node
            node = node.parent

    def path_to_root(self) -> Iterator[Node]:
        """This node and those above it, the root included."""
        node: Node | None = self
        while node is not None:
            yield node
            node = node.parent


NO_CHILDREN: Children[Node] = Children()
"""Shared by all nodes that have none: most nodes are leaves, and an empty list costs memory."""


@dataclass
class PartTotals:
    """Size and number of the records in one place, by part."""

    nbytes: dict[Part, int] = field(default_factory=lambda: dict.fromkeys(Part, 0))
    n_records: dict[Part, int] = field(default_factory=lambda: dict.fromkeys(Part, 0))

    def count(self, record: Record, sign: int) -> None:
        self.nbytes[record.part] += sign * record.nbytes
        self.n_records[record.part] += sign

    def add(self, other: PartTotals, *, sign: int = +1) -> None:
        for part in Part:
            self.nbytes[part] += sign * other.nbytes[part]
            self.n_records[part] += sign * other.n_records[part]

    @property
    def total_nbytes(self) -> int:
        return sum(self.nbytes.values())

    @property
    def total_records(self) -> int:
        return sum(self.n_records.values())


class Root(Node):
    """Where the prefixes of one namespace begin, with the totals of its records.

    A namespace has one root for prompts as they were sent, and one for each way of preparing them.
    """

    __slots__ = (
        "cleared_at", "memory", "n_stored_tokens", "namespace", "pinned", "tiers", "written_at",
    )  # fmt: skip

    def __init__(self, key: Key, namespace: Namespace, n_tiers: int) -> None:
        super().__init__(key, None, 0, b"", NARROW)
        self.root = self
        self.namespace = namespace
        self.memory = PartTotals()
        self.tiers = [PartTotals() for _ in range(n_tiers)]
        self.n_stored_tokens = 0
        """Tokens of nodes that have records."""
        self.pinned: dict[Node, dict[Key, int]] = {}
        """The ends of pinned prefixes. For each: how many tokens of which prompts it keeps."""
        self.cleared_at = -math.inf
        """Wall clock. Records that were written earlier must be deleted wherever they turn up."""
        self.written_at = -math.inf
        """When the latest of its records was written, by the clock of whoever wrote it."""

    @property
    def pinned_nbytes(self) -> int:
        """Bytes of all records of pinned prefixes, wherever they are."""
        nodes = {n for end in self.pinned for n in end.path()}
        return sum(r.nbytes for n in nodes for r in n.records.values())
