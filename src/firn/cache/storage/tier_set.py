"""All tiers below memory: which record is written to which tier, and what the tiers report.

Owner: the engine thread, through `Records`.
"""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from itertools import chain

from firn.cache.ledger import Ledger
from firn.cache.parts import Part
from firn.cache.storage.catalogue import RecordCatalogue, name_of
from firn.cache.storage.client import TierClient, accepts_all
from firn.cache.storage.events import RecordWritten, TierEvent, WriteFailed
from firn.cache.storage.io import Io
from firn.cache.tree import Mark, Record, Tree
from firn.core.ports import EngineLoad

log = logging.getLogger("firn.cache")

FIRST_SCAN_S = 1.0
"""How long start-up waits for a tier's first scan. Most take milliseconds, so even the first
request can hit; a longer scan continues while the server runs."""
SPILL_S = 5.0
"""How long closing waits for room in the write queue."""
CLOSE_S = 2.0
"""How long closing waits for pending writes of cleared records, in order to delete them again."""

Reported = tuple[TierClient, TierEvent]


class TierSet:
    def __init__(
        self,
        ledger: Ledger,
        tree: Tree,
        catalogue: RecordCatalogue,
        *,
        window: int = 0,
        clock: Callable[[], float],
    ) -> None:
        self._ledger = ledger
        self._tree = tree
        self._window = window
        self._catalogue = catalogue
        self._clock = clock
        self._clients: list[TierClient] = []
        self._postponed: defaultdict[int, list[TierEvent]] = defaultdict(list)
        """By tier: events that arrived while the engine waited for a write."""

    def __iter__(self) -> Iterator[TierClient]:
        return iter(self._clients)

    def __len__(self) -> int:
        return len(self._clients)

    def __getitem__(self, number: int) -> TierClient:
        return self._clients[number]

    def add(
        self,
        name: str,
        io: Io,
        *,
        wake: Callable[[], None],
        accepts: Callable[[Record], bool] = accepts_all,
    ) -> Iterator[Reported]:
        """Add a tier below the existing ones; yields what its first scan reports in time."""
        tier = TierClient(
            name,
            io,
            self._ledger,
            self._tree,
            self._catalogue,
            stamp=self._stamp,
            wake=wake,
            accepts=accepts,
            window=self._window,
            clock=self._clock,
        )
        self._clients.append(tier)
        tier.scan()
        until = time.monotonic() + FIRST_SCAN_S
        while tier.scanning and (left := until - time.monotonic()) > 0:
            for event in tier.take_results(until, wait_s=left):
                yield tier, event
        if tier.scanning:
            log.info("%s cache: the first scan is slow; it continues in the background", name)

    # --- writing ---------------------------------------------------------------------------

    def spill(self, records: Iterable[Record]) -> None:
        """Write these records soon, to every tier that should have them."""
        for record in records:
            if record.arrays is not None:
                for tier in self.lacking(record):
                    if not record.is_being_written(tier.number):
                        tier.spill(record)

    def lacking(self, record: Record) -> list[TierClient]:
        """The tiers that should have the record but do not."""
        if not self._clients or not self._outlives_memory(record):
            return []
        return [tier for tier in self._clients if not tier.has(record) and tier.accepts(record)]

    def _outlives_memory(self, record: Record) -> bool:
        """Whether the record is worth writing to a tier.

        One that expires is not. A state at a prompt's end is only if no other state precedes it.
        """
        if record.node.expires_at != math.inf:
            return False
        if record.part is not Part.STATE or record.mark is not Mark.PROMPT_END:
            return True
        return not self._tree.has_state_before(record.node)

    def _stamp(self, record: Record) -> float:
        """The stamp to write a record with. Records it depends on are first given higher stamps."""
        stamp = self._tree.order.stamp(record)
        raised = self._tree.order.note(record, stamp)
        stamp = raised.pop(record, stamp)
        self.touch(raised)
        return stamp

    def touch(self, stamps: Mapping[Record, float]) -> None:
        for tier in self._clients:
            tier.touch(stamps)

    def wait_for_writes(self, is_done: Callable[[], bool], timeout_s: float) -> Iterator[Reported]:
        """Yield ends of writes until `is_done` or time is up. Other events are left for `poll`."""
        until = time.monotonic() + timeout_s
        for tier in self._clients:
            while not is_done() and (left := until - time.monotonic()) > 0:
                for event in tier.take_results(math.inf, wait_s=left):
                    if isinstance(event, RecordWritten | WriteFailed):
                        yield tier, event
                    else:
                        self._postponed[tier.number].append(event)

    # --- the rest --------------------------------------------------------------------------

    @property
    def deadline_s(self) -> float:
        """How long a request waits for tiers in total."""
        return min((tier.deadline_s for tier in self._clients), default=math.inf)

    def fastest_with(self, record: Record) -> TierClient:
        """The first tier that has the record; one must have it."""
        for tier in self._clients:
            if tier.has(record):
                return tier
        raise LookupError("no tier has it")

    def delete(self, records: Sequence[Record]) -> None:
        for tier in self._clients:
            self.delete_from(tier, [r for r in records if tier.has(r)])

    def delete_from(self, tier: TierClient, records: Iterable[Record]) -> None:
        names = [name_of(r) for r in records if not self._is_back(r, tier)]
        if names:
            tier.delete(names)

    def _is_back(self, record: Record, tier: TierClient) -> bool:
        """Whether it was cleared and computed again, and the tier has or is writing the new one."""
        node = self._tree.find(record.node.key)
        newer = node.records.get(record.part) if node is not None else None
        if newer is None or newer is record or not self._tree.is_current(newer):
            return False
        return tier.has(newer) or newer.is_being_written(tier.number)

    def deleted(self) -> list[Future[None]]:
        """For each tier: done once everything that it was told to delete is gone."""
        return [tier.deleted() for tier in self._clients]

    def poll(self, load: EngineLoad) -> Iterator[Reported]:
        for tier in self._clients:
            for event in chain(self._postponed.pop(tier.number, ()), tier.poll(load)):
                yield tier, event

    @property
    def idle(self) -> bool:
        """Whether a poll could do nothing at present."""
        return all(tier.idle for tier in self._clients)

    def close(self) -> Iterator[Reported]:
        """Write what should be kept and close the tiers; yields events that arrive meanwhile."""
        for tier in self._clients:
            if not tier.is_store:  # other servers hardly need the records of the last few seconds
                for event in tier.flush(SPILL_S):
                    yield tier, event
            for event in tier.take_outdated_writes(CLOSE_S):
                yield tier, event
            tier.close()
