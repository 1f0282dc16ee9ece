"""Every step of a record's life: held in memory, spilled, evicted, loaded again, forgotten.

    tree     which records there are, and where each of them is stored
    memory   which of them are held as arrays, under a limit
    tiers    which of them are stored as bytes
    index    keeps the tree in agreement with the tiers

This module makes the four act together. Owner: the engine thread, through the prefix cache.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

from firn.cache.arrays.payload import Payload
from firn.cache.ledger import Ledger
from firn.cache.memory.eviction import MemoryTier
from firn.cache.memory.rows import LiveRows, RowPages
from firn.cache.parts import Needs, Part
from firn.cache.planning.estimates import Estimates
from firn.cache.stats import NamespaceStats
from firn.cache.storage.catalogue import CacheIdentity, RecordCatalogue
from firn.cache.storage.container import Name
from firn.cache.storage.desk import Desk, Reported, TierDesk
from firn.cache.storage.faults import TierError
from firn.cache.storage.index import TierIndex
from firn.cache.storage.orders import (
    ReadFailed,
    RecordRead,
    RecordWritten,
    RootCleared,
    ScanBatch,
    ScanEnded,
    StoreAnswered,
    TierEvent,
    Worker,
    WriteFailed,
)
from firn.cache.storage.spill_policy import EVERYTHING, SpillPolicy
from firn.cache.tree import CheckpointKind, Cleared, Node, Record, Root, Tree
from firn.core.clock import SYSTEM_CLOCK, Clock
from firn.core.errors import may_be_device_fault
from firn.core.ports import EngineLoad
from firn.core.values import Namespace

log = logging.getLogger("firn.cache")

LEAVING_SHARE = 0.25
"""Share of memory's limit that evicted records may occupy until they are written."""
OWN_LEASES = 2
"""Leases on a prompt's chain while one of its blocks is stored: the request's, and the block's."""
WRITE_WAIT_S = 0.05
"""How long the engine waits for a tier that cannot keep up, before a record is lost."""
TOUCH_EVERY_S = 60.0
"""Stamps in tiers are not updated until they are this far out of date."""
N_EXPIRED = 64
"""The most expired nodes that are forgotten between two steps."""
N_CLEARED = 256
"""The most nodes of cleared namespaces that are forgotten between two steps."""


@dataclass(frozen=True, slots=True)
class Clearing:
    """What was cleared, and when that holds for good."""

    nbytes: int
    """How many bytes this frees in memory."""
    promises: tuple[Future[None], ...]
    """Done once no later process can find it again. They may fail with NotForgotten."""


