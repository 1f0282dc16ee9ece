"""Every step of a record's life: made, spilled below, evicted, loaded again, forgotten everywhere.

The tree says what there is, memory and the tiers below hold it; this keeps the three in agreement.
Owner: the engine thread, through the prefix cache.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, islice

from firn.cache.announce import Cleared
from firn.cache.arrays.payload import Payload
from firn.cache.below import (
    Answered,
    Arrived,
    Below,
    Lost,
    News,
    Scanned,
    Seen,
    Unwritten,
    Written,
    name_of,
    takes_all,
)
from firn.cache.catalogue import Catalogue, Identity
from firn.cache.container import Name
from firn.cache.estimates import Estimates
from firn.cache.faults import TierError
from firn.cache.io import Entry, Io
from firn.cache.live import LiveRows, RowPages
from firn.cache.memory import Memory
from firn.cache.nodes import Mark, Node, Record
from firn.cache.parts import Needs, Part
from firn.cache.stats import Stats
from firn.cache.tiers import AHEAD_S, Gone
from firn.cache.tree import Tree
from firn.core.ports import EngineLoad
from firn.core.values import Namespace

log = logging.getLogger("firn.cache")

LEAVING_SHARE = 0.25
"""Of memory's limit: what may wait to be written before it leaves."""
WRITE_WAIT_S = 0.05
"""How long the engine waits for a tier that cannot keep up, before something is lost."""
FIRST_SCAN_S = 1.0
"""How long the start waits for a tier's first scan; longer ones go on behind."""
END_S = 2.0
"""How long a stop waits for writes that are under way, to take them back."""
TOUCH_EVERY_S = 60.0
"""Stamps in tiers that are less out of date are left as they are."""
N_EXPIRED = 64
"""Nodes whose time is over that are forgotten between two steps."""
N_ELSEWHERE = 1 << 16
"""Records that only stores have and that are kept in mind: a store can be asked again."""
N_TRASHED = 256
"""Nodes of a cleared namespace that are let go of between two steps."""


