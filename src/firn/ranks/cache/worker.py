"""A tier of a sharded model, as rank 0's tree sees it: what all ranks have, and nothing else.

Every rank keeps its slice of a record in its own tier, under the same name. A record is stored when
all have written it, read when all have read and verified it, and present after a start if all have
found it. What one of them lacks, has lost or cannot read is a miss, and what one evicts is deleted
everywhere.

Owner: rank 0's engine thread. Answers arrive on the threads of the connections, and wait for a poll.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from firn.cache.arrays.payload import Payload
from firn.cache.storage.container import Header, Loaded, Name, TierEntry
from firn.cache.storage.faults import Missing, Refused, TierError, TierFault
from firn.cache.storage.orders import (
    Changes,
    DeleteOrder,
    Order,
    Outcome,
    ReadOrder,
    ReadOver,
    RootCleared,
    ScanBatch,
    ScanEnded,
    ScanOrder,
    TouchOrder,
    WriteOrder,
    WriteOver,
)
from firn.cache.storage.worker import TierWorker
from firn.cache.tiers import Gone, TierUsage, WriteResult
from firn.ranks.cache.mirror import Mirror, number_of
from firn.ranks.calls import Followers, RankCall

REFUSED = "refused"


@dataclass(eq=False)
class _Shared:
    """A read or a write, until every rank has reported its outcome."""

    serial: int
    name: Name
    waiting: set[int]
    """Ranks other than 0 that have not answered yet."""
    own: WriteOver | ReadOver | None = None
    """The outcome in rank 0's own tier."""
    faults: list[TierError] = field(default_factory=list)
    """Faults of the other ranks."""


