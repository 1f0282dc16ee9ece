"""Several touches of one record: the highest stamp stays."""

from __future__ import annotations

import threading
from collections.abc import Mapping

import pytest

from firn.cache.storage.faults import TierFault
from firn.cache.storage.orders import ScanOrder, TouchOrder
from firn.cache.storage.worker import TierWorker
from tests.cache.tiers.records import chain
from tests.dict_tier import DictTier
from tests.waiting import wait_until

WAIT_S = 20.0


class SlowTier(DictTier):
    """Its first touch waits at the gate, as if between reading a stamp and changing it."""

    def __init__(self, fault: Exception | None = None) -> None:
        super().__init__(1 << 20)
        self.begun, self.gate = threading.Event(), threading.Event()
        self.touches: list[dict[str, float]] = []
        self._fault = fault

    def touch(self, stamps: Mapping[str, float]) -> None:
        if not self.begun.is_set():
            self.begun.set()
            assert self.gate.wait(WAIT_S)
            if self._fault is not None:
                raise self._fault
        self.touches.append(dict(stamps))


@pytest.mark.parametrize(("second", "third"), [(5.0, 7.0), (7.0, 5.0)])
def test_the_highest_stamp_comes_last(second: float, third: float) -> None:
    name, other = (one.name for one in chain(2))
    tier = SlowTier()
    worker = TierWorker(tier, n_threads=2)
    worker.submit(TouchOrder({name: 3.0}))
    assert tier.begun.wait(WAIT_S)
    worker.submit(TouchOrder({name: second}))
    worker.submit(TouchOrder({name: third, other: 1.0}))
    worker.submit(ScanOrder())
    assert worker.poll(wait_s=WAIT_S), "the other thread has done what it was given"
    tier.gate.set()
    worker.close()
    assert tier.touches == [{str(name): 3.0}, {str(name): 7.0, str(other): 1.0}]


@pytest.mark.parametrize("fault", [TierFault("disk", "gone"), RuntimeError("a bug")])
def test_after_a_fault_others_are_touched(fault: Exception) -> None:
    name, other = (one.name for one in chain(2))
    tier = SlowTier(fault)
    worker = TierWorker(tier, n_threads=2)
    worker.submit(TouchOrder({name: 3.0}))
    assert tier.begun.wait(WAIT_S)
    tier.gate.set()
    wait_until(lambda: not worker.n_pending)
    worker.submit(TouchOrder({other: 4.0}))
    worker.close()
    assert tier.touches == [{str(other): 4.0}]