class Records:
    def __init__(
        self,
        identity: Identity,
        needs: Needs,
        *,
        limit_nbytes: int,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.identity = identity
        self.needs = needs
        self.clock = clock
        carrier = Part.PAGES if needs.pages else Part.WINDOW
        self.tree = Tree(identity.block, chain=carrier, clock=clock, wall=wall)
        self.wall = wall
        self.catalogue = Catalogue(identity, needs, self.tree, wall=wall)
        self.rows = LiveRows(self.tree)
        self.memory = Memory(self.tree, self.rows, limit_nbytes=limit_nbytes, evict=self._evict)
        self.tiers: list[Below] = []
        self.stats = Stats()
        self.estimates = Estimates(clock)
        self._trash: list[Iterator[Node]] = []
        self._in_doubt: list[tuple[Record, int]] | None = None
        """Committed since the last confirmation, with the tiers that had it; None: nobody confirms."""
        self._elsewhere: dict[Record, None] = {}
        """In their order; those that came back since are in here, too."""
        self._put_off: dict[int, list[News]] = {}
        """By tier: what was told while the engine waited for a write."""

    def add_tier(
        self,
        name: str,
        io: Io,
        *,
        wake: Callable[[], None],
        takes: Callable[[Record], bool] = takes_all,
    ) -> None:
        """Spill there from now on what it takes; what is stored there is learned as a scan finds it.

        That takes milliseconds for most: worth waiting for, so that the first request hits.
        """
        below = Below(
            name,
            io,
            self.tree,
            self.catalogue,
            stamp=self._stamp,
            wake=wake,
            takes=takes,
            clock=self.clock,
        )
        self.tiers.append(below)
        below.scan()
        until = time.monotonic() + FIRST_SCAN_S
        while below.scanning and (left := until - time.monotonic()) > 0:
            for news in below.take_results(until, wait_s=left):
                self.note(below, news)
        if below.scanning:
            log.info("%s cache: it has much to tell, and is asked while the server runs", name)

    # --- coming ----------------------------------------------------------------------------

    def keep(self, node: Node, part: Part, arrays: Payload, mark: Mark) -> Record | None:
        """Hold what was computed in memory, whatever a tier has of it; None when there is no room."""
        nbytes = arrays.nbytes
        known = node.records.get(part)
        if known is not None:
            if mark > known.mark:
                self.tree.set_mark(known, mark)
            if known.leaving:
                self.tree.stay(known)
                self.memory.added(known)
            elif known.arrays is None:
                self._hold(known, arrays, nbytes)
            return known
        if not self.memory.make_room(nbytes, part=part):
            self.stats.dropped["no room"] += 1
            return None
        record = self.tree.add(node, part, nbytes=nbytes, mark=mark)
        self.tree.hold(record, arrays, nbytes=nbytes)
        self.memory.added(record)
        self.stats.commits[part.value] += 1
        self._learn_all(
            [(self.tiers[s.tier], s.entry) for s in self.catalogue.take_strays(node.key)]
        )
        return record

    def keep_in_row(self, node: Node, pages: RowPages, nbytes: int) -> Record:
        """Know of pages that lie in a row, unless memory has them already. They need no room."""
        known = node.records.get(Part.PAGES)
        if known is None:
            known = self.tree.add(node, Part.PAGES, nbytes=nbytes, mark=Mark.TURN)
            self.stats.commits[Part.PAGES.value] += 1
            strays = self.catalogue.take_strays(node.key)
            self._learn_all([(self.tiers[s.tier], s.entry) for s in strays])
        if known.leaving:
            self.tree.stay(known)
            self.memory.added(known)
        elif known.arrays is None:
            self.tree.hold(known, pages, nbytes=nbytes)
            self.memory.added(known)
        return known

    def committed(self, records: Sequence[Record]) -> None:
        """Computed just now: to be spilled once the device is known to have had no fault."""
        if self._in_doubt is None:
            self.spill(records)
        else:
            self._in_doubt += [(record, record.stored) for record in records]

    def confirm(self) -> None:
        """What was committed so far is good. From the first call on, this is waited for."""
        waiting, self._in_doubt = self._in_doubt or [], []
        self.spill(record for record, _ in waiting if record.alive)

    def doubt(self) -> None:
        """Forget what was committed since: arrays, and what a tier has got of them meanwhile."""
        waiting, self._in_doubt = self._in_doubt or [], []
        for record, stored in reversed(waiting):
            if not record.alive:
                continue
            self.stats.dropped["in doubt"] += 1
            self.tree.release(record)
            if record.stored != stored or record.writing:
                self._delete([record])
                self.lose(record)
            elif not record.stored:
                self.lose(record)

    def spill(self, records: Iterable[Record]) -> None:
        """Let these outlive memory, in every tier that should have them and has not."""
        for record in records:
            if self.tiers and record.arrays is not None and self._spills(record):
                for tier in self.tiers:
                    on_its_way = (record.stored | record.writing) >> tier.number & 1
                    if not on_its_way and tier.takes(record):
                        tier.spill(record)

    def loaded(self, record: Record, arrays: Payload) -> None:
        """Hold a loaded record in memory again, if room can be made for it."""
        if record.alive and record.arrays is None:
            self._hold(record, arrays, arrays.nbytes)

    def _hold(self, record: Record, arrays: Payload, nbytes: int) -> None:
        self.tree.lease_record(record)  # making room must not take it, nor the chain it ends
        try:
            if self.memory.make_room(nbytes, part=record.part) and record.alive:
                self.tree.hold(record, arrays, nbytes=nbytes)
                self.memory.added(record)
        finally:
            self.tree.unlease_record(record)

    def used(self, node: Node) -> None:
        """The chain that ends here was just used: it is the last to go, in every tier."""
        self.tree.use(node)
        if self.tiers:
            self._touch(self.tree.outdated(node, TOUCH_EVERY_S))

    def proved(self, node: Node) -> None:
        """Somebody resumed from the chain that ends here: stores take only what was used again."""
        for n in self.tree.set_reused(node):
            self.spill(n.records.values())

    def _stamp(self, record: Record) -> float:
        """What a tier is to write with it; what it depends on is stamped above it first."""
        stamp = self.tree.stamp(record)
        raised = self.tree.stamped(record, stamp)
        stamp = raised.pop(record, stamp)
        self._touch(raised)
        return stamp

    def _touch(self, stamps: Mapping[Record, float]) -> None:
        for tier in self.tiers:
            tier.touch(stamps)

    # --- going -----------------------------------------------------------------------------

    def forget(self, node: Node) -> None:
        """Remove a node's records, wherever they are."""
        records = list(node.records.values())
        self._delete(records)
        for record in records:
            self.tree.remove(record)

    def take_back(self, records: Sequence[Record]) -> None:
        """Let go of what was just computed and is not good; the newest, so the deepest, first."""
        for record in reversed(records):
            self.tree.release(record)
            if not record.stored:
                self.lose(record)

    def drop(self, records: Iterable[Record]) -> None:
        """Memory lets go of them; who has them nowhere else loses them. The deepest first."""
        for record in records:
            self.tree.release(record)
            if not record.obtainable and not record.writing:
                self.lose(record)

    def lose(self, record: Record) -> None:
        """Nobody has it any more. Without its pages a node's other records cannot be used."""
        if not record.alive:
            return
        node = record.node
        self.tree.remove(record)
        if record.part is Part.PAGES and node.records and not len(node.children):
            self.forget(node)

    def _evict(self, record: Record) -> None:
        """Out of memory. What a tier is to have stays within reach until it is written."""
        self.stats.evictions[record.part.value] += 1
        missing = [
            tier
            for tier in self.tiers
            if not record.stored >> tier.number & 1 and self._spills(record) and tier.takes(record)
        ]
        if missing and not record.stored and self._leave(record, missing):
            return
        self.tree.release(record)
        if any(tier.asks for tier in self.tiers):
            self._elsewhere[record] = None
        if not record.obtainable and not record.writing:
            self.tree.remember_evicted(record.node)
            self.lose(record)

    def _forget_elsewhere(self) -> None:
        """Let go of the oldest of what only stores have."""
        while len(self._elsewhere) > N_ELSEWHERE:
            record = next(iter(self._elsewhere))
            del self._elsewhere[record]
            near = any(not tier.asks and tier.has(record) for tier in self.tiers)
            if record.arrays is None and not (near or record.n_leases or record.writing):
                self.lose(record)

    def _leave(self, record: Record, tiers: Sequence[Below]) -> bool:
        """Let a tier have it first. False: none takes it."""
        taking = [tier for tier in tiers if record.writing >> tier.number & 1 or tier.writes]
        if not taking:
            self.stats.dropped["tier paused"] += 1
            return False
        allowed = max(int(self.memory.limit_nbytes * LEAVING_SHARE), record.nbytes)
        self.rows.own(record)
        self.tree.leave(record)
        for tier in taking:
            tier.spill_now(record)
        if self.tree.leaving_nbytes > allowed:
            self._wait_for_writes(allowed)
        if self.tree.leaving_nbytes <= allowed or not record.leaving:
            return True
        self.stats.dropped["write queue full"] += 1
        return False

    def _wait_for_writes(self, allowed: int) -> None:
        until = time.monotonic() + WRITE_WAIT_S
        for tier in self.tiers:
            while self.tree.leaving_nbytes > allowed and (left := until - time.monotonic()) > 0:
                for news in tier.take_results(math.inf, wait_s=left):
                    if isinstance(news, Written | Unwritten):
                        self.note(tier, news)
                    else:
                        self._put_off.setdefault(tier.number, []).append(news)

    def _spills(self, record: Record) -> bool:
        """A state at a prompt's end is worth a file only where no other leads near it."""
        if record.node.expires_at != math.inf:
            return False
        if record.part is not Part.STATE or record.mark is not Mark.PROMPT_END:
            return True
        above = record.node.parent
        return above is None or not any(Part.STATE in n.records for n in above.path())

    def _delete(self, records: Sequence[Record]) -> None:
        for tier in self.tiers:
            names = [name_of(r) for r in records if tier.has(r)]
            if names:
                tier.forget(names)

    # --- lifetimes -------------------------------------------------------------------------

    def extend_life(self, node: Node, ttl_s: float | None) -> None:
        """Let the node and all above it live at least so long; what lives on is worth a file."""
        for freed in self.tree.extend_life(node, ttl_s):
            self.spill(freed.records.values())

    def expire(self) -> None:
        for node in islice(self.tree.expired(), N_EXPIRED):
            for n in reversed(list(self.tree.below(node))):
                self.forget(n)

    def unlease(self, node: Node) -> None:
        self.tree.unlease(node)
        self.memory.let_go()

    def unpin(self, node: Node) -> None:
        self.tree.unpin(node)
        self.memory.let_go()

    def pin(self, node: Node) -> None:
        """Keep the node and all above it; what was about to leave stays, if it has room."""
        self.tree.pin(node)
        for record in [r for n in node.path() for r in n.records.values() if r.leaving]:
            if self.memory.make_room(record.nbytes, part=record.part) and record.leaving:
                self.tree.stay(record)
                self.memory.added(record)

    def clear(self, namespace: Namespace | None) -> int:
        """Forget one namespace or all at once; bytes of memory.

        Its records are let go of little by little, and those that a scan has yet to find as well.
        """
        nbytes = 0
        if namespace is None and self.tree.announcer is not None:
            self.tree.announcer.announce(Cleared())
        names = self.catalogue.namespaces if namespace is None else [namespace]
        for root in [root for name in names for root in self.catalogue.roots(name)]:
            nbytes += root.memory.total_nbytes
            self._trash.append(self.tree.below(self.tree.detach(root)))
            for stray in self.catalogue.drop_strays(root.key):
                self.tiers[stray.tier].forget([stray.entry.name])
        return nbytes

    # --- what happens below ----------------------------------------------------------------

    def poll(self, load: EngineLoad) -> Iterator[tuple[Below, News]]:
        """Bring the tree up to date with what the tiers tell; what was read comes out here."""
        self._empty_trash()
        self._forget_elsewhere()
        for tier in self.tiers:
            for news in chain(self._take_put_off(tier), tier.poll(load)):
                self.note(tier, news)
                yield tier, news

    def _take_put_off(self, tier: Below) -> list[News]:
        return self._put_off.pop(tier.number, [])

    @property
    def settled(self) -> bool:
        return not self._trash and all(tier.idle for tier in self.tiers)

    def note(self, tier: Below, news: News) -> None:
        match news:
            case Arrived(record, arrays, _, array_s):
                self.estimates.saw_arrays(record.nbytes, array_s)
                self.loaded(record, arrays)
                if tier.number:
                    self.spill([record])  # the faster tiers above should have it, too
            case Lost(record, error):
                self.stats.faults[f"read: {error.reason}"] += 1
                if not record.obtainable:
                    self.lose(record)
                elif record.arrays is not None:
                    self.spill([record])  # it was computed meanwhile, and is not there after all
            case Written(record, evicted):
                self._written(tier, record, evicted)
            case Unwritten(record, error):
                if self.tree.is_current(record):
                    self.stats.dropped[error.reason] += 1
                self._left(record)
            case Seen(changes):
                self._learn_all((tier, change) for change in changes)
            case Answered(_, entries):
                self._learn_all((tier, entry) for entry in entries)
            case Scanned():
                self.catalogue.forget_most_strays()

    def _written(self, tier: Below, record: Record, evicted: Sequence[Name]) -> None:
        if not self.tree.is_current(record):
            self.tree.set_gone(record, tier.number)
            tier.forget([name_of(record)])  # it was superseded while it was on its way
        self._left(record)
        for name in evicted:
            self._gone(tier, name)

    def _left(self, record: Record) -> None:
        """A write ended, well or not: what waited for it may leave memory."""
        if record.leaving and not record.writing:
            self.tree.release(record)
        if record.alive and not record.obtainable and not record.writing:
            self.tree.remember_evicted(record.node)
            self.lose(record)

    def _learn_all(self, changes: Iterable[tuple[Below, Entry | Gone[Name]]]) -> None:
        raised: dict[Record, float] = {}
        for tier, change in changes:
            if isinstance(change, Gone):
                self._gone(tier, change.name)
            else:
                self._learn(tier, change, raised)
        self._touch(raised)

    def _learn(self, tier: Below, entry: Entry, raised: dict[Record, float]) -> None:
        """A stored record takes its place, and so do those that waited for it as their parent."""
        todo = [(tier, entry)]
        while todo:
            tier, entry = todo.pop()
            label = entry.label
            root = self.catalogue.root_of(label)
            if root is None:
                continue
            if label.created < root.cleared_at:
                tier.forget([entry.name])
                continue
            node = self.catalogue.place(root, entry)
            if node is None:
                self.catalogue.add_stray(tier.number, entry)
                self.tree.prune(root)
                continue
            record = self.tree.add(node, label.part, nbytes=entry.nbytes, mark=Mark(label.mark))
            self.tree.set_stored(record, tier.number)
            if tier.asks:
                self._elsewhere[record] = None
            stamp = entry.used_at if entry.used_at < self.wall() + AHEAD_S else 0.0
            self.tree.remember_use(node, self.tree.unstamp(record, stamp))
            raised |= self.tree.stamped(record, stamp)
            self.extend_life(node, None)
            todo += [(self.tiers[s.tier], s.entry) for s in self.catalogue.take_strays(node.key)]

    def _gone(self, tier: Below, name: Name) -> None:
        node = self.tree.find(name.key)
        record = node.records.get(name.part) if node is not None else None
        if record is not None:
            self.tree.set_gone(record, tier.number)
            if not record.obtainable and not record.writing:
                self.tree.remember_evicted(record.node)
                self.lose(record)

    def _empty_trash(self) -> None:
        """Some records of cleared namespaces: their arrays, and their bytes in every tier."""
        nodes: list[Node] = []
        while self._trash and len(nodes) < N_TRASHED:
            some = list(islice(self._trash[-1], N_TRASHED - len(nodes)))
            if not some:
                self._trash.pop()
            nodes += some
        records = [r for node in nodes for r in node.records.values()]
        self._delete(records)
        for record in records:
            self.tree.remove(record)

    def close(self) -> None:
        """Write what is to stay, and make sure that what was cleared away does not."""
        while self._trash:
            self._empty_trash()
        for tier in self.tiers:
            for news in tier.take_ended(END_S):
                self.note(tier, news)
            tier.close()

    def failed(self, where: str, error: Exception) -> None:
        """Fail closed: a fault in the cache is a counted miss."""
        reason = f"{where}: {error.reason}" if isinstance(error, TierError) else where
        self.stats.faults[reason] += 1
        log.warning("the cache failed in %s, which costs a miss: %r", where, error, exc_info=error)
