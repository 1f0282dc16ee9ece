"""The slow disk is at least as slow as it should be, and its bytes are right."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.cache.tiers.records import Folder, of_size
from tests.slow_disk import SlowDisk
from tests.waiting import wait_until

MIB = 1 << 20


def seconds(work: object) -> float:
    began = time.monotonic()
    work()  # type: ignore[operator]
    return time.monotonic() - began


def test_bandwidth_is_shared_and_latency_is_not(tmp_path: Path) -> None:
    """Only lower bounds are checked: a busy machine may take longer."""
    disk = SlowDisk(tmp_path)
    tier = Folder(tmp_path, disk=disk)
    records = [of_size(MIB, i) for i in range(4)]
    for one in records:
        tier.write(one)
    disk.nbytes_per_s, disk.latency_s = 40 * MIB, 0.0

    def read_all() -> None:
        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(tier.holds, records))

    assert seconds(read_all) >= 0.1
    disk.nbytes_per_s, disk.latency_s = float("inf"), 0.05
    assert seconds(lambda: tier.holds(records[0])) >= 0.05


def test_a_stall_ends_when_it_is_told_to(tmp_path: Path) -> None:
    disk = SlowDisk(tmp_path)
    tier, one = Folder(tmp_path, disk=disk), of_size(1000)
    tier.write(one)
    disk.stall()
    found: list[bool] = []
    reader = threading.Thread(target=lambda: found.append(tier.holds(one)))
    reader.start()
    wait_until(lambda: disk.n_waiting)
    assert found == []
    disk.resume()
    reader.join(20)
    assert found == [True]
