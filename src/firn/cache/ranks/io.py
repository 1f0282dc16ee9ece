"""A tier of a sharded model, as rank 0's tree sees it: what all ranks have, and nothing else.

Every rank keeps its slice of a record in its own tier, under the same name. A record is stored when
all have written it, read when all have read and verified it, and present after a start if all have
found it. What one of them lacks, has lost or cannot read is a miss, and what one evicts is deleted
everywhere.

Owner: rank 0's engine thread. Answers arrive on the threads of the connections and of the tier.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Generic, TypeVar

from firn.cache.arrays.payload import Payload
from firn.cache.ranks.mirror import Mirror
from firn.cache.storage.container import Header, Loaded, Name
from firn.cache.storage.faults import Missing, Refused, TierError, TierFault
from firn.cache.storage.io import (
    Changes,
    Forgetting,
    Io,
    ReadOrder,
    RootCleared,
    TierEntry,
    WriteOrder,
)
from firn.cache.storage.threads import Done
from firn.cache.tiers import Gone, TierUsage, WriteResult
from firn.core.keys import Key
from firn.core.ranks import Followers, RankCall

T = TypeVar("T")
NumberOf = Callable[[Name], int]
"""The number of the payload that memory holds of a record."""
REFUSED = "refused"


@dataclass(eq=False)
class _Order(Generic[T]):
    """A read or a write, until every rank has reported its outcome."""

    name: Name
    done: Done[T]
    waiting: set[int]
    """Ranks other than 0 that have not answered yet."""
    result: T | TierError | None = None
    """The outcome in rank 0's own tier; None until it is known."""
    faults: list[TierError] = field(default_factory=list)
    """Faults of the other ranks."""

    @property
    def is_over(self) -> bool:
        return not self.waiting and self.result is not None


