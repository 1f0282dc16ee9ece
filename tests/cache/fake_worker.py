"""A worker without threads, for tests that say themselves how orders end."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from firn.cache.arrays.host import from_host
from firn.cache.arrays.payload import Payload
from firn.cache.storage.container import Loaded, Name
from firn.cache.storage.orders import (
    AskOrder,
    BuryOrder,
    Changes,
    ConfirmOrder,
    DeleteOrder,
    Order,
    Outcome,
    ReadOrder,
    ScanBatch,
    ScanOrder,
    TouchOrder,
    WriteOrder,
    outcome_of,
)
from firn.cache.tiers import TierUsage


class FakeWorker:
    """Implements orders.Worker: an order calls one of the methods below, which calls `end`."""

    is_store = False
    deadline_s = math.inf

    def __init__(self, clock: Callable[[], float] = lambda: 0.0) -> None:
        """clock: the cache's."""
        self._now = clock
        self._over: deque[Outcome] = deque()

    @property
    def n_results(self) -> int:
        return len(self._over)

    def submit(self, order: Order) -> bool:
        match order:
            case WriteOrder():
                return self.write(order)
            case ReadOrder():
                self.read(order)
            case AskOrder():
                self.ask(order)
            case ScanOrder():
                self.scan(order)
            case DeleteOrder(names):
                self.delete(names)
            case TouchOrder(stamps):
                self.touch(stamps)
            case BuryOrder() | ConfirmOrder():
                self.end(order, None)
        return True

    def end(self, order: Order, result: Any) -> None:
        if isinstance(order, WriteOrder):
            order.content = None
        outcome = outcome_of(order, result, self._now())
        assert outcome is not None
        self._over.append(outcome)

    def seen(self, changes: Changes) -> None:
        self._over.append(ScanBatch(changes))

    def poll(self, *, wait_s: float = 0.0) -> Outcome | None:
        return self._over.popleft() if self._over else None

    def arrays(self, order: ReadOrder, loaded: Loaded) -> Payload:
        return from_host(loaded.header.tensors, loaded.header.places, loaded.buffers)

    # --- what a test may do otherwise ------------------------------------------------------

    def write(self, order: WriteOrder) -> bool:
        raise AssertionError("nothing is written here")

    def read(self, order: ReadOrder) -> None:
        raise AssertionError("nothing is read here")

    def ask(self, order: AskOrder) -> None:
        raise AssertionError("nothing is asked here")

    def scan(self, order: ScanOrder) -> None:
        self.end(order, None)

    def delete(self, names: Iterable[Name]) -> None: ...

    def touch(self, stamps: Mapping[Name, float]) -> None: ...

    def has_room(self, nbytes: int) -> bool:
        return True

    def defer_writes(self, defer: bool) -> None: ...

    def usage(self) -> TierUsage:
        return TierUsage(0, 1 << 20)

    def close(self) -> None: ...
