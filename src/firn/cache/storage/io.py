"""From records to bytes and back: a tier behind I/O threads.

Orders come from the engine thread and never wait for a disk; results go to callbacks, on an I/O thread.
In between, records are packed, sealed, and checked against their names.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, islice
from math import inf
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np

from firn.cache.storage.container import (
    Header,
    Label,
    Loaded,
    Name,
    Tag,
    derived_key,
    pack,
    read_header,
    unpack,
)
from firn.cache.storage.faults import (
    Damaged,
    Foreign,
    Locked,
    Missing,
    TierError,
    TierFault,
    Unusable,
    Unwanted,
)
from firn.cache.storage.seal import Seal
from firn.cache.storage.tally import Tally
from firn.cache.storage.threads import Done, IoThreads
from firn.cache.tiers import (
    Buffer,
    Gone,
    ScannedRecord,
    Tier,
    TierUsage,
    Tombstones,
    WriteResult,
)
from firn.core.keys import Key
from firn.core.values import KeyTokens, PackedTokens

log = logging.getLogger("firn.cache")
T = TypeVar("T")

BATCH = 64
"""Records in one order or report: few enough for other orders to get their turn."""
Wanted = Callable[[], bool]
"""Whether an order is still wanted. Called on an I/O thread just before it is carried out."""
Fetch = Callable[[], Sequence[Buffer]]
"""Returns a record's bytes, one buffer for each tensor. Called on an I/O thread."""


def always() -> bool:
    return True


@dataclass(frozen=True, slots=True)
class WriteOrder:
    header: Header
    fetch: Fetch
    used_at: float
    """The record's stamp."""
    wanted: Wanted = always


@dataclass(frozen=True, slots=True)
class ReadOrder:
    name: Name
    tokens: KeyTokens
    """The tokens that the record must name; if it names others, it counts as damaged."""
    wanted: Wanted = always


@dataclass(frozen=True, slots=True)
class TierEntry:
    """A record that a tier has, as a scan or a store reports it."""

    label: Label
    nbytes: int
    used_at: float
    """Unix time."""
    tokens: PackedTokens
    """The label's tokens, packed on the I/O thread to save the engine's time."""

    @property
    def name(self) -> Name:
        return self.label.name


@dataclass(frozen=True, slots=True)
class RootCleared:
    """Records under this root that were written before this Unix time must not be used."""

    root: Key
    at: float


Changes = Sequence[TierEntry | Gone[Name] | RootCleared]


class Io(Protocol):
    """One tier, as the engine thread uses it. Only close() waits. Writes wait in a queue that can be
    full; other orders are always accepted.

    `done` receives the outcome of an order: Unwanted if nobody wants it any more.
    """

    def try_write(self, order: WriteOrder, done: Done[WriteResult[Name]]) -> bool:
        """False: the queue is full."""
        ...

    def has_room(self, nbytes: int) -> bool:
        """Whether a write of this many bytes would be accepted now."""
        ...

    def defer_writes(self, defer: bool) -> None:
        """Start or stop deferring writes. Writes that have waited long begin nevertheless."""
        ...

    def read(self, order: ReadOrder, done: Done[Loaded]) -> None:
        """Every byte is verified; a damaged record is set aside."""
        ...

    def delete(self, names: Iterable[Name]) -> None: ...

    def touch(self, stamps: Mapping[Name, float]) -> None:
        """Raise each record's stamp to at least the given one."""
        ...

    def scan(self, batch: Callable[[Changes], None], done: Done[None]) -> None:
        """Report what is stored or, from the second scan on, what others changed since.

        batch: called on an I/O thread with a few changes at a time.
        """
        ...

    def usage(self) -> TierUsage: ...

    def close(self) -> None:
        """Write what is queued, in bounded time."""
        ...


