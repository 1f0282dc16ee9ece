"""Checks in production that the books are right: a little at a time, while the engine is idle.

    accounts    the totals of memory, of each tier and of each namespace are the sums of their records
    records     what is held has arrays, what is stored has a tier, and rows know theirs
    chains      leases and pins of a node include those of its children
    waiting     whatever is said to be written, read or leaving has an order that will end it

A violation is a bug of the cache. It is logged once, with what happened to the record before, counted,
and mended: the record is forgotten, which costs a miss; sums are made anew.

Owner: the engine thread, through the prefix cache.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import islice

from firn.cache.arrays.payload import Payload
from firn.cache.memory.rows import RowPages
from firn.cache.records import Records
from firn.cache.tree import Node, PartTotals, Record

log = logging.getLogger("firn.cache")

EVERY_S = 60.0
"""Time between the starts of two passes, if anything has changed in between."""
N_AT_ONCE = 256
"""Nodes that are checked between two looks at the engine's inbox: about a millisecond."""


class IntegrityCheck:
    def __init__(self, records: Records) -> None:
        self._records = records
        self._ledger = records.ledger
        self._pass: Iterator[Node] | None = None
        self._began_at = records.clock.elapsed()
        self._began_with = 0
        """How many transitions there had been when the last pass began."""
        self._sums = Sums(0)
        self.n_passes = 0
        self.n_violations = 0

    @property
    def is_running(self) -> bool:
        return self._pass is not None

    def tick(self) -> None:
        """The engine is idle: begin or continue a pass, if one is due."""
        if self._pass is None and not self._is_due():
            return
        self.step(N_AT_ONCE)

    def _is_due(self) -> bool:
        has_changed = self._ledger.n_transitions != self._began_with
        return has_changed and self._records.clock.elapsed() - self._began_at >= EVERY_S

    def run(self) -> int:
        """A whole pass now; returns how many violations were found."""
        before, self._pass = self.n_violations, None
        self.step(N_AT_ONCE)
        while self._pass is not None:
            self.step(N_AT_ONCE)
        return self.n_violations - before

    def step(self, n_nodes: int) -> None:
        if self._pass is None:
            self._began_at = self._records.clock.elapsed()
            self._began_with = self._ledger.n_transitions
            self._sums = Sums(len(self._ledger.tiers))
            self._pass = self._nodes()
        some = list(islice(self._pass, n_nodes))
        for node in some:
            self._check_node(node)
        if len(some) < n_nodes:
            self._pass = None
            self.n_passes += 1
            if self._ledger.n_transitions == self._began_with and not self._records.is_clearing:
                self._check_sums()

    def _nodes(self) -> Iterator[Node]:
        tree = self._records.tree
        for root in tree.roots():
            yield from tree.subtree(root)

    # --- one node --------------------------------------------------------------------------

    def _check_node(self, node: Node) -> None:
        if not self._records.tree.is_attached(node.root):
            return
        n_leases = sum(child.n_leases for child in node.children)
        n_pins = sum(child.n_pins for child in node.children) + (node in node.root.pinned)
        if node.n_leases < n_leases or node.n_pins != n_pins:
            self._violated(
                f"{node.n_leases} leases and {node.n_pins} pins on block {node.key.hex()}"
            )
            self._records.tree.recount(node.root)
        for record in list(node.records.values()):
            what = self._fault_of(record)
            if what:
                self._violated(what, record)
                self._records.forget_record(record)
            else:
                self._sums.add(record)

    def _fault_of(self, record: Record) -> str:
        """What is wrong with a record; nothing: ''."""
        arrays, tiers = record.arrays, self._records.tiers
        if isinstance(arrays, RowPages):
            if record not in arrays.records or not self._records.rows.knows(arrays):
                return "it is held in a row that does not have it"
        elif isinstance(arrays, Payload) and arrays.nbytes != record.nbytes:
            return f"it counts {record.nbytes} bytes and holds {arrays.nbytes}"
        if record.leaving and arrays is None:
            return "it is leaving memory, which has nothing of it"
        if record.stored >> len(tiers) or record.writing >> len(tiers):
            return "it is in a tier that does not exist"
        for tier in tiers:
            if record.is_being_written(tier.number) != tier.is_writing(record):
                return f"{tier.name} does not agree whether it is being written"
            if record.is_being_read(tier.number) != tier.is_reading(record):
                return f"{tier.name} does not agree whether it is being read"
        if record.leaving and not (record.writing or any(t.will_write(record) for t in tiers)):
            return "it is leaving memory, and nobody writes it"
        if record.n_leases < 0:
            return f"it has {record.n_leases} leases"
        if not (record.obtainable or record.writing):
            return "nobody has it"
        return ""

    # --- the accounts ----------------------------------------------------------------------

    def _check_sums(self) -> None:
        ledger, sums = self._ledger, self._sums
        if (ledger.memory, ledger.tiers, ledger.leaving_nbytes) != (
            sums.memory,
            sums.tiers,
            sums.leaving_nbytes,
        ):
            self._violated("the totals are not the sums of the records")
            ledger.recount()

    def _violated(self, what: str, record: Record | None = None) -> None:
        self.n_violations += 1
        self._records.counts.failed(
            None if record is None else record.node.root.namespace, "integrity"
        )
        about = "" if record is None else f": {self._about(record)}"
        log.warning("the cache's books are wrong, which costs a miss: %s%s", what, about)

    def _about(self, record: Record) -> str:
        before = ", ".join(self._ledger.history(record)) or "nothing that is remembered"
        name = f"{record.part.value} of {record.node.key.hex()}"
        return f"{name}, {self._ledger.where(record)}; before: {before}"


class Sums:
    """What the records of a pass add up to."""

    def __init__(self, n_tiers: int) -> None:
        self.memory = PartTotals()
        self.tiers = [PartTotals() for _ in range(n_tiers)]
        self.leaving_nbytes = 0

    def add(self, record: Record) -> None:
        if record.leaving:
            self.leaving_nbytes += record.nbytes
        elif record.arrays is not None:
            self.memory.count(record, +1)
        for tier, totals in enumerate(self.tiers):
            if record.is_stored(tier):
                totals.count(record, +1)
