"""The tree of all known prefixes, in every namespace. The only place that knows chains of blocks.

    nodes.py     Node (a block), Record (one part of its state), Root (where a namespace begins)
    children.py  a node's children in the order of their tokens: finds the longest common prefix
    tree.py      Tree: the only writer of a node's and a record's fields
    announce.py  what the tree tells whoever wants to know which blocks there are

Pure Python and NumPy: payloads are opaque here.
"""

from firn.cache.tree.announce import Announcement, Announcer, Cleared, Removed, StoredBlock
from firn.cache.tree.children import Text, tokens_of
from firn.cache.tree.nodes import Held, InRow, Mark, Node, Record, Root
from firn.cache.tree.tree import BLOCK_S, DAY_S, Tree

__all__ = [
    "BLOCK_S",
    "DAY_S",
    "Announcement",
    "Announcer",
    "Cleared",
    "Held",
    "InRow",
    "Mark",
    "Node",
    "Record",
    "Removed",
    "Root",
    "StoredBlock",
    "Text",
    "Tree",
    "tokens_of",
]