@runtime_checkable
class Forgetting(Protocol):
    """An `Io` that can tell when what it was told to forget is gone for good, whatever happens to this
    process. `done` is called on an I/O thread."""

    def bury(self, root: Key, at: float, done: Done[None]) -> None:
        """Note that what was written under this root before `at` was cleared. Does not delete it.

        If that fails it is tried again at every scan. Scans report such notes of all processes.
        """
        ...

    def when_deleted(self, done: Done[None]) -> None:
        """Call `done` when nothing is left to be deleted, or with a fault if something cannot be."""
        ...


# --- one record in a tier ------------------------------------------------------------------


def load(tier: Tier, name: Name, *, seal: Seal | None = None) -> Loaded:
    """Read and verify a record. Raises Missing, Foreign, Damaged, TierFault."""
    loaded = unpack(tier.read(str(name)), seal=seal)
    if loaded.header.name != name:
        raise Damaged("another record's bytes")
    return loaded


def label_of(
    seen: ScannedRecord, *, more: Callable[[int], Buffer], seal: Seal | None = None
) -> Tag:
    """A record's header: a Label, or only a Tag without the key. Raises Damaged, Foreign."""
    name = Name.parse(seen.name)
    if name is None:
        raise Foreign("a name of another format")
    tag = read_header(seen.head, seen.nbytes, more=more, seal=seal)
    if tag.name != name:
        raise Damaged("another record's bytes")
    if isinstance(tag, Label) and derived_key(tag, tag.parent) != tag.key:
        raise Damaged("another record's bytes", "the key does not follow from the tokens")
    return tag


# --- a tier behind threads -----------------------------------------------------------------


