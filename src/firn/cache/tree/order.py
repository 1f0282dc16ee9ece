"""The order in which records are evicted, in memory and in every tier: least recently used first.

Memory uses a record's `last_use`. A tier knows no chains and keeps one number with each record, its
`stamp`: the last use, lowered by a step for every block before it. So a tier that simply evicts the
lowest stamp removes a chain from its end, as memory does:

    blocks of one chain      0        1        2        3
    stamp of the pages       t        t - 2    t - 4    t - 6
    of a window or state     t - 2    t - 4    t - 6    t - 8

`Node.stamped` is the highest stamp that tiers were given for a node's chain; only this file writes it.

Owner: the tree.
"""

from __future__ import annotations

import math

from firn.cache.parts import Part
from firn.cache.tree.nodes import CheckpointKind, Node, Record

DAY_S = 86_400.0
BLOCK_S = 2.0
"""The step from a block's stamp to the next. No file system rounds times by more."""


class EvictionOrder:
    def __init__(self, block: int, carrier: Part, window: int) -> None:
        """carrier: the part that every later block of a chain needs; the other parts depend on it.

        window: how many tokens of windows a resume reads.
        """
        self._block = block
        self._carrier = carrier
        self._window = window

    def last_use(self, record: Record) -> float:
        """When a record counts as last used, by the wall clock.

        How often it was used does not count: a long conversation that has ended was used more often
        than a new one. A window or state that only a branch would need counts as used a day
        earlier. The carrier of a chain never counts as used before what it carries.
        """
        at = record.node.used_at
        if record.part is not self._carrier and self._only_for_branches(record):
            at -= DAY_S
        return at

    def turn(self, record: Record) -> int:
        """Which of several records that were used at the same time is evicted first: the lowest.

        A chain shrinks from its end. Of what only branches need, the deepest goes last: people go back
        a few turns.
        """
        return -record.node.start if record.part is self._carrier else record.node.start

    def _only_for_branches(self, record: Record) -> bool:
        """Whether only a branch would need this record: a single chain goes on without it."""
        if record.part is Part.STATE and record.kind is CheckpointKind.PROMPT_END:
            return True
        n_tokens = self._window if record.part is Part.WINDOW else 1
        return record.kind < CheckpointKind.LATTICE and _goes_on_alone(record.node, n_tokens)

    def left_behind(self, record: Record) -> Record | None:
        """The window or state that a chain no longer needs once it has this new record."""
        node = record.node
        if record.part is Part.WINDOW:
            behind = (n for n in node.path() if node.end - n.end >= self._window)
            last = next(behind, None)
            return None if last is None else last.records.get(Part.WINDOW)
        return None if node.parent is None else node.parent.records.get(Part.STATE)

    def state_last_use(self, record: Record) -> float:
        """Like `last_use`, among states, which have their own share of memory: shared positions are
        evicted last."""
        return self.last_use(record) + (DAY_S if record.kind >= CheckpointKind.LATTICE else 0.0)

    # --- stamps ----------------------------------------------------------------------------

    def stamp(self, record: Record) -> float:
        return self.last_use(record) - BLOCK_S * self._n_steps(record)

    def used_at(self, record: Record, stamp: float) -> float:
        """When a record with this stamp was last used."""
        return stamp + BLOCK_S * self._n_steps(record)

    def _n_steps(self, record: Record) -> int:
        return record.node.start // self._block + (record.part is not self._carrier)

    def note(self, record: Record, stamp: float) -> dict[Record, float]:
        """Note that a tier has this stamp; returns records whose stamps must rise, and to what.

        There are none while stamps are in order. In a folder that was copied, or that an older
        version wrote, they may not be.
        """
        raised: dict[Record, float] = {}
        if record.part is self._carrier:
            if record.node.stamped > stamp:  # a record that needs this one was noted before it
                return {record: record.node.stamped}
            stamp -= BLOCK_S
        for node in record.node.path():
            stamp += BLOCK_S
            if node.stamped >= stamp:
                break
            node.stamped = stamp
            if self._carrier in node.records:
                raised[node.records[self._carrier]] = stamp
        raised.pop(record, None)
        return raised

    def outdated(self, node: Node, by_s: float) -> dict[Record, float]:
        """The records of the chain that ends here whose stamps are too low, with the right stamps.

        by_s: stamps that are less out of date stay, unless one below would overtake them.
        """
        raised: dict[Record, float] = {}
        least = -math.inf
        for n in node.path():
            stamp = n.used_at - BLOCK_S * (n.start // self._block)
            if stamp - n.stamped >= by_s or n.stamped < least:
                n.stamped = least = stamp
                for record in n.records.values():
                    raised[record] = self.stamp(record)
            least += BLOCK_S
        return raised


def _goes_on_alone(node: Node, n_tokens: int) -> bool:
    """Whether a single chain goes on for at least this many tokens after the node."""
    n = node
    while n.end - node.end < n_tokens:
        if len(n.children) != 1:
            return False
        (n,) = n.children
    return True
