"""The tree of all known prefixes. Only this package knows chains and writes to nodes and records.

    nodes.py      Node (a block), Record (one part of its state), Root (where a namespace begins)
    children.py   a node's children, sorted: finds what shares most with a prompt
    tree.py       Tree: adds, moves, leases, pins and removes nodes and records
    clock.py      when a record was used: wall time that does not go back
    order.py      which record is evicted first, in memory and in tiers
    lifetimes.py  nodes that expire, and what is remembered of those that were evicted
    announce.py   what a listener is told about blocks that are added and removed

`Records` drives it. No MLX: payloads are opaque here.
"""

from firn.cache.tree.announce import Announcement, Announcer, Cleared, Removed, StoredBlock
from firn.cache.tree.nodes import CheckpointKind, InRow, Node, PartTotals, Record, Root
from firn.cache.tree.order import BLOCK_S, DAY_S, EvictionOrder
from firn.cache.tree.tree import Tree

__all__ = [
    "BLOCK_S",
    "DAY_S",
    "Announcement",
    "Announcer",
    "CheckpointKind",
    "Cleared",
    "EvictionOrder",
    "InRow",
    "Node",
    "PartTotals",
    "Record",
    "Removed",
    "Root",
    "StoredBlock",
    "Tree",
]