class RankIo:
    """Implements Io and Forgetting, and Receiving of storage/client.py."""

    def __init__(
        self, own: Io, followers: Followers, mirror: Mirror, *, layout: str, number_of: NumberOf
    ) -> None:
        """layout: that of this rank's records; records of other ranks are not read."""
        self._own = own
        self._followers = followers
        self._mirror = mirror
        self._layout = layout
        self._number_of = number_of
        self._ranks = frozenset(range(1, followers.n_followers + 1))
        self._lock = threading.Lock()
        self._serial = count(1)
        self._reads: dict[int, _Order[Loaded]] = {}
        self._writes: dict[int, _Order[WriteResult[Name]]] = {}
        self._was_read: dict[Name, int] = {}
        """Reads that all ranks have completed and the tree has not taken yet."""
        self._have: dict[int, set[Name]] = {rank: set() for rank in self._ranks}
        """The records that each other rank has reported."""
        self._incomplete: dict[Name, TierEntry] = {}
        """Records of rank 0's tier that not all others have reported."""
        self._scanning: set[int] = set()
        self._scanned: Done[None] = lambda _: None
        self._batch: Callable[[Changes], None] = lambda _: None
        self._is_deferred = False
        for name, take in (
            ("read", self._on_read),
            ("written", self._on_written),
            ("seen", self._on_seen),
            ("scanned", lambda rank, _: self._was_scanned(rank, None)),
        ):
            followers.on_answer(name, take)

    # --- writing ---------------------------------------------------------------------------

    def try_write(self, order: WriteOrder, done: Done[WriteResult[Name]]) -> bool:
        header = order.header
        number, serial = self._number_of(header.name), next(self._serial)
        self._writes[serial] = _Order(header.name, done, set(self._ranks))
        is_accepted = self._own.try_write(
            order,
            lambda result: self._step(self._writes, serial, self._end_write, result=result),
        )
        if not is_accepted:
            del self._writes[serial]
            return False
        tokens = header.tokens.astype("<u8").tobytes()
        self._followers.tell("write", serial, number, order.used_at, _fields(header), blob=tokens)
        return True

    def _on_written(self, rank: int, call: RankCall) -> None:
        serial, fault, evicted = call.args
        gone = [name for text in evicted if (name := Name.parse(text))]
        if gone:
            self._evicted(gone, by=rank)
        error = _fault_of(rank, fault) if fault else None
        if error is None and serial in self._writes:
            with self._lock:
                self._have[rank].add(self._writes[serial].name)
        self._step(self._writes, serial, self._end_write, rank=rank, fault=error)

    def _end_write(self, serial: int, order: _Order[WriteResult[Name]]) -> None:
        result = order.result
        assert result is not None
        if isinstance(result, WriteResult) and not order.faults:
            if result.evicted:
                self._delete_on_others(result.evicted)
            order.done(result)
            return
        self.delete([order.name])  # on all ranks: a slice is of no use without the others
        order.done(order.faults[0] if isinstance(result, WriteResult) else result)

    def _evicted(self, names: Sequence[Name], *, by: int) -> None:
        """One rank has evicted its slices, so those of the others are useless."""
        with self._lock:
            self._have[by].difference_update(names)
        self.delete(names)
        self._batch([Gone(name) for name in names])

    # --- reading ---------------------------------------------------------------------------

    def read(self, order: ReadOrder, done: Done[Loaded]) -> None:
        serial = next(self._serial)
        self._reads[serial] = _Order(order.name, done, set(self._ranks))
        tokens = order.tokens.astype("<u8").tobytes()
        self._followers.tell("read", serial, str(order.name), blob=tokens)
        self._own.read(
            order, lambda result: self._step(self._reads, serial, self._end_read, result=result)
        )

    def _on_read(self, rank: int, call: RankCall) -> None:
        serial, fault = call.args
        error = Missing(f"rank {rank}: {fault}") if fault else None
        if error is not None and serial in self._reads:
            with self._lock:
                self._have[rank].discard(self._reads[serial].name)
        self._step(self._reads, serial, self._end_read, rank=rank, fault=error)

    def _end_read(self, serial: int, order: _Order[Loaded]) -> None:
        result = order.result
        assert result is not None
        if isinstance(result, Loaded) and result.header.layout != self._layout:
            result = Missing("another rank's slice")
        if isinstance(result, Loaded) and not order.faults:
            with self._lock:
                self._was_read[order.name] = serial
            order.done(result)
            return
        self._followers.tell("discard_read", serial)
        order.done(order.faults[0] if isinstance(result, Loaded) else result)

    def received(self, name: Name, make: Callable[[], Payload]) -> Payload:
        """The other ranks keep their slices of what the tree takes, and drop those of the rest."""
        with self._lock:
            serial = self._was_read.pop(name)
        try:
            arrays = make()
        except BaseException:
            self._followers.tell("discard_read", serial)
            raise
        return self._mirror.arrived(arrays, serial)

    def _step(
        self,
        orders: dict[int, _Order[T]],
        serial: int,
        end: Callable[[int, _Order[T]], None],
        *,
        result: T | TierError | None = None,
        rank: int = 0,
        fault: TierError | None = None,
    ) -> None:
        """A rank is done with an order; the last one ends it."""
        with self._lock:
            order = orders[serial]
            if rank:
                order.waiting.discard(rank)
                order.faults += [fault] if fault else []
            else:
                order.result = result
            if not order.is_over:
                return
            del orders[serial]
        end(serial, order)

    # --- what there is ---------------------------------------------------------------------

    def scan(self, batch: Callable[[Changes], None], done: Done[None]) -> None:
        with self._lock:
            self._batch, self._scanned = batch, done
            self._scanning = {0, *self._ranks}
        self._followers.tell("scan")
        self._own.scan(self._seen_here, lambda result: self._was_scanned(0, result))

    def _seen_here(self, changes: Changes) -> None:
        passed: list[TierEntry | Gone[Name] | RootCleared] = []
        with self._lock:
            for change in changes:
                if isinstance(change, Gone):
                    self._incomplete.pop(change.name, None)
                    passed.append(change)
                elif isinstance(change, RootCleared):
                    passed.append(change)
                elif change.label.layout == self._layout:
                    self._incomplete[change.name] = change
                    passed += self._complete([change.name])
        if passed:
            self._batch(passed)

    def _on_seen(self, rank: int, call: RankCall) -> None:
        there, gone = ([n for t in texts if (n := Name.parse(t))] for texts in call.args)
        with self._lock:
            self._have[rank].update(there)
            self._have[rank].difference_update(gone)
            passed: list[TierEntry | Gone[Name]] = [*self._complete(there), *map(Gone, gone)]
        if passed:
            self._batch(passed)

    def _complete(self, names: Iterable[Name]) -> list[TierEntry]:
        """The entries of the named records that all ranks are now known to have."""
        everywhere = [n for n in names if n in self._incomplete and self._all_have(n)]
        return [self._incomplete.pop(name) for name in everywhere]

    def _all_have(self, name: Name) -> bool:
        return all(name in have for have in self._have.values())

    def _was_scanned(self, rank: int, result: TierError | None) -> None:
        """A rank whose scan failed has reported less, which costs misses and nothing else."""
        with self._lock:
            was_scanning = bool(self._scanning)
            self._scanning.discard(rank)
            if self._scanning or not was_scanning:
                return
        self._scanned(result)

    # --- the rest --------------------------------------------------------------------------

    def delete(self, names: Iterable[Name]) -> None:
        names = list(names)
        self._own.delete(names)
        self._delete_on_others(names)

    def _delete_on_others(self, names: Sequence[Name]) -> None:
        with self._lock:
            for have in self._have.values():
                have.difference_update(names)
        self._followers.tell("delete", [str(name) for name in names])

    def bury(self, root: Key, at: float, done: Done[None]) -> None:
        """Noted by this rank: what it does not report is present nowhere."""
        if isinstance(self._own, Forgetting):
            self._own.bury(root, at, done)
        else:
            done(None)

    def when_deleted(self, done: Done[None]) -> None:
        if isinstance(self._own, Forgetting):
            self._own.when_deleted(done)
        else:
            done(None)

    def touch(self, stamps: Mapping[Name, float]) -> None:
        if stamps:
            self._own.touch(stamps)
            self._followers.tell_later(
                "touch", {str(name): stamp for name, stamp in stamps.items()}
            )

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