class RankWorker:
    """Implements storage.orders.Worker over the one of rank 0's own tier."""

    is_store = False

    def __init__(
        self, own: TierWorker, followers: Followers, mirror: Mirror, *, layout: str
    ) -> None:
        """layout: that of this rank's records; records of other ranks are not read."""
        self.deadline_s = own.deadline_s
        self._own = own
        self._followers = followers
        self._mirror = mirror
        self._layout = layout
        self._ranks = frozenset(range(1, followers.n_followers + 1))
        self._serial = count(1)
        self._answers: deque[tuple[int, RankCall]] = deque()
        """What other ranks have said, in order. Filled by other threads."""
        self._over: deque[Outcome] = deque()
        self._by_order: dict[Order, _Shared] = {}
        self._by_serial: dict[int, _Shared] = {}
        self._was_read: dict[ReadOrder, int] = {}
        """Reads that all ranks have completed and the tree has not taken yet."""
        self._have: dict[int, set[Name]] = {rank: set() for rank in self._ranks}
        """The records that each other rank has reported."""
        self._incomplete: dict[Name, TierEntry] = {}
        """Records of rank 0's tier that not all others have reported."""
        self._scanning: set[int] = set()
        self._is_deferred = False
        for name in ("read", "written", "seen", "scanned"):
            followers.on_answer(name, self._hear)

    def _hear(self, rank: int, call: RankCall) -> None:
        """On a connection's thread."""
        self._answers.append((rank, call))
        self._own.results.nudge()

    # --- orders ----------------------------------------------------------------------------

    def submit(self, order: Order) -> bool:
        match order:
            case WriteOrder():
                return self._submit_write(order)
            case ReadOrder():
                shared = self._share(order, order.name)
                tokens = order.tokens.astype("<u8").tobytes()
                self._followers.tell("read", shared.serial, str(order.name), blob=tokens)
            case DeleteOrder():
                self._delete_on_others(order.names)
            case TouchOrder():
                stamps = {str(name): stamp for name, stamp in order.stamps.items()}
                self._followers.tell_later("touch", stamps)
            case ScanOrder():
                self._scanning = {0, *self._ranks}
                self._followers.tell("scan")
            case _:  # a clearing is noted by this rank: what it does not report is present nowhere
                pass
        return self._own.submit(order)

    def _submit_write(self, order: WriteOrder) -> bool:
        assert order.record is not None
        number = number_of(order.record.arrays)
        if not self._own.submit(order):
            return False
        shared, header = self._share(order, order.header.name), order.header
        tokens = header.tokens.astype("<u8").tobytes()
        fields = _fields(header)
        self._followers.tell("write", shared.serial, number, order.used_at, fields, blob=tokens)
        return True

    def _share(self, order: WriteOrder | ReadOrder, name: Name) -> _Shared:
        shared = _Shared(next(self._serial), name, set(self._ranks))
        self._by_order[order] = self._by_serial[shared.serial] = shared
        return shared

    def has_room(self, nbytes: int) -> bool:
        return self._own.has_room(nbytes)

    def defer_writes(self, defer: bool) -> None:
        self._own.defer_writes(defer)
        if defer != self._is_deferred:
            self._is_deferred = defer
            self._followers.tell_later("defer", defer)

    def usage(self) -> TierUsage:
        return self._own.usage()

    def close(self) -> None:
        self._own.close()

    # --- outcomes --------------------------------------------------------------------------

    @property
    def n_results(self) -> int:
        return len(self._over) + len(self._answers) + self._own.n_results

    def poll(self, *, wait_s: float = 0.0) -> Outcome | None:
        until = time.monotonic() + wait_s
        while not self._over:
            if self._answers:
                self._answered(*self._answers.popleft())
                continue
            outcome = self._own.poll(wait_s=max(until - time.monotonic(), 0.0))
            if outcome is not None:
                self._ended_here(outcome)
            elif not self._answers:  # else it was they that ended the wait
                return None
        return self._over.popleft()

    def _ended_here(self, outcome: Outcome) -> None:
        match outcome:
            case WriteOver(order) | ReadOver(order):
                shared = self._by_order.pop(order)
                shared.own = outcome
                self._end_if_over(shared)
            case ScanEnded():
                self._was_scanned(0)
            case ScanBatch(changes):
                self._seen_here(changes)
            case _:
                self._over.append(outcome)

    def _answered(self, rank: int, call: RankCall) -> None:
        match call.name:
            case "written":
                serial, fault, evicted = call.args
                self._evicted(_parsed(evicted), by=rank)
                if not fault:
                    self._have[rank].add(self._by_serial[serial].name)
                self._ended_there(serial, rank, _fault_of(rank, fault) if fault else None)
            case "read":
                serial, fault = call.args
                if fault:
                    self._have[rank].discard(self._by_serial[serial].name)
                missing = Missing(f"rank {rank}: {fault}") if fault else None
                self._ended_there(serial, rank, missing)
            case "seen":
                there, gone = map(_parsed, call.args)
                self._seen_there(rank, there, gone)
            case "scanned":
                self._was_scanned(rank)

    def _ended_there(self, serial: int, rank: int, fault: TierError | None) -> None:
        shared = self._by_serial[serial]
        shared.faults += [fault] if fault else []
        shared.waiting.discard(rank)
        self._end_if_over(shared)

    def _end_if_over(self, shared: _Shared) -> None:
        """The last rank ends an order."""
        if shared.waiting or shared.own is None:
            return
        del self._by_serial[shared.serial]
        match shared.own:
            case WriteOver():
                self._over.append(self._end_write(shared, shared.own))
            case ReadOver():
                self._over.append(self._end_read(shared, shared.own))

    def _end_write(self, shared: _Shared, own: WriteOver) -> WriteOver:
        if isinstance(own.result, WriteResult) and not shared.faults:
            if own.result.evicted:
                self._delete_on_others(own.result.evicted)
            return own
        self._delete([shared.name])  # on all ranks: a slice is of no use without the others
        return WriteOver(own.order, shared.faults[0]) if not _failed(own) else own

    def _end_read(self, shared: _Shared, own: ReadOver) -> ReadOver:
        if isinstance(own.result, Loaded) and own.result.header.layout != self._layout:
            own = ReadOver(own.order, Missing("another rank's slice"), own.at)
        if isinstance(own.result, Loaded) and not shared.faults:
            self._was_read[own.order] = shared.serial
            return own
        self._followers.tell("discard_read", shared.serial)
        return ReadOver(own.order, shared.faults[0], own.at) if not _failed(own) else own

    def arrays(self, order: ReadOrder, loaded: Loaded) -> Payload:
        """The other ranks keep their slices of what the tree takes, and drop those of the rest."""
        serial = self._was_read.pop(order)
        try:
            arrays = self._own.arrays(order, loaded)
        except BaseException:
            self._followers.tell("discard_read", serial)
            raise
        return self._mirror.arrived(arrays, serial)

    # --- what there is ---------------------------------------------------------------------

    def _seen_here(self, changes: Changes) -> None:
        passed: list[TierEntry | Gone[Name] | RootCleared] = []
        for change in changes:
            if isinstance(change, Gone):
                self._incomplete.pop(change.name, None)
                passed.append(change)
            elif isinstance(change, RootCleared):
                passed.append(change)
            elif change.label.layout == self._layout:
                self._incomplete[change.name] = change
                passed += self._complete([change.name])
        self._pass_on(passed)

    def _seen_there(self, rank: int, there: Sequence[Name], gone: Sequence[Name]) -> None:
        self._have[rank].update(there)
        self._have[rank].difference_update(gone)
        self._pass_on([*self._complete(there), *map(Gone, gone)])

    def _pass_on(self, changes: Changes) -> None:
        if changes:
            self._over.append(ScanBatch(changes))

    def _complete(self, names: Iterable[Name]) -> list[TierEntry]:
        """The entries of the named records that all ranks are now known to have."""
        everywhere = [n for n in names if n in self._incomplete and self._all_have(n)]
        return [self._incomplete.pop(name) for name in everywhere]

    def _all_have(self, name: Name) -> bool:
        return all(name in have for have in self._have.values())

    def _was_scanned(self, rank: int) -> None:
        """A rank whose scan failed has reported less, which costs misses and nothing else."""
        if self._scanning:
            self._scanning.discard(rank)
            if not self._scanning:
                self._over.append(ScanEnded())

    def _evicted(self, names: Sequence[Name], *, by: int) -> None:
        """One rank has evicted its slices, so those of the others are useless."""
        if names:
            self._have[by].difference_update(names)
            self._delete(names)
            self._pass_on([Gone(name) for name in names])

    def _delete(self, names: Sequence[Name]) -> None:
        self._own.submit(DeleteOrder(names))
        self._delete_on_others(names)

    def _delete_on_others(self, names: Sequence[Name]) -> None:
        for have in self._have.values():
            have.difference_update(names)
        self._followers.tell("delete", [str(name) for name in names])


def _failed(over: WriteOver | ReadOver) -> bool:
    return isinstance(over.result, TierError)


def _parsed(texts: Iterable[str]) -> list[Name]:
    return [name for text in texts if (name := Name.parse(text))]


def _fields(header: Header) -> dict[str, Any]:
    return {
        "key": header.key.hex(),
        "parent": header.parent.hex(),
        "root": header.root.hex(),
        "part": header.part.value,
        "start": header.start,
        "namespace": header.namespace,
        "created": header.created,
        "mark": header.mark,
    }


def _fault_of(rank: int, fault: Sequence[str]) -> TierError:
    kind, reason = fault
    reason = f"rank {rank}: {reason}"
    return Refused(reason) if kind == REFUSED else TierFault(reason)
