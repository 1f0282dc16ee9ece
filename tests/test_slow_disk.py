"""The slow disk waits for as long as it should, and its bytes are right."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.cache.tiers.records import Folder, Record, of_size
from tests.slow_disk import SlowDisk
from tests.waiting import wait_until

MIB = 1 << 20


def stored(disk: SlowDisk, folder: Path) -> tuple[Folder, list[Record]]:
    tier, records = Folder(folder, disk=disk), [of_size(MIB, i) for i in range(4)]
    for one in records:
        tier.write(one)
    return tier, records


def test_bandwidth_is_shared(tmp_path: Path) -> None:
    """Four reads at the same time wait for each other: the last one for all of them."""
    waits: list[float] = []
    disk = SlowDisk(tmp_path, clock=lambda: 7.0, sleep=waits.append)
    tier, records = stored(disk, tmp_path)
    assert waits == []
    disk.nbytes_per_s = 40 * MIB
    assert all(map(tier.holds, records))
    assert 0.1 <= max(waits) < 0.11


def test_latency_is_not_shared(tmp_path: Path) -> None:
    """Four threads wait for it at the same time."""
    meeting = threading.Barrier(4, timeout=20)
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        meeting.wait()

    disk = SlowDisk(tmp_path, sleep=sleep)
    tier, records = stored(disk, tmp_path)
    disk.latency_s = 0.05
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(tier.holds, records))
    assert waits == [0.05] * 4


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
