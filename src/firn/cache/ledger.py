"""The ledger: where every record is, and what may happen to it next.

A record has a state in memory, one in each tier, and one of trust. Each arrow is a method here, and
nothing else writes these fields of a record (`tests/cache/test_ledger.py` checks that):

    memory    absent ──hold──▶ held ──leave──▶ leaving ──release──▶ absent      move: held elsewhere
                                ▲ ◀───stay──────┘
                                └──release──▶ absent
    a tier    absent ──begin_write──▶ writing ──end_write──▶ stored ──lost──▶ absent
                └───────────found──────────────────────────▶ stored
    reading   idle ──begin_read──▶ being read ──end_read──▶ idle
    trust     computed ──verify──▶ verified        what a tier has was verified before
    life      add ──▶ known ──forget──▶ gone

What may follow what, beyond the arrows:
- only what memory holds is written, and what is leaving stays until it was;
- only what a tier has is read;
- what a device may have spoilt (computed, not verified) is not written;
- a lease keeps a record from leaving; a record that nobody has any more is forgotten by `Records`.

Owner: the engine thread, through `Records`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from firn.cache.parts import Part
from firn.cache.tree import CheckpointKind, InRow, Node, PartTotals, Record, Root, Tree
from firn.core.keys import Key

N_REMEMBERED = 4096
"""Transitions that are remembered, so that a violation is logged with the record's history."""


class WrongTransition(Exception):
    """A record was told to do what cannot follow its state. A fault of the cache, which costs a miss."""

    def __init__(self, what: str, where: str) -> None:
        super().__init__(f"{what}, but the record is {where}")


