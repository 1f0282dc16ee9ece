"""Keeps the tree consistent with what tiers have: stored records are added, lost ones removed.

A stored record names its parent by key, so it is added once the parent is in the tree. Until then
it is a stray: a scan need not report parents first, and a parent that is gone may be computed again
later.

Owner: the engine thread, through `Records`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from firn.cache.ledger import Ledger
from firn.cache.parts import Part
from firn.cache.storage.catalogue import RecordCatalogue
from firn.cache.storage.container import Name, TierEntry
from firn.cache.storage.desk import Desk, TierDesk
from firn.cache.tiers import Gone
from firn.cache.tree import CheckpointKind, Node, Record, Root, Tree
from firn.core.keys import Key

N_STRAYS, N_ORPHANS = 1 << 17, 1 << 12
"""Caps on the strays remembered: during a scan, and after it, when most parents must be gone."""
N_ONLY_IN_STORES = 1 << 16
"""Cap on the records in the tree that only stores have: a store can be asked again."""


class Stray(NamedTuple):
    """A stored record that has no place in the tree yet."""

    tier: int
    entry: TierEntry


class TierIndex:
    def __init__(self, ledger: Ledger, tree: Tree, catalogue: RecordCatalogue, tiers: Desk) -> None:
        self._ledger = ledger
        self._tree = tree
        self._catalogue = catalogue
        self._tiers = tiers
        self._strays: dict[Key, list[Stray]] = {}
        """By the key of the missing parent."""
        self._n_strays = 0
        self._only_in_stores: dict[Record, None] = {}
        """The oldest first; may contain records that memory or another tier has again."""

    # --- a tier has a record ---------------------------------------------------------------

    def learn(self, tier: TierDesk, changes: Iterable[TierEntry | Gone[Name]]) -> None:
        """Apply what a tier reports about its records."""
        raised: dict[Record, float] = {}
        for change in changes:
            if isinstance(change, Gone):
                self.left_tier(tier, change.name)
            else:
                self._learn([Stray(tier.number, change)], raised)
        self._tiers.touch(raised)

    def learn_strays(self, parent: Node) -> None:
        """A node is new in the tree: add the strays that waited for it."""
        raised: dict[Record, float] = {}
        self._learn(self._take_strays(parent.key), raised)
        self._tiers.touch(raised)

    def _learn(self, todo: list[Stray], raised: dict[Record, float]) -> None:
        """Add each record, then the strays that waited for it. `raised` collects raised stamps."""
        while todo:
            number, entry = todo.pop()
            tier, label = self._tiers[number], entry.label
            root = self._catalogue.root_of(label)
            if root is None:
                self._tree.uses.observe(entry.used_at)  # the folder's other models compare with it
                continue
            if label.created < root.cleared_at:
                tier.delete([entry.name])
                continue
            self._tree.note_written(root, label.created)
            node = self._catalogue.place(root, entry)
            if node is None:
                self._add_stray(Stray(number, entry))
                self._tree.prune(root)
                continue
            record = self._ledger.add(
                node, label.part, nbytes=entry.nbytes, kind=CheckpointKind(label.mark)
            )
            self._ledger.found(record, number)
            if tier.is_store:
                self._only_in_stores[record] = None
            uses = self._tree.uses
            stamp = uses.of_stamp(entry.used_at) if uses.observe(entry.used_at) else 0.0
            self._tree.remember_use(node, self._tree.order.used_at(record, stamp))
            raised |= self._tree.order.note(record, stamp)
            self.extend_life(node, None)
            todo += self._take_strays(node.key)

    def extend_life(self, node: Node, ttl_s: float | None) -> None:
        """Let the node and all above live at least `ttl_s`. What no longer expires is spilled."""
        for freed in self._tree.lifetimes.extend(node, ttl_s):
            self._tiers.spill(freed.records.values())

    # --- strays ----------------------------------------------------------------------------

    def _add_stray(self, stray: Stray) -> None:
        if stray.entry.label.start and self._n_strays < N_STRAYS:
            self._strays.setdefault(stray.entry.label.parent, []).append(stray)
            self._n_strays += 1

    def _take_strays(self, parent: Key) -> list[Stray]:
        strays = self._strays.pop(parent, [])
        self._n_strays -= len(strays)
        return strays

    def delete_strays(self, root: Root) -> None:
        """Delete the strays of a namespace that is cleared."""
        for parent, some in list(self._strays.items()):
            if some[0].entry.label.root == root.key:
                for stray in self._take_strays(parent):
                    self._tiers[stray.tier].delete([stray.entry.name])

    def drop_most_strays(self) -> None:
        """A scan has ended: the parents of most strays will not appear."""
        for parent in list(self._strays):
            if self._n_strays <= N_ORPHANS:
                return
            self._take_strays(parent)

    # --- nobody has a record ---------------------------------------------------------------

    def left_tier(self, tier: TierDesk, name: Name) -> None:
        """A tier no longer has this record."""
        node = self._tree.find(name.key)
        record = node.records.get(name.part) if node is not None else None
        if record is not None:
            self._ledger.lost(record, tier.number)
            self.remove_if_lost(record)

    def remove_if_lost(self, record: Record) -> None:
        """If nobody has the record any more, remember that it was evicted, and remove it."""
        if record.alive and not record.obtainable and not record.writing:
            self._tree.evicted.add(record.node)
            self.remove_lost(record)

    def remove_lost(self, record: Record) -> None:
        """Remove a record that nobody has. Without pages a leaf's other records are useless."""
        if not record.alive:
            return
        node = record.node
        self._ledger.forget(record)
        if record.part is Part.PAGES and node.records and not len(node.children):
            self.forget(list(node.records.values()))

    def forget(self, records: list[Record]) -> None:
        """Remove records from the tree and from every tier."""
        self._tiers.delete(records)
        for record in records:
            self._ledger.forget(record)

    # --- what only stores have -------------------------------------------------------------

    def left_memory(self, record: Record) -> None:
        """A record has left memory: perhaps only a store has it now."""
        if any(tier.is_store for tier in self._tiers):
            self._only_in_stores[record] = None

    def drop_oldest_of_stores(self) -> None:
        """Remove the oldest records that only stores have, beyond N_ONLY_IN_STORES."""
        while len(self._only_in_stores) > N_ONLY_IN_STORES:
            record = next(iter(self._only_in_stores))
            del self._only_in_stores[record]
            is_near = any(not tier.is_store and tier.has(record) for tier in self._tiers)
            if record.arrays is None and not (is_near or record.n_leases or record.writing):
                self.remove_lost(record)
