"""Records in a tier: packed, sealed, verified, deleted. Blocking, for I/O threads.

    write    pack, seal, checksums ── bytes ──▶ tier
    read     every byte verified   ◀── bytes ── tier     what is damaged is set aside
    scan     heads parsed, checked ◀── heads ── tier     clearings first, so that none of it counts

Owner: its worker.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from math import inf

import numpy as np

from firn.cache.storage.container import (
    Header,
    Label,
    Loaded,
    Name,
    TierEntry,
    label_of,
    load,
    pack,
)
from firn.cache.storage.faults import (
    Damaged,
    Foreign,
    Locked,
    Missing,
    TierFault,
    Unusable,
    Unwanted,
)
from firn.cache.storage.orders import Changes, ReadOrder, RootCleared, WriteOrder
from firn.cache.storage.seal import Seal
from firn.cache.storage.store_search import StoreQuestion, search
from firn.cache.storage.tally import Tally
from firn.cache.tiers import (
    FoundRecord,
    Gone,
    ScannedRecord,
    Store,
    Tier,
    TierUsage,
    Tombstones,
    WriteResult,
)
from firn.core.keys import Key
from firn.core.values import PackedTokens

log = logging.getLogger("firn.cache")

BATCH = 64
"""Records in one report or turn: few enough for other orders to get theirs."""


class TierRecords:
    """Thread-safe."""

    def __init__(self, tier: Tier, *, seal: Seal | None = None) -> None:
        """seal: encrypts what is written. Records encrypted with another key are misses."""
        self.tier = tier
        self.tally = Tally()
        self._seal = seal
        self._lock = threading.Lock()
        self._foreign: set[str] = set()
        """Names of records of another version, or encrypted with another key: ours may replace them."""
        self._told_foreign = False
        self._doomed: dict[str, None] = {}
        """Names of records that are to be deleted, in order."""
        self._undeleted: dict[str, TierFault] = {}
        """Names whose deletion has failed. It is tried again with the next scan."""
        self._deleting = threading.Lock()
        """Held from the moment a name is no longer doomed until its record is deleted."""
        self._unburied: dict[str, float] = {}
        """Clearings that are not noted yet, by root."""
        self._cleared: dict[str, float] = {}
        """All that are known, by this process or another."""

    # --- writing ---------------------------------------------------------------------------

    def write(self, order: WriteOrder) -> WriteResult[Name]:
        """Raises Unwanted, Refused, TierFault."""
        if not order.wanted or order.content is None:
            raise Unwanted
        name = str(order.header.name)
        packed = pack(order.header, order.content.fetch(), seal=self._seal)
        self._make_way(name)
        stored = self.tier.write(name, packed.pieces, used_at=order.used_at)
        if not stored.new and self._was_cleared(order.header):
            self.tier.delete(name)
            stored = self.tier.write(name, packed.pieces, used_at=order.used_at)
        self._foreign.difference_update(stored.evicted)
        return WriteResult(stored.nbytes, stored.new, tuple(_parsed(stored.evicted)))

    def _was_cleared(self, header: Header) -> bool:
        """Whether the stored record of this name is older than a clearing, or damaged."""
        at = self._cleared.get(header.root.hex())
        if at is None:
            return False
        try:
            return load(self.tier, header.name, seal=self._seal).header.created < at
        except (Missing, Damaged):
            return True

    def _make_way(self, name: str) -> None:
        """A record of this name that is to be deleted goes before the new one is written."""
        with self._deleting:
            with self._lock:
                sets = (self._foreign, self._doomed, self._undeleted)
                is_to_go = any(name in names for names in sets)
            if is_to_go:
                self.tier.delete(name)
                with self._lock:
                    self._foreign.discard(name)
                    self._doomed.pop(name, None)
                    self._undeleted.pop(name, None)

    # --- reading ---------------------------------------------------------------------------

    def read(self, order: ReadOrder) -> Loaded:
        """Raises Unwanted, Missing, Damaged, TierFault."""
        if not order.wanted:
            raise Unwanted
        name = str(order.name)
        try:
            loaded = load(self.tier, order.name, seal=self._seal)
            if not np.array_equal(loaded.header.tokens, order.tokens):
                raise Damaged("another record's bytes", "tokens differ")
        except Foreign as e:
            self._foreign.add(name)
            raise Unusable(e.reason) from e
        except Damaged as e:
            self._set_aside(name, e)
            raise
        return loaded

    def ask(self, question: StoreQuestion) -> list[TierEntry]:
        """Raises TierFault."""
        under_way = search(question)
        try:
            names = next(under_way)
            while True:
                names = under_way.send(self._find(names))
        except StopIteration as end:
            entries: list[TierEntry] = end.value
            return entries

    def _find(self, names: Sequence[Name]) -> dict[Name, FoundRecord]:
        assert isinstance(self.tier, Store)
        by_text = {str(name): name for name in names}
        usable = [text for text in by_text if text not in self._foreign]
        records = self.tier.find(usable)
        return {by_text[r.name]: r for r in records if r.name in by_text}

    # --- deleting --------------------------------------------------------------------------

    def doom(self, names: Iterable[Name]) -> None:
        """These are to be deleted, unless they are written anew before."""
        with self._lock:
            self._doomed |= dict.fromkeys(map(str, names))

    @property
    def is_any_doomed(self) -> bool:
        return bool(self._doomed)

    def delete_next(self) -> None:
        with self._deleting:
            with self._lock:
                name = next(iter(self._doomed), None)
                if name is None:
                    return
                del self._doomed[name]
            try:
                self.tier.delete(name)
            except TierFault as e:  # go on with the others
                self._undeleted[name] = e

    def fault_of_deleting(self) -> TierFault | None:
        return next(iter(self._undeleted.values()), None)

    def take_undeleted(self) -> list[Name]:
        """What could not be deleted, to be tried again."""
        with self._lock:
            names, self._undeleted = self._undeleted, {}
        if names:
            self.tally.add(deletes_retried=len(names))
        return list(_parsed(names))

    def clear(self, root: Key, at: float) -> None:
        """What was written under this root before `at` is no longer taken for stored here."""
        with self._lock:
            self._unburied[root.hex()] = self._cleared[root.hex()] = at

    def bury(self) -> None:
        """Note in the tier what was cleared. Raises TierFault."""
        with self._lock:
            unburied = dict(self._unburied)
        for root, at in unburied.items():
            if isinstance(self.tier, Tombstones):
                self.tier.bury(root, at)
            with self._lock:
                if self._unburied.get(root) == at:
                    del self._unburied[root]

    # --- what there is ---------------------------------------------------------------------

    def touch(self, stamps: Sequence[Mapping[Name, float]]) -> None:
        highest: dict[str, float] = {}
        for some in stamps:
            for name, stamp in some.items():
                text = str(name)
                highest[text] = max(stamp, highest.get(text, stamp))
        self.tier.touch(highest)

    def scan(self) -> Iterator[Changes]:
        """A few changes at a time. Raises TierFault."""
        changes = self._changes()
        while some := tuple(islice(changes, BATCH)):
            yield some
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
            self.bury()
        if isinstance(self.tier, Tombstones):
            for root, at in self.tier.buried().items():
                if at > self._cleared.get(root, -inf):
                    self._cleared[root] = at
                    yield RootCleared(Key(bytes.fromhex(root)), at)
        for change in self.tier.scan():
            if isinstance(change, Gone):
                self._foreign.discard(change.name)
                yield from map(Gone, _parsed([change.name]))
            elif (entry := self._entry(change)) is not None:
                yield entry

    def _entry(self, seen: ScannedRecord) -> TierEntry | None:
        """None: not a record that can be used here."""
        try:
            tag = label_of(self.tier, seen, seal=self._seal)
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
        self.tally.add(damaged=1)
        log.warning("damaged record quarantined, which costs a miss: %s (%s)", name, why.message)
        with suppress(TierFault):  # the tier will not read it again, even if it cannot move it
            self.tier.delete(name, keep=True)

    def usage(self) -> TierUsage:
        usage = self.tier.usage()
        return replace(
            usage,
            n_foreign=usage.n_foreign + len(self._foreign),
            counts={**usage.counts, **self.tally.counts},
            drops={**usage.drops, **self.tally.drops},
        )


def _parsed(names: Iterable[str]) -> Iterator[Name]:
    return (name for name in map(Name.parse, names) if name is not None)
