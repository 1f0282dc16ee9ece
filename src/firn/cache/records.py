"""Every step of a record's life: made, spilled below, evicted, loaded again, forgotten everywhere.

The tree says what there is, memory and the tiers below hold it; this keeps the three in agreement.
Owner: the engine thread, through the prefix cache.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from firn.cache.below import (
    Arrived,
    Below,
    Lost,
    News,
    Scanned,
    Seen,
    Unwritten,
    Written,
    name_of,
)
from firn.cache.children import Text
from firn.cache.codecs import Arrays, nbytes_of
from firn.cache.container import Header, Label, Layers, Name
from firn.cache.estimates import Estimates
from firn.cache.faults import TierError
from firn.cache.io import Changes, Entry, Io
from firn.cache.memory import Memory
from firn.cache.parts import Needs, Part
from firn.cache.stats import Stats
from firn.cache.tiers import Gone
from firn.cache.tree import BLOCK_S, Mark, Node, Record, Root, Tree
from firn.core.keys import Key, KeyTokens, child_key, root_key
from firn.core.ports import Load
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
N_STRAYS = 20_000
"""Stored records whose parents a scan has not seen yet."""
N_TRASHED = 256
"""Records of a cleared namespace that are let go of between two steps."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Whose state this is: the root of every key."""

    fingerprint: bytes
    layout: str
    block: int

    def root(self, namespace: Namespace) -> Key:
        return root_key(fingerprint=self.fingerprint, layout=self.layout, namespace=namespace)


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
        self._wall = wall
        self.memory = Memory(self.tree, limit_nbytes=limit_nbytes, evict=self._evict)
        self.tiers: list[Below] = []
        self.stats = Stats()
        self.estimates = Estimates(clock)
        self._namespaces: dict[Key, Namespace] = {}
        self._strays: dict[Key, list[tuple[int, Entry]]] = {}
        """By the key of the parent that is missing: (tier, entry)."""
        self._n_strays = 0
        self._trash: list[Iterator[Node]] = []
        self._put_off: dict[int, list[News]] = {}
        """By tier: what was told while the engine waited for a write."""

    def know(self, namespaces: Iterable[Namespace]) -> None:
        """Whose records are looked for in tiers."""
        for namespace in namespaces:
            self._namespaces[self.identity.root(namespace)] = namespace

    def root(self, namespace: Namespace) -> Root:
        key = self.identity.root(namespace)
        self._namespaces[key] = namespace
        return self.tree.root(key, namespace)

    def add_tier(self, name: str, io: Io, *, wake: Callable[[], None]) -> None:
        """Spill there from now on; what is stored there is learned as a scan finds it.

        That takes milliseconds for most: worth waiting for, so that the first request hits.
        """
        below = Below(name, io, self.tree, self, wake=wake, clock=self.clock)
        self.tiers.append(below)
        below.scan()
        until = time.monotonic() + FIRST_SCAN_S
        while below.scanning and (left := until - time.monotonic()) > 0:
            for news in below.take_results(math.inf, wait_s=left):
                self.note(below, news)

    # --- coming ----------------------------------------------------------------------------

    def keep(self, node: Node, part: Part, arrays: list[Arrays], mark: Mark) -> Record | None:
        """Hold what was computed in memory, whatever a tier has of it; None when there is no room."""
        nbytes = sum(nbytes_of(a) for a in arrays)
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
        return record

    def spill(self, records: Iterable[Record]) -> None:
        """Let these outlive memory, in every tier that should have them and has not."""
        for record in records:
            if self.tiers and record.arrays is not None and self._spills(record):
                for tier in self.tiers:
                    if not (record.stored | record.writing) >> tier.number & 1:
                        tier.spill(record)

    def loaded(self, record: Record, arrays: list[Arrays]) -> None:
        """Hold a loaded record in memory again, if room can be made for it."""
        if record.alive and record.arrays is None:
            self._hold(record, arrays, sum(nbytes_of(a) for a in arrays))

    def _hold(self, record: Record, arrays: list[Arrays], nbytes: int) -> None:
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
        for tier in self.tiers:
            tier.touch([r for n in node.path() for r in n.records.values()], node.key)

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
            if not record.stored >> tier.number & 1 and self._spills(record)
        ]
        if missing and not record.stored and self._leave(record, missing):
            return
        self.tree.release(record)
        if not record.obtainable and not record.writing:
            self.tree.remember_evicted(record.node)
            self.lose(record)

    def _leave(self, record: Record, tiers: Sequence[Below]) -> bool:
        """Let a tier have it first. False: none takes it."""
        taking = [tier for tier in tiers if record.writing >> tier.number & 1 or tier.writes]
        if not taking:
            self.stats.dropped["tier paused"] += 1
            return False
        allowed = max(int(self.memory.limit_nbytes * LEAVING_SHARE), record.nbytes)
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

    def _delete(self, records: Iterable[Record]) -> None:
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
        for node in self.tree.expired():
            for n in reversed(list(self.tree.below(node))):
                self.forget(n)

    def unlease(self, node: Node) -> None:
        self.tree.unlease(node)
        self.memory.let_go()

    def unpin(self, node: Node) -> None:
        self.tree.unpin(node)
        self.memory.let_go()

    def clear(self, root: Root) -> int:
        """Forget a namespace at once, and let go of its records little by little; bytes of memory."""
        nbytes = root.memory.total_nbytes
        old = self.tree.detach(root)
        self._trash.append(self.tree.below(old))
        return nbytes

    # --- what happens below ----------------------------------------------------------------

    def poll(self, load: Load) -> Iterator[tuple[Below, News]]:
        """Bring the tree up to date with what the tiers tell; what was read comes out here."""
        self._empty_trash()
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
            case Lost(record, error):
                self.stats.faults[f"read: {error.reason}"] += 1
                if not record.obtainable:
                    self.lose(record)
            case Written(record, evicted):
                self._written(tier, record, evicted)
            case Unwritten(record, error):
                if self.tree.is_current(record):
                    self.stats.dropped[error.reason] += 1
                self._left(record)
            case Seen(changes):
                self._learn_all(tier, changes)
            case Scanned():
                self._strays.clear()
                self._n_strays = 0

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

    def _learn_all(self, tier: Below, changes: Changes) -> None:
        for change in changes:
            if isinstance(change, Gone):
                self._gone(tier, change.name)
            else:
                self._learn(tier, change)

    def _learn(self, tier: Below, entry: Entry) -> None:
        """A stored record takes its place, and so do those that waited for it as their parent."""
        todo = [(tier, entry)]
        while todo:
            tier, entry = todo.pop()
            label = entry.label
            if label.root not in self._namespaces or label.layout != self.identity.layout:
                continue
            root = self.tree.root(label.root, self._namespaces[label.root])
            if label.created < root.cleared_at:
                tier.forget([entry.name])
                continue
            node = self._place(root, label)
            if node is None:
                self._keep_stray(tier, entry)
                continue
            record = self.tree.add(node, label.part, nbytes=entry.nbytes, mark=Mark(label.mark))
            self.tree.set_stored(record, tier.number)
            used_at = entry.used_at + BLOCK_S * (node.start // self.identity.block)
            self.tree.remember_use(node, min(used_at, self._wall()))
            self.extend_life(node, None)
            for number, stray in self._strays.pop(node.key, ()):
                self._n_strays -= 1
                todo.append((self.tiers[number], stray))

    def _keep_stray(self, tier: Below, entry: Entry) -> None:
        if entry.label.start and self._n_strays < N_STRAYS:
            self._strays.setdefault(entry.label.parent, []).append((tier.number, entry))
            self._n_strays += 1

    def _gone(self, tier: Below, name: Name) -> None:
        node = self.tree.find(name.key)
        record = node.records.get(name.part) if node is not None else None
        if record is not None:
            self.tree.set_gone(record, tier.number)
            if not record.obtainable and not record.writing:
                self.tree.remember_evicted(record.node)
                self.lose(record)

    def _place(self, root: Root, label: Label) -> Node | None:
        """The node of a stored record; None if its parent is not there, or it is not what it says."""
        text = Text(label.tokens)
        if label.start == 0:
            return self._path(root, text, label.key)
        parent = self.tree.find(label.parent)
        if parent is None or parent.root is not root or parent.end != label.start:
            return None
        if child_key(parent.key, label.tokens) != label.key:
            return None
        return self.tree.child(parent, text, 0, len(text))

    def _path(self, root: Root, text: Text, key: Key) -> Node | None:
        """The node at the end of tokens that begin at 0, through whole blocks."""
        node: Node = root
        for start in range(0, len(text), self.identity.block):
            node = self.tree.child(node, text, start, min(start + self.identity.block, len(text)))
        if node.key == key:
            return node
        self.tree.prune(node)
        return None

    def _empty_trash(self) -> None:
        """Some records of cleared namespaces: their arrays, and their bytes in every tier."""
        n_left = N_TRASHED
        while self._trash and n_left > 0:
            node = next(self._trash[-1], None)
            if node is None:
                self._trash.pop()
                continue
            n_left -= 1
            records = list(node.records.values())
            self._delete(records)
            for record in records:
                self.tree.remove(record)

    # --- what a record says of itself below ------------------------------------------------

    def tokens(self, record: Record) -> KeyTokens:
        """The tokens that a stored record names: those of its node, or of its whole path.

        A model without pages and windows stores nothing of the blocks above a state: the record must
        bring its path along.
        """
        if self.needs.by_block:
            return record.node.tokens
        return np.concatenate([n.tokens for n in record.node.path()][::-1])

    def header(self, record: Record, layers: Layers) -> Header:
        node, root = record.node, record.node.root
        alone = not self.needs.by_block
        parent = root if alone else node.parent
        assert parent is not None
        return Header(
            key=node.key,
            parent=parent.key,
            root=root.key,
            part=record.part,
            start=0 if alone else node.start,
            tokens=self.tokens(record),
            fingerprint=self.identity.fingerprint,
            namespace=self._namespaces[root.key],
            layout=self.identity.layout,
            layers=layers,
            created=self._wall(),
            mark=int(record.mark),
        )

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