class Ledger:
    def __init__(self, tree: Tree) -> None:
        self._tree = tree
        self.memory = PartTotals()
        self.tiers: list[PartTotals] = []
        self.leaving_nbytes = 0
        self._names: list[str] = []
        self.n_transitions = 0
        self._history: deque[tuple[Key, Part, str]] = deque(maxlen=N_REMEMBERED)

    def add_tier(self, name: str) -> int:
        """Add a tier below memory and the others; returns its number."""
        self._tree.add_tier()
        self._names.append(name)
        self.tiers.append(PartTotals())
        return len(self.tiers) - 1

    # --- life ------------------------------------------------------------------------------

    def add(self, node: Node, part: Part, *, nbytes: int, kind: CheckpointKind) -> Record:
        """The node's record of this part, created if there is none. A new one is nowhere yet."""
        return self._tree.add(node, part, nbytes=nbytes, kind=kind)

    def forget(self, record: Record) -> None:
        """It is gone, with every node that is of no use without it."""
        self.release(record)
        for tier in range(len(self.tiers)):
            self.lost(record, tier)
        if record.alive:
            self._note(record, "forgotten")
            self._tree.remove(record)

    def set_kind(self, record: Record, kind: CheckpointKind) -> None:
        record.kind = kind

    # --- trust -----------------------------------------------------------------------------

    def compute(self, record: Record) -> None:
        """It was just computed, and the device has not confirmed yet that it had no fault."""
        record.verified = False

    def verify(self, record: Record) -> None:
        record.verified = True

    # --- memory ----------------------------------------------------------------------------

    def hold(self, record: Record, arrays: Any, *, nbytes: int) -> None:
        """Memory holds it from now on."""
        self._check(record.arrays is None, "hold", record)
        if record.nbytes != nbytes:
            self._resize(record, nbytes)
        record.arrays = arrays
        if isinstance(arrays, InRow):
            arrays.add(record)
        self._count_memory(record, +1)
        self._note(record, "held")

    def move(self, record: Record, arrays: Any) -> None:
        """Memory holds it elsewhere from now on: in its own arrays, or in a row."""
        self._check(record.arrays is not None and not record.leaving, "move", record)
        if isinstance(record.arrays, InRow):
            record.arrays.discard(record)
        if isinstance(arrays, InRow):
            arrays.add(record)
        record.arrays = arrays
        self._note(record, "moved")

    def leave(self, record: Record) -> None:
        """Memory no longer counts it, but keeps its arrays until it is written."""
        self._check(record.arrays is not None and not record.leaving, "leave", record)
        self._count_memory(record, -1)
        record.leaving = True
        self.leaving_nbytes += record.nbytes
        self._note(record, "leaving")

    def stay(self, record: Record) -> None:
        """It was about to leave memory, and stays."""
        self._check(record.leaving, "stay", record)
        record.leaving = False
        self.leaving_nbytes -= record.nbytes
        self._count_memory(record, +1)
        self._note(record, "stays")

    def release(self, record: Record) -> None:
        """Memory no longer holds it, if it did."""
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
        self._note(record, "released")

    def lease(self, record: Record) -> None:
        """A request is about to resume from it."""
        record.n_leases += 1

    def unlease(self, record: Record) -> None:
        self._check(record.n_leases > 0, "unlease", record)
        record.n_leases -= 1

    # --- tiers -----------------------------------------------------------------------------

    def begin_write(self, record: Record, tier: int) -> None:
        self._check(record.arrays is not None, "write", record)
        self._check(not record.is_being_written(tier), "write again", record)
        record.writing |= 1 << tier
        self._note(record, "begins to be written", tier)

    def end_write(self, record: Record, tier: int, *, stored: bool) -> None:
        """stored: the tier has it now. What was forgotten meanwhile is deleted there by `Records`."""
        self._check(record.is_being_written(tier), "end a write", record)
        record.writing &= ~(1 << tier)
        if stored:
            self.found(record, tier)
        else:
            self._note(record, "not written", tier)

    def found(self, record: Record, tier: int) -> None:
        """A tier has it."""
        if not record.is_stored(tier):
            record.stored |= 1 << tier
            self._count_tier(record, tier, +1)
            self._note(record, "stored", tier)

    def lost(self, record: Record, tier: int) -> None:
        """A tier no longer has it, if it did."""
        if record.is_stored(tier):
            record.stored &= ~(1 << tier)
            self._count_tier(record, tier, -1)
            self._note(record, "lost", tier)

    def begin_read(self, record: Record, tier: int) -> None:
        record.reading |= 1 << tier
        self._note(record, "begins to be read", tier)

    def end_read(self, record: Record, tier: int) -> None:
        self._check(record.is_being_read(tier), "end a read", record)
        record.reading &= ~(1 << tier)
        self._note(record, "read ends", tier)

    # --- totals ----------------------------------------------------------------------------

    def detach(self, root: Root) -> None:
        """The root is no longer in the tree: what is below it does not count."""
        self.memory.add(root.memory, sign=-1)
        for total, own in zip(self.tiers, root.tiers, strict=True):
            total.add(own, sign=-1)

    def _count_memory(self, record: Record, sign: int) -> None:
        root = record.node.root
        root.memory.count(record, sign)
        if self._tree.is_attached(root):
            self.memory.count(record, sign)

    def _count_tier(self, record: Record, tier: int, sign: int) -> None:
        root = record.node.root
        root.tiers[tier].count(record, sign)
        if self._tree.is_attached(root):
            self.tiers[tier].count(record, sign)

    def _resize(self, record: Record, nbytes: int) -> None:
        """Bytes on disk and in memory differ a little; all totals count the same number."""
        stored = [tier for tier in range(len(self.tiers)) if record.is_stored(tier)]
        for tier in stored:
            self._count_tier(record, tier, -1)
        record.nbytes = nbytes
        for tier in stored:
            self._count_tier(record, tier, +1)

    def recount(self) -> None:
        """Make all totals what the records add up to."""
        self.memory = PartTotals()
        self.tiers = [PartTotals() for _ in self.tiers]
        self.leaving_nbytes = 0
        for root in self._tree.roots():
            root.memory, root.tiers = PartTotals(), [PartTotals() for _ in self.tiers]
            for record in (r for node in self._tree.subtree(root) for r in node.records.values()):
                self._count(record)

    def write_off(self, record: Record) -> None:
        """Its state is wrong: memory holds nothing of it any more, and totals are made anew."""
        if isinstance(record.arrays, InRow) and record in record.arrays.records:
            record.arrays.discard(record)
        record.arrays, record.leaving, record.n_leases = None, False, 0
        known = (1 << len(self.tiers)) - 1
        record.stored, record.writing = record.stored & known, record.writing & known
        self.recount()

    def _count(self, record: Record) -> None:
        if record.leaving:
            self.leaving_nbytes += record.nbytes
        elif record.arrays is not None:
            self._count_memory(record, +1)
        for tier in range(len(self.tiers)):
            if record.is_stored(tier):
                self._count_tier(record, tier, +1)

    # --- for people ------------------------------------------------------------------------

    def where(self, record: Record) -> str:
        """Where the record is, and what may happen to it next, in one line."""
        return f"{', '.join(self._places(record)) or 'nowhere'}; next: {self._next(record)}"

    def _places(self, record: Record) -> Iterator[str]:
        if not record.alive:
            yield "forgotten"
        if record.leaving:
            yield "leaving memory"
        elif record.arrays is not None:
            yield "held in a row" if isinstance(record.arrays, InRow) else "held in memory"
        for tier, name in enumerate(self._names):
            if record.is_being_written(tier):
                yield f"being written to {name}"
            if record.is_stored(tier):
                yield f"stored in {name}"
            if record.is_being_read(tier):
                yield f"being read from {name}"
        if not record.verified:
            yield "not verified"

    def _next(self, record: Record) -> str:
        if not record.alive:
            return "nothing, once its writes have ended"
        if not record.verified:
            return "verified when the device has confirmed the step, or forgotten"
        if record.n_leases:
            return f"used by {record.n_leases} requests"
        if record.leaving:
            return "released when it is written, kept if a request needs it"
        if record.node.n_pins:
            return "kept while it is pinned"
        if record.arrays is not None:
            return "used, or evicted" if record.stored else "written, used, or evicted"
        return "loaded, or evicted by the tier" if record.stored else "forgotten"

    def history(self, record: Record) -> list[str]:
        """The last transitions of the record, the oldest first."""
        key = record.node.key, record.part
        return [what for *of, what in self._history if tuple(of) == key]

    def _note(self, record: Record, what: str, tier: int | None = None) -> None:
        self.n_transitions += 1
        text = what if tier is None else f"{what} ({self._names[tier]})"
        self._history.append((record.node.key, record.part, text))

    def _check(self, is_allowed: bool, what: str, record: Record) -> None:
        if not is_allowed:
            raise WrongTransition(what, self.where(record))
