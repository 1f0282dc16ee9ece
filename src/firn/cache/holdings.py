"""The tree and its tiers together: what is held where, what leaves, what comes back.

One place for every change of a record's life: added to memory, spilled below, evicted, loaded again,
forgotten everywhere. Owner: the engine thread, through the prefix cache.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from weakref import WeakSet, WeakValueDictionary

import numpy as np

from firn.cache.codecs import Arrays, nbytes_of
from firn.cache.container import Header, Label, Layers, Name
from firn.cache.estimates import Estimates
from firn.cache.faults import TierError
from firn.cache.index import Index, Mark, Node, Record
from firn.cache.io import Changes, Entry, Io
from firn.cache.parts import Needs, Part
from firn.cache.pool import Pool
from firn.cache.stats import Stats
from firn.cache.store import Arrived, Found, Lost, News, Store, Unwritten, Written
from firn.cache.tiers import Gone, Usage
from firn.core.keys import Key, KeyTokens, child_key, root_key
from firn.core.values import Namespace

log = logging.getLogger("firn.cache")


@dataclass(frozen=True, slots=True)
class Identity:
    """Whose state this is: the root of every key."""

    fingerprint: bytes
    layout: str
    block: int

    def root(self, namespace: Namespace) -> Key:
        return root_key(fingerprint=self.fingerprint, layout=self.layout, namespace=namespace)


@dataclass(eq=False)
class Holdings:
    identity: Identity
    needs: Needs
    limit_nbytes: int
    clock: Callable[[], float] = time.monotonic
    stats: Stats = field(default_factory=Stats)
    estimates: Estimates = field(default_factory=Estimates)
    index: Index = field(default_factory=Index)
    store: Store | None = None

    def __post_init__(self) -> None:
        self.pool = Pool(
            self.index, limit_nbytes=self.limit_nbytes, worth=self._worth, release=self._release
        )
        self._mortal: WeakSet[Node] = WeakSet()
        self._namespaces: dict[Key, Namespace] = {}
        self._by_key: WeakValueDictionary[Key, Node] = WeakValueDictionary()
        """Nodes that a tier below has records of; scans name them by key."""
        self._waiting: dict[Key, list[Entry]] = {}
        """Records that a scan found before their parents."""

    def root(self, namespace: Namespace) -> Node:
        key = self.identity.root(namespace)
        self._namespaces[key] = namespace
        return self.index.root(key)

    # --- coming ----------------------------------------------------------------------------

    def add(self, node: Node, part: Part, payload: list[Arrays], mark: Mark) -> Record | None:
        """Hold a new record in memory; None when no room can be made for it."""
        nbytes = sum(nbytes_of(a) for a in payload)
        if not self.pool.make_room(nbytes, part=part):
            self.stats.dropped["no room"] += 1
            return None
        record = self.index.add(node, part, nbytes=nbytes, payload=payload, mark=mark)
        self.pool.admit(record)
        self.stats.commits[part.value] += 1
        return record

    def spill(self, records: Iterable[Record]) -> None:
        """Let these outlive memory, unless they are soon to go anyway."""
        if self.store is None:
            return
        for record in records:
            if self._spills(record):
                self.store.spill(record)

    def promote(self, record: Record, payload: list[Arrays]) -> None:
        """Hold a loaded record in memory again, if room can be made for it."""
        if record.alive and record.payload is None:
            record.nbytes = sum(nbytes_of(a) for a in payload)
            if self.pool.make_room(record.nbytes, part=record.part):
                self.index.set_payload(record, payload)
                self.pool.admit(record)

    def used(self, records: Sequence[Record]) -> None:
        """These were just read: they are the last to go, in every tier."""
        self.pool.touch(records)
        if self.store is not None:
            self.store.touch(records)

    # --- going -----------------------------------------------------------------------------

    def forget(self, node: Node) -> None:
        """Remove a node's records, in whatever tier they are."""
        parent, records = node.parent, list(node.records.values())
        for record in records:
            self.pool.drop(record)
            self.index.remove(record)
        stored = [r for r in records if r.stored]
        if self.store is not None and stored:
            self.store.forget(stored)
        if parent is not None:
            self.pool.rejoin(parent)

    def take_back(self, records: Sequence[Record]) -> None:
        """Remove records that were just added and are not good; the newest, so the deepest, first."""
        for record in reversed(records):
            self.pool.drop(record)
            self._lose(record)

    def _release(self, record: Record) -> None:
        """A record leaves memory. What no tier below has is gone."""
        self.stats.evictions[record.part.value] += 1
        wanted = not record.stored and self._spills(record)
        if self.store is not None and wanted and not self.store.spill_now(record):
            self.stats.dropped["write queue full"] += 1
        self.pool.drop(record)
        if not (record.stored or record.writing):
            self._lose(record)

    def _lose(self, record: Record) -> None:
        """No tier has it any more. Without its pages a node's other records cannot be used."""
        if not record.alive:
            return
        node = record.node
        self.index.remove(record)
        if record.part is Part.PAGES and not node.children:
            self.forget(node)

    @staticmethod
    def _spills(record: Record) -> bool:
        return record.mark is not Mark.PROMPT_END and record.node.expires_at == math.inf

    # --- leases and lifetimes --------------------------------------------------------------

    def lease(self, node: Node) -> None:
        node.n_leases += 1

    def unlease(self, node: Node) -> None:
        node.n_leases -= 1
        self.pool.touch(node.records.values())
        self.index.prune(node)

    @contextmanager
    def leased(self, node: Node) -> Iterator[None]:
        """Hold on to a node that is being filled."""
        self.lease(node)
        try:
            yield
        finally:
            self.unlease(node)

    def extend_life(self, node: Node, ttl_s: float | None) -> None:
        """Let the node and all above it live at least this long: a child never outlives its parent."""
        until = math.inf if ttl_s is None else self.clock() + ttl_s
        for n in node.path():
            if n.expires_at >= until:
                return
            n.expires_at = until
            if until == math.inf:
                self._mortal.discard(n)
            else:
                self._mortal.add(n)

    def expire(self) -> None:
        now = self.clock()
        for node in [n for n in self._mortal if n.expires_at <= now]:
            below = list(self.index.below(node))
            if any(n.n_leases or n.n_pins for n in below):
                continue  # in use, or pinned: a later sweep takes it
            for n in reversed(below):
                self.forget(n)
                self._mortal.discard(n)

    # --- what happens below ----------------------------------------------------------------

    def open_store(self, io: Io, *, wake: Callable[[], None]) -> None:
        """Take what is stored into the tree, and spill from now on. Namespaces must be known."""
        self.store = Store(io, self._header, self.tokens, wake=wake, clock=self.clock)
        for changes in self.store.first_scan():
            self._learn_all(changes)

    def note(self, news: News) -> None:
        """Bring the tree up to date with what a tier told."""
        match news:
            case Arrived(record, payload):
                self.promote(record, payload)
            case Lost(record, error):
                self.stats.faults[f"read: {error.reason}"] += 1
                if record.payload is None:
                    self._lose(record)
            case Written(record, evicted):
                self._written(record, evicted)
            case Unwritten(record, error):
                self.stats.dropped[error.reason] += 1
                if record.payload is None:
                    self._lose(record)
            case Found(changes):
                self._learn_all(changes)

    def usage(self) -> Usage | None:
        return None if self.store is None else self.store.usage()

    def _written(self, record: Record, evicted: Sequence[Name]) -> None:
        if record.alive:
            self._by_key[record.node.key] = record.node
            self._learn_all(self._waiting.pop(record.node.key, ()))
        elif self.store is not None:
            self.store.forget([record])  # it was superseded while it was on its way
        for name in evicted:
            self._gone(name)

    def _learn_all(self, changes: Changes) -> None:
        """Records that others added or took away; parents are placed before their children."""
        added: list[Entry] = []
        for change in changes:
            if isinstance(change, Gone):
                self._gone(change.name)
            else:
                added.append(change)
        left = sorted(added, key=lambda e: -e.label.start)
        while left:
            node = self._learn(left.pop())
            if node is not None:
                left += self._waiting.pop(node.key, ())

    def _learn(self, entry: Entry) -> Node | None:
        """The record's node; None while it has no place in the tree."""
        label = entry.label
        if not self._is_ours(label):
            return None
        if label.start and label.parent not in self._by_key:
            self._waiting.setdefault(label.parent, []).append(entry)
            return None
        node = self._place(label)
        if node is None:
            return None
        self._by_key[node.key] = node
        node.expires_at = math.inf
        record = node.records.get(label.part)
        if record is None:
            mark = Mark(label.mark)
            record = self.index.add(node, label.part, nbytes=entry.nbytes, payload=None, mark=mark)
        record.stored = True
        if self.store is not None:
            self.store.saw(node, entry.used_at)
        return node

    def _gone(self, name: Name) -> None:
        node = self._by_key.get(name.key)
        record = node.records.get(name.part) if node is not None else None
        if record is not None:
            record.stored = False
            if record.payload is None and not record.writing:
                self._lose(record)

    def _is_ours(self, label: Label) -> bool:
        return label.root in self._namespaces and label.layout == self.identity.layout

    def _place(self, label: Label) -> Node | None:
        """The node of a stored record; None if it does not fit where it says it does."""
        if label.start == 0:
            return self._path(self.index.root(label.root), label)
        parent = self._by_key[label.parent]
        if parent.end != label.start:
            return None
        if child_key(parent.key, label.tokens) != label.key:
            return None
        return self.index.child(parent, label.tokens, key=label.key)

    def _path(self, root: Node, label: Label) -> Node | None:
        """The node at the end of tokens that begin at 0, through whole blocks."""
        node, block = root, self.identity.block
        for start in range(0, len(label.tokens), block):
            node = self.index.child(node, label.tokens[start : start + block])
        if node.key == label.key:
            return node
        self.index.prune(node)
        return None

    def tokens(self, record: Record) -> KeyTokens:
        """The tokens that a stored record names: those of its node, or of its whole path.

        A model without pages and windows stores nothing of the blocks above a state: the record must
        bring its path along.
        """
        if self.needs.by_block:
            return record.node.values
        return np.concatenate([n.values for n in record.node.path()][::-1])

    def _header(self, record: Record, layers: Layers) -> Header:
        node = record.node
        root = node
        while root.parent is not None:
            root = root.parent
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
            created=time.time(),
            mark=int(record.mark),
        )

    def _worth(self, record: Record) -> float:
        """Seconds of recompute saved per megabyte."""
        node, n = record.node, len(record.node.values)
        if record.part is Part.WINDOW and node.n_occupied:
            n //= 8  # inside a chain only a branch would ask for it
        if record.part is Part.STATE:
            n = max(n, self.identity.block)
        seconds = n * self.estimates.seconds_per_token(node.start)
        return seconds / max(record.nbytes / 1e6, 1e-6)

    def failed(self, where: str, error: Exception) -> None:
        """Fail closed: a fault in the cache is a counted miss."""
        reason = f"{where}: {error.reason}" if isinstance(error, TierError) else where
        self.stats.faults[reason] += 1
        log.warning("the cache failed in %s, which costs a miss: %r", where, error, exc_info=error)