class Records:
    def __init__(
        self,
        identity: CacheIdentity,
        needs: Needs,
        *,
        limit_nbytes: int,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.identity = identity
        self.needs = needs
        self.clock = clock
        carrier = Part.PAGES if needs.pages else Part.WINDOW
        self.tree = Tree(identity.block, carrier=carrier, window=needs.window, clock=clock)
        self.ledger = Ledger(self.tree)
        self.catalogue = RecordCatalogue(identity, needs, self.tree, clock=clock)
        self.rows = LiveRows(self.tree, self.ledger)
        self.memory = MemoryTier(
            self.tree, self.ledger, self.rows, limit_nbytes=limit_nbytes, evict=self._evict
        )
        self.tiers = Desk(self.ledger, self.tree, self.catalogue, window=needs.window, clock=clock)
        self.index = TierIndex(self.ledger, self.tree, self.catalogue, self.tiers)
        self.counts = NamespaceStats()
        self.estimates = Estimates(clock)
        self._cleared: list[Iterator[Node]] = []
        self._unconfirmed: list[tuple[Record, int]] | None = None
        """Records committed since the last confirmation, each with the tiers that had it; None:
        commits need no confirmation."""
        self._fault: Exception | None = None
        self._wait_until = math.inf
        """No eviction waits for tiers beyond this time."""

    def add_tier(self, name: str, worker: Worker, policy: SpillPolicy = EVERYTHING) -> None:
        """Add a tier below the existing ones, and learn what it has."""
        for tier, event in self.tiers.add(name, worker, policy):
            self.apply(tier, event)

    # --- computed --------------------------------------------------------------------------

    def keep(
        self,
        node: Node,
        part: Part,
        arrays: Payload,
        kind: CheckpointKind,
        new: list[Record],
    ) -> bool:
        """Hold in memory what was computed, whether or not a tier has it; False: there is no room.

        new: the records that the same commit has added, which are not evicted for it. If these arrays
        are held, their record is added.
        """
        record = node.records.get(part)
        if record is not None:
            if kind > record.kind:
                self.ledger.set_kind(record, kind)
            if record.leaving:
                self._stay(record)
            elif record.arrays is None and self._hold_if_room(record, arrays):
                new.append(record)
            return True
        has_room = self.memory.make_room(arrays.nbytes, part=part)
        if not has_room and not self._evict_own_chain(node, arrays.nbytes, part, new):
            self.counts.dropped(node.root.namespace, "no room")
            return False
        record = self.ledger.add(node, part, nbytes=arrays.nbytes, kind=kind)
        self.ledger.hold(record, arrays, nbytes=arrays.nbytes)
        self.memory.added(record)
        new.append(record)
        self.counts.committed(node.root.namespace, part.value)
        self.index.learn_strays(node)
        return True

    def keep_in_row(self, node: Node, pages: RowPages, nbytes: int) -> Record:
        """Leave the node's pages in a row, unless memory has them already. They need no room."""
        record = node.records.get(Part.PAGES)
        if record is None:
            record = self.ledger.add(node, Part.PAGES, nbytes=nbytes, kind=CheckpointKind.TURN)
            self.counts.committed(node.root.namespace, Part.PAGES.value)
            self.index.learn_strays(node)
        if record.leaving:
            self._stay(record)
        elif record.arrays is None:
            self.hold(record, pages, nbytes=nbytes)
        return record

    def hold(self, record: Record, arrays: Payload | RowPages, *, nbytes: int) -> None:
        """Hold the record in memory from now on. The caller has made room for it."""
        self.ledger.hold(record, arrays, nbytes=nbytes)
        self.memory.added(record)

    def _hold_if_room(self, record: Record, arrays: Payload) -> bool:
        """Whether memory holds it now. Not if making room removed it, with its block's pages."""
        if not self.memory.make_room(arrays.nbytes, part=record.part) or not record.alive:
            return False
        self.hold(record, arrays, nbytes=arrays.nbytes)
        return True

    def _stay(self, record: Record) -> None:
        """Keep a record that was about to leave memory."""
        self.ledger.stay(record)
        self.memory.added(record)

    def _evict_own_chain(
        self, node: Node, nbytes: int, part: Part, spared: Collection[Record]
    ) -> bool:
        """Make room for a block of a prompt that is longer than memory: evict the blocks before it,
        from the end, once tiers have them. The request itself computes in its row. What other
        leases or pins keep stays in memory."""
        for n in node.path_to_root() if self.memory.fits_alone(nbytes, part=part) else ():
            if n.n_leases > OWN_LEASES or n.n_pins:
                return False
            for record in list(n.records.values()):
                if record in spared or record.n_leases or not isinstance(record.arrays, Payload):
                    continue
                if not self._is_stored_soon(record):
                    return False
                if record.arrays is not None and not record.leaving:
                    self._evict(record)
            if self.memory.make_room(nbytes, part=part):
                return True
        return False

    def _is_stored_soon(self, record: Record) -> bool:
        if not record.stored:
            for tier in self.tiers.lacking(record):
                if tier.writes:
                    tier.spill_now(record)
            for tier, event in () if record.stored else self.tiers.take_writes(WRITE_WAIT_S):
                self.apply(tier, event)
                if record.stored:
                    break
        return record.alive and bool(record.stored)

    # --- confirmed by the device -----------------------------------------------------------

    def committed(self, records: Sequence[Record]) -> None:
        """Spill what was just computed, once the device is known to have had no fault."""
        if self._unconfirmed is None:
            self.tiers.spill(records)
        else:
            self._unconfirmed += [(record, record.stored) for record in records]
            for record in records:
                self.ledger.compute(record)

    def confirm(self) -> None:
        """What was committed so far is sound. From the first call on, spilling waits for this."""
        self.rows.unconfirmed.clear()
        waiting, self._unconfirmed = self._unconfirmed or [], []
        for record, _ in waiting:
            self.ledger.verify(record)
        self.tiers.spill(record for record, _ in waiting if record.alive)

    def discard_unconfirmed(self) -> None:
        """Forget what was committed since the last confirmation, in memory and in tiers."""
        waiting, self._unconfirmed = self._unconfirmed or [], []
        for record, stored in reversed(waiting):
            if not record.alive:
                continue
            self.counts.dropped(record.node.root.namespace, "in doubt")
            self.ledger.release(record)
            if record.stored != stored or record.writing:
                self.tiers.delete([record])
                self.index.remove_lost(record)
            elif not record.stored:
                self.index.remove_lost(record)

    def take_back(self, records: Sequence[Record]) -> None:
        """Drop what a failed commit has just added, the newest (and so the deepest) first."""
        for record in reversed(records):
            self.ledger.release(record)
            if not record.stored:
                self.index.remove_lost(record)

    # --- used ------------------------------------------------------------------------------

    def used(self, node: Node) -> None:
        """CheckpointKind the chain that ends here as just used: memory and tiers evict it last."""
        self.tree.use(node)
        if len(self.tiers):
            self.tiers.touch(self.tree.order.outdated(node, TOUCH_EVERY_S))

    def reused(self, node: Node) -> None:
        """A request resumed from the chain that ends here; some stores accept only such records."""
        for n in self.tree.set_reused(node):
            self.tiers.spill(n.records.values())

    def keep_window(self, node: Node, position: int, kind: CheckpointKind) -> None:
        """A prompt may resume at this position of the chain that ends here: write its window at once."""
        for n in node.path():
            if n.end <= position - self.needs.window:
                return
            record = n.records.get(Part.WINDOW)
            if record is not None and n.start < position and kind > record.kind:
                self.ledger.set_kind(record, kind)
                self.tiers.spill([record])

    def unlease(self, node: Node) -> None:
        self.tree.unlease(node)
        if not node.n_leases:  # otherwise no node above it is free either
            self.memory.let_go()

    def pin(self, node: Node) -> None:
        """Keep the node and all above it; what was about to leave memory stays if there is room."""
        self.tree.pin(node)
        for record in [r for n in node.path() for r in n.records.values() if r.leaving]:
            if self.memory.make_room(record.nbytes, part=record.part) and record.leaving:
                self._stay(record)

    def unpin(self, node: Node) -> None:
        self.tree.unpin(node)
        self.memory.let_go()

    # --- evicted ---------------------------------------------------------------------------

    def set_limit(self, nbytes: int) -> None:
        """Set memory's limit. Evictions wait while tiers keep writing; if none does, WRITE_WAIT_S
        in all."""
        self.memory.limit_nbytes = nbytes
        self._wait_until = self.clock.elapsed() + WRITE_WAIT_S
        try:
            self.memory.shrink_to(nbytes)
        finally:
            self._wait_until = math.inf

    def _evict(self, record: Record) -> None:
        """Evict it from memory. If a tier should have it, its arrays stay until it is written."""
        self.counts.evicted(record.node.root.namespace, record.part.value)
        lacking = [t for t in self.tiers.lacking(record) if t.is_worth_writing(record)]
        if lacking and not record.stored and self._leave(record, lacking):
            return
        self.ledger.release(record)
        self.index.left_memory(record)
        self.index.remove_if_lost(record)

    def _leave(self, record: Record, tiers: Sequence[TierDesk]) -> bool:
        """Have it written first. False: no tier accepts it, or too much waits to be written."""
        taking = [tier for tier in tiers if record.is_being_written(tier.number) or tier.writes]
        if not taking:
            self.counts.dropped(record.node.root.namespace, "tier paused")
            return False
        allowed = max(int(self.memory.limit_nbytes * LEAVING_SHARE), record.nbytes)
        self.rows.own(record)
        self.ledger.leave(record)
        for tier in taking:
            tier.spill_now(record)
        self._wait_for_room(allowed)
        if self.ledger.leaving_nbytes <= allowed or not record.leaving:
            return True
        if not record.writing:  # otherwise a tier has accepted it, and will still write it
            self.counts.dropped(record.node.root.namespace, "write queue full")
        return False

    def _wait_for_room(self, allowed_nbytes: int) -> None:
        """Wait until no more than this is leaving memory, for a bounded time."""
        wait_s = min(self._wait_until - self.clock.elapsed(), WRITE_WAIT_S)
        if self.ledger.leaving_nbytes <= allowed_nbytes:
            return
        for tier, event in self.tiers.take_writes(wait_s):
            self.apply(tier, event)
            if isinstance(event, RecordWritten):  # the tier is slow, not stuck
                self._wait_until = max(self._wait_until, self.clock.elapsed() + WRITE_WAIT_S)
            if self.ledger.leaving_nbytes <= allowed_nbytes:
                return

    def drop(self, records: Iterable[Record]) -> None:
        """Drop these, deepest first, from memory without writing them; what no tier has is lost."""
        for record in records:
            self.ledger.release(record)
            if not record.obtainable and not record.writing:
                self.index.remove_lost(record)

    # --- forgotten -------------------------------------------------------------------------

    def forget(self, node: Node) -> None:
        """Remove a node's records, wherever they are."""
        self.index.forget(list(node.records.values()))

    def forget_record(self, record: Record) -> None:
        """Remove a record whose state is wrong, wherever it is."""
        self.ledger.write_off(record)
        self.index.forget([record])

    def extend_life(self, node: Node, ttl_s: float | None) -> None:
        self.index.extend_life(node, ttl_s)

    def expire(self) -> None:
        for node in islice(self.tree.lifetimes.expired(), N_EXPIRED):
            for n in reversed(list(self.tree.subtree(node))):
                self.forget(n)

    def clear(self, namespace: Namespace | None) -> Clearing:
        """Forget one namespace, or all.

        Lookups miss immediately. The records are removed a few at a time, and those that a scan has
        yet to find are deleted when it finds them, by this process or a later one.
        """
        if namespace is None and self.tree.announcer is not None:
            self.tree.announcer.announce(Cleared())
        names = self.catalogue.namespaces if namespace is None else [namespace]
        nbytes, promises = 0, list[Future[None]]()
        for root in [root for name in names for root in self.catalogue.roots(name)]:
            nbytes += root.memory.total_nbytes
            # Later than all of its records, even if a clock was set back since.
            at = max(
                self.clock.wall(), math.nextafter(max(root.written_at, root.cleared_at), math.inf)
            )
            self._clear(root, at)
            promises += [tier.bury(root.key, at) for tier in self.tiers]
        return Clearing(nbytes, tuple(promises))

    def _clear(self, root: Root, at: float) -> None:
        detached = self.tree.detach(root, at)
        self.ledger.detach(detached)
        self._cleared.append(self.tree.subtree(detached))
        self.tiers.give_up_below(root)
        self.index.delete_strays(root)

    def _was_cleared(self, cleared: RootCleared) -> None:
        """A tier notes a clearing: by another process, or before this one was started."""
        root = self.catalogue.known_root(cleared.root)
        if root is not None and cleared.at > root.cleared_at:
            self._clear(root, cleared.at)

    def _forget_cleared(self) -> None:
        nodes: list[Node] = []
        while self._cleared and len(nodes) < N_CLEARED:
            some = list(islice(self._cleared[-1], N_CLEARED - len(nodes)))
            if not some:
                self._cleared.pop()
            nodes += some
        self.index.forget([r for node in nodes for r in node.records.values()])

    # --- what tiers report -----------------------------------------------------------------

    def poll(self, load: EngineLoad) -> Iterator[Reported]:
        """Apply what the tiers report to the tree, and yield it."""
        self._forget_cleared()
        self.index.drop_oldest_of_stores()
        for tier in self.tiers:
            for event in tier.poll(load):
                self.apply(tier, event)
                yield tier, event

    def apply(self, tier: TierDesk, event: TierEvent) -> None:
        match event:
            case RecordRead(record, arrays, _, array_s):
                self.estimates.observe_arrays(record.nbytes, array_s)
                if record.alive and record.arrays is None:
                    self._hold_if_room(record, arrays)
                if tier.number:
                    self.tiers.spill([record])  # the faster tiers above should have it, too
            case ReadFailed(record, error):
                self.counts.failed(record.node.root.namespace, f"read: {error.reason}")
                if not record.obtainable:
                    self.index.remove_lost(record)
                elif record.arrays is not None:
                    self.tiers.spill([record])  # computed by now, and the tier does not have it
            case RecordWritten(record, evicted):
                self._was_written(tier, record, evicted)
            case WriteFailed(record, error):
                if self.tree.is_current(record):
                    self.counts.dropped(record.node.root.namespace, error.reason)
                self._write_ended(tier, record)
            case ScanBatch(changes):
                for cleared in [c for c in changes if isinstance(c, RootCleared)]:
                    self._was_cleared(cleared)
                self.index.learn(tier, [c for c in changes if not isinstance(c, RootCleared)])
            case StoreAnswered(entries=entries):
                self.index.learn(tier, entries)
            case ScanEnded():
                self.index.drop_most_strays()

    def _was_written(self, tier: TierDesk, record: Record, evicted: Sequence[Name]) -> None:
        self._write_ended(tier, record)
        for name in evicted:
            self.index.left_tier(tier, name)

    def _write_ended(self, tier: TierDesk, record: Record) -> None:
        """Release it if it waited for this write, unless a request is about to resume from it; delete
        it from the tier if it is outdated."""
        if not self.tree.is_current(record):
            self.ledger.lost(record, tier.number)
            self.tiers.delete_from(tier, [record])
        if record.leaving and not record.writing:
            if record.n_leases:
                self._stay(record)
            else:
                self.ledger.release(record)
        self.index.remove_if_lost(record)

    # --- the end ---------------------------------------------------------------------------

    @property
    def is_clearing(self) -> bool:
        """Whether records of cleared namespaces are still being removed."""
        return bool(self._cleared)

    @property
    def settled(self) -> bool:
        """Whether nothing is left to forget or to spill."""
        return not self._cleared and self.tiers.idle

    def close(self) -> None:
        """Write what should be kept, and delete what was cleared."""
        while self._cleared:
            self._forget_cleared()
        for tier, event in self.tiers.close():
            self.apply(tier, event)
        if self.tree.announcer is not None:
            self.tree.announcer.close()

    # --- faults ----------------------------------------------------------------------------

    @contextmanager
    def absorbing(self, where: str, *, namespace: Namespace | None = None) -> Iterator[None]:
        """A fault inside costs a miss."""
        try:
            yield
        except Exception as e:
            self.failed(where, e, namespace=namespace)

    def failed(self, where: str, error: Exception, *, namespace: Namespace | None = None) -> None:
        """Log and count a fault in the cache, which costs a miss. namespace: see NamespaceStats."""
        reason = f"{where}: {error.reason}" if isinstance(error, TierError) else where
        self.counts.failed(namespace, reason)
        log.warning("the cache failed in %s, which costs a miss: %r", where, error, exc_info=error)
        if may_be_device_fault(error):
            self._fault = error

    def take_fault(self) -> Exception | None:
        fault, self._fault = self._fault, None
        return fault