class TierIo:
    """Implements Io and Forgetting: a tier behind I/O threads. Owner: the cache, on the engine
    thread."""

    def __init__(
        self,
        tier: Tier,
        threads: IoThreads,
        *,
        seal: Seal | None = None,
        flush_timeout_s: float = 10.0,
        progress: Callable[[int, int], None] = lambda n_left, nbytes_left: None,
    ) -> None:
        """seal: encrypts what is written. Records encrypted with another key are misses."""
        self.threads = threads
        self._tier = tier
        self._seal = seal
        self._flush_timeout_s = flush_timeout_s
        self._progress = progress
        self._foreign: set[str] = set()
        """Names of records of another version, or encrypted with another key: ours may replace them."""
        self._told_foreign = False
        self._tally = Tally()
        self._lock = threading.Lock()
        self._to_touch: list[Mapping[Name, float]] = []
        self._is_touching = False
        self._to_delete: dict[str, None] = {}
        self._is_deleting = False
        self._undeleted: dict[str, TierFault] = {}
        """Names whose deletion has failed. It is tried again with the next scan."""
        self._when_deleted: list[Done[None]] = []
        self._unburied: dict[str, float] = {}
        """Clearings that are not noted yet, by root."""
        self._cleared: dict[str, float] = {}
        """All that are known, by this process or another."""
        self._deleting = threading.Lock()
        """Held from the moment a name leaves `_to_delete` until its record is deleted."""

    def try_write(self, order: WriteOrder, done: Done[WriteResult[Name]]) -> bool:
        nbytes = sum(spec.nbytes for spec in order.header.tensors)
        is_accepted = self.threads.try_write(
            lambda: self._write(order), done, nbytes=nbytes, tier=self
        )
        if not is_accepted:
            self._tally.drop("queue full")
        return is_accepted

    def has_room(self, nbytes: int) -> bool:
        return self.threads.has_room(nbytes)

    def defer_writes(self, defer: bool) -> None:
        self.threads.defer_writes(defer)

    def read(self, order: ReadOrder, done: Done[Loaded]) -> None:
        self.threads.read(lambda: self._read(order), done)

    def delete(self, names: Iterable[Name]) -> None:
        """Only one thread deletes at a time: there may be 100,000 names, and other orders wait."""
        with self._lock:
            self._to_delete |= dict.fromkeys(map(str, names))
            is_idle, self._is_deleting = not self._is_deleting, True
        if is_idle:
            self.threads.upkeep(self._delete_some)

    def when_deleted(self, done: Done[None]) -> None:
        with self._lock:
            if self._is_deleting:
                self._when_deleted.append(done)
                return
        done(self._fault_of_deleting())

    def bury(self, root: Key, at: float, done: Done[None]) -> None:
        with self._lock:
            self._unburied[root.hex()] = self._cleared[root.hex()] = at
        self.threads.upkeep(self._bury_all, done)

    def touch(self, stamps: Mapping[Name, float]) -> None:
        """Only one thread touches at a time: of two, the one with the lower stamp could be last."""
        if not stamps:
            return
        with self._lock:
            self._to_touch.append(stamps)
            is_idle, self._is_touching = not self._is_touching, True
        if is_idle:
            self.threads.upkeep(self._touch_all)

    def scan(self, batch: Callable[[Changes], None], done: Done[None]) -> None:
        self.threads.upkeep(lambda: self._scan(batch), done)

    def usage(self) -> TierUsage:
        usage = self._tier.usage()
        return replace(
            usage,
            n_foreign=usage.n_foreign + len(self._foreign),
            counts={**usage.counts, **self._tally.counts},
            drops={**usage.drops, **self._tally.drops},
        )

    def close(self) -> None:
        self.threads.close(timeout_s=self._flush_timeout_s, progress=self._progress)

    # --- on an I/O thread --------------------------------------------------------------------

    def _write(self, order: WriteOrder) -> WriteResult[Name]:
        if not order.wanted():
            raise Unwanted
        name = str(order.header.name)
        packed = pack(order.header, order.fetch(), seal=self._seal)
        self._make_way(name)
        stored = self._tier.write(name, packed.pieces, used_at=order.used_at)
        if not stored.new and self._was_cleared(order.header):
            self._tier.delete(name)
            stored = self._tier.write(name, packed.pieces, used_at=order.used_at)
        self._foreign.difference_update(stored.evicted)
        return WriteResult(stored.nbytes, stored.new, tuple(_parsed(stored.evicted)))

    def _was_cleared(self, header: Header) -> bool:
        """Whether the stored record of this name is older than a clearing, or damaged."""
        at = self._cleared.get(header.root.hex())
        if at is None:
            return False
        try:
            return load(self._tier, header.name, seal=self._seal).header.created < at
        except (Missing, Damaged):
            return True

    def _make_way(self, name: str) -> None:
        """Delete the stored record of this name if it is foreign or queued for deletion."""
        with self._deleting:
            with self._lock:
                doomed = (self._foreign, self._to_delete, self._undeleted)
                is_to_go = any(name in names for names in doomed)
            if is_to_go:
                self._tier.delete(name)
                with self._lock:
                    self._foreign.discard(name)
                    self._to_delete.pop(name, None)
                    self._undeleted.pop(name, None)

    def _read(self, order: ReadOrder) -> Loaded:
        if not order.wanted():
            raise Unwanted
        name = str(order.name)
        try:
            loaded = load(self._tier, order.name, seal=self._seal)
            if not np.array_equal(loaded.header.tokens, order.tokens):
                raise Damaged("another record's bytes", "tokens differ")
        except Foreign as e:
            self._foreign.add(name)
            raise Unusable(e.reason) from e
        except Damaged as e:
            self._set_aside(name, e)
            raise
        return loaded

    def _delete_some(self) -> None:
        """Delete a batch; then other orders get their turn. When the threads close, delete the rest."""
        n_done = 0
        while n_done < BATCH or self.threads.closing:
            with self._deleting:
                with self._lock:
                    self._is_deleting = bool(self._to_delete)
                    if not self._is_deleting:
                        waiting, self._when_deleted = self._when_deleted, []
                        break
                    name = next(iter(self._to_delete))
                    del self._to_delete[name]
                try:
                    self._tier.delete(name)
                except TierFault as e:  # go on with the others
                    self._undeleted[name] = e
            n_done += 1
        else:
            self.threads.upkeep(self._delete_some)
            return
        for done in waiting:
            done(self._fault_of_deleting())

    def _fault_of_deleting(self) -> TierError | None:
        return next(iter(self._undeleted.values()), None)

    def _delete_again(self) -> None:
        with self._lock:
            names, self._undeleted = self._undeleted, {}
        if names:
            self._tally.add(deletes_retried=len(names))
            self.delete(filter(None, map(Name.parse, names)))

    def _bury_all(self) -> None:
        """Raises TierFault."""
        tier = self._tier
        with self._lock:
            unburied = dict(self._unburied)
        for root, at in unburied.items():
            if isinstance(tier, Tombstones):
                tier.bury(root, at)
            with self._lock:
                if self._unburied.get(root) == at:
                    del self._unburied[root]

    def _touch_all(self) -> None:
        try:
            while stamps := self._next_touches():
                self._tier.touch(stamps)
        except Exception:
            with self._lock:
                self._is_touching = False
            raise

    def _next_touches(self) -> dict[str, float]:
        with self._lock:
            some, self._to_touch = self._to_touch, []
            self._is_touching = bool(some)
        stamps: dict[str, float] = {}
        for name, stamp in chain.from_iterable(each.items() for each in some):
            text = str(name)
            stamps[text] = max(stamp, stamps.get(text, stamp))
        return stamps

    def _scan(self, batch: Callable[[Changes], None]) -> None:
        for some in _batches(self._changes()):
            if self.threads.closing:
                return
            batch(some)
        if self._foreign and not self._told_foreign:
            self._told_foreign = True
            log.info(
                "%d records here are from another version of firn, or %s; they are ignored and "
                "will be evicted in turn",
                len(self._foreign),
                "encrypted with another key, or not at all" if self._seal else "encrypted",
            )

    def _changes(self) -> Iterator[TierEntry | Gone[Name] | RootCleared]:
        """What was cleared comes first, so that none of it is taken for stored."""
        with suppress(TierFault):
            self._bury_all()
        self._delete_again()
        if isinstance(self._tier, Tombstones):
            for root, at in self._tier.buried().items():
                if at > self._cleared.get(root, -inf):
                    self._cleared[root] = at
                    yield RootCleared(Key(bytes.fromhex(root)), at)
        for change in self._tier.scan():
            if isinstance(change, Gone):
                self._foreign.discard(change.name)
                yield from map(Gone, _parsed([change.name]))
            elif (entry := self._entry(change)) is not None:
                yield entry

    def _entry(self, seen: ScannedRecord) -> TierEntry | None:
        """None: not a record that can be used here."""
        try:
            tag = label_of(seen, more=lambda n: self._tier.read(seen.name, n), seal=self._seal)
            if not isinstance(tag, Label):
                raise Locked
            return TierEntry(tag, seen.nbytes, seen.used_at, PackedTokens(tag.tokens))
        except Foreign:
            self._foreign.add(seen.name)
        except Damaged as e:
            self._set_aside(seen.name, e)
        except (Missing, TierFault):  # removed since it was seen, or reported again later
            pass
        return None

    def _set_aside(self, name: str, why: Damaged) -> None:
        self._tally.add(damaged=1)
        log.warning("damaged record quarantined, which costs a miss: %s (%s)", name, why.message)
        with suppress(TierFault):  # the tier will not read it again, even if it cannot move it
            self._tier.delete(name, keep=True)


def _parsed(names: Iterable[str]) -> Iterator[Name]:
    return (name for name in map(Name.parse, names) if name is not None)


def _batches(items: Iterable[T]) -> Iterator[tuple[T, ...]]:
    left = iter(items)
    while some := tuple(islice(left, BATCH)):
        yield some
