"""How much the SSD tier's folder may hold and receive: one limit, last use, the write budget."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest

from firn.cache.storage.container import TierEntry
from firn.cache.storage.faults import Refused
from firn.cache.tiers import TierOptions, _known
from firn.cache.tiers._folder import (
    DEFAULT_LIMIT_NBYTES,
    Disk,
    default_limit,
)
from firn.cache.tiers.ssd import SsdTier
from tests.cache.tiers.folders import Clock, du, files, put
from tests.cache.tiers.records import Folder, chain, of_size, record

MIB = 1 << 20
GIB = 1 << 30


class Small(Disk):
    def free_nbytes(self) -> int:
        return GIB


# --- one limit ------------------------------------------------------------------------------


def test_the_tier_counts_what_du_counts(folder: Path, opened: Callable[..., Folder]) -> None:
    tier = opened(8 * MIB)
    for i in range(60):
        put(tier, of_size(1000 + 7919 * i, i))
        assert du(folder) <= tier.usage().nbytes <= 8 * MIB
    assert tier.usage().nbytes - du(folder) < 64 * 1024
    fresh = opened(8 * MIB)
    fresh.scan()
    assert abs(fresh.usage().nbytes - tier.usage().nbytes) < 64 * 1024


def test_empty_subfolders_do_not_pile_up(folder: Path, opened: Callable[..., Folder]) -> None:
    tier = opened()
    records = [of_size(100, i) for i in range(50)]
    put(tier, *records)
    for one in records:
        tier.delete(one)
    assert list(folder.glob("??")) == []


def test_a_lower_limit_is_kept_from_the_scan_on(
    folder: Path, opened: Callable[..., Folder]
) -> None:
    put(opened(32 * MIB), *[of_size(400_000, i) for i in range(40)])
    small = opened(4 * MIB)
    names = small.names()
    assert du(folder) <= 4 * MIB
    assert 5 < len(names) < 11
    assert all(small.tier.read(str(name)) for name in names)


def test_the_last_to_open_the_folder_sets_the_limit_for_all(
    folder: Path, opened: Callable[..., Folder]
) -> None:
    large = opened(32 * MIB)
    put(large, *[of_size(400_000, i) for i in range(8)])
    small = opened(2 * MIB)
    small.scan()
    put(large, *[of_size(400_000, 50 + i) for i in range(8)])
    assert du(folder) <= 2 * MIB
    guest = opened(99 * MIB, guest=True)
    put(guest, *[of_size(400_000, 80 + i) for i in range(8)])
    assert du(folder) <= 2 * MIB
    again = opened(32 * MIB)
    again.scan()
    put(again, *[of_size(400_000, 90 + i) for i in range(8)])
    assert du(folder) > 3 * MIB


class Filled(Disk):
    free = 0

    def free_nbytes(self) -> int:
        return self.free


def test_a_disk_that_was_full_at_the_start_and_is_emptied(folder: Path) -> None:
    disk = Filled(folder)
    tier = SsdTier(TierOptions(str(folder)), disk=disk)
    other = SsdTier(TierOptions(str(folder)), guest=True)
    name, raw = "ab" * 32 + ".pages", [b"x" * 5000]
    with pytest.raises(Refused):
        tier.write(name, raw, used_at=1.0)
    disk.free = GIB
    assert tier.write(name, raw, used_at=1.0).new
    assert tier.usage().limit_nbytes == pytest.approx(GIB // 4, abs=MIB)
    disk.free = 2 * MIB
    tier.evict_to(GIB)
    assert tier.usage().limit_nbytes == pytest.approx(GIB // 4, abs=MIB), "others fill it again"
    other.evict_to(GIB)
    assert other.usage().limit_nbytes == tier.usage().limit_nbytes


def test_the_default_limit() -> None:
    assert default_limit(100 * GIB) == DEFAULT_LIMIT_NBYTES == 10 * GIB
    assert default_limit(40 * GIB) == 10 * GIB
    assert default_limit(39 * GIB) == 39 * GIB // 4
    assert default_limit(0) == 0
    # What the cache uses already does not shrink its limit at the next start.
    assert default_limit(31 * GIB, 9 * GIB) == 10 * GIB


def test_a_limit_that_nobody_gave_is_found_by_the_first_scan(folder: Path) -> None:
    """Opening the tier reads nothing: a slow disk must not hold up the server's start."""
    tier = SsdTier(TierOptions(str(folder)), disk=Small(folder))
    assert not folder.exists()
    assert tier.usage().limit_nbytes == DEFAULT_LIMIT_NBYTES
    assert list(tier.scan()) == []
    assert 0 <= tier.usage().limit_nbytes - GIB // 4 < MIB


# --- last use -------------------------------------------------------------------------------


def test_last_use_survives_a_restart(opened: Callable[..., Folder], wall: Clock) -> None:
    tier = opened(3 * MIB)
    old, used, new = (of_size(500_000, i) for i in range(3))
    for one in (old, used, new):
        put(tier, one)
        wall.step(100)
    tier.touch([used])
    wall.step(100)
    fresh = opened(3 * MIB)
    entries = {e.name: e for e in fresh.scan() if isinstance(e, TierEntry)}
    assert entries[used.name].used_at > entries[new.name].used_at > entries[old.name].used_at
    put(fresh, *[of_size(500_000, 10 + i) for i in range(5)])
    assert fresh.holds(used)
    assert not fresh.holds(old)
    assert not fresh.holds(new)


def test_a_use_elsewhere_counts(opened: Callable[..., Folder], wall: Clock) -> None:
    """This tier does not know of the use; it looks at the file before it evicts."""
    tier, other = opened(3 * MIB), opened(3 * MIB)
    first, second = of_size(500_000, 0), of_size(500_000, 1)
    put(tier, first)
    wall.step()
    put(tier, second)
    other.scan()
    wall.step(1000)
    other.touch([first])
    wall.step()
    put(tier, *[of_size(500_000, 10 + i) for i in range(5)])
    assert tier.holds(first)
    assert not tier.holds(second)


def test_the_highest_stamps_are_raised_first(folder: Path, wall: Clock) -> None:
    """Otherwise another process could find a child above its parent, and evict the parent."""

    class Noting(Disk):
        stamps: ClassVar[list[float]] = []

        def set_mtime(self, path: str, at: float) -> None:
            self.stamps.append(at)
            super().set_mtime(path, at)

    tier, records = Folder(folder, disk=Noting(folder), wall=wall), chain(5)
    put(tier, *records)
    wall.step(100)
    Noting.stamps.clear()
    tier.touch(reversed(records))
    assert len(Noting.stamps) == 5
    assert Noting.stamps == sorted(Noting.stamps, reverse=True)
    tier.touch(records, at=1.0)
    assert len(Noting.stamps) == 5, "none is lowered"


def test_dates_in_the_future_do_not_live_for_ever(
    folder: Path, opened: Callable[..., Folder], wall: Clock
) -> None:
    tier = opened(3 * MIB)
    odd = of_size(500_000, 0)
    put(tier, odd)
    path = folder / next(iter(files(folder)))
    os.utime(path, (wall.now + 1e8, wall.now + 1e8))
    fresh = opened(3 * MIB)
    fresh.scan()
    for i in range(10):
        wall.step()
        put(fresh, of_size(500_000, 10 + i))
    assert not fresh.holds(odd)


def test_deleted_records_leave_nothing_in_memory(
    opened: Callable[..., Folder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many records may come and go in a folder below its limit."""
    monkeypatch.setattr(_known, "HEAP_SLACK", 32)
    tier, one = opened(3 * MIB), of_size(100)
    kept = chain(3)
    put(tier, *kept)
    for _ in range(64):
        put(tier, one)
        tier.delete(one)
    assert len(tier.tier._known._heap) < 64
    tier.evict_to(0)
    assert not any(tier.holds(r) for r in kept), "they can still be evicted"


# --- the write budget -----------------------------------------------------------------------


def test_the_write_budget_is_one_for_all_and_rolls(
    opened: Callable[..., Folder], wall: Clock
) -> None:
    a = opened(write_budget_nbytes=MIB)
    put(a, *[of_size(200_000, i) for i in range(3)])
    b = opened(write_budget_nbytes=MIB)
    put(b, *[of_size(200_000, 10 + i) for i in range(2)])
    list(a.scan())
    for tier in (a, b):  # what wears out the disk: all writes of the last day together
        assert 1_000_000 <= (tier.usage().day_nbytes or 0) <= MIB
        assert tier.usage().day_limit_nbytes == MIB
    for tier, n in ((a, 20), (b, 21), (opened(write_budget_nbytes=MIB), 22)):
        with pytest.raises(Refused) as caught:
            put(tier, of_size(200_000, n))
        assert caught.value.reason == "write budget"
        assert tier.usage().drops == {"write budget": 1}
        assert tier.usage().status.state == "ok"
    wall.step(23 * 3600)
    with pytest.raises(Refused):
        put(a, of_size(200_000, 30))
    wall.step(3600)
    list(b.scan())
    assert b.usage().day_nbytes == 0
    put(a, of_size(200_000, 30))


# --- for people -----------------------------------------------------------------------------


def test_evicting_on_demand(folder: Path, opened: Callable[..., Folder]) -> None:
    tier = opened()
    put(tier, *chain(20, nbytes=100_000))
    before = du(folder)
    freed = tier.evict_to(MIB)
    assert du(folder) <= MIB
    assert freed == pytest.approx(before - du(folder), abs=20_000)
    shutil.rmtree(folder)
    assert tier.evict_to(0) >= 0


def test_the_limit_is_known_again_after_the_folder_was_deleted(
    folder: Path, opened: Callable[..., Folder]
) -> None:
    tier = opened(2 * MIB)
    put(tier, record())
    shutil.rmtree(folder)
    put(tier, record())
    guest = opened(99 * MIB, guest=True)
    put(guest, *[of_size(400_000, i) for i in range(8)])
    assert du(folder) <= 2 * MIB
    assert guest.usage().limit_nbytes == 2 * MIB


# --- the numbers behind the lock ------------------------------------------------------------


def test_a_page_that_is_lost_or_spoilt_is_measured_anew(
    folder: Path, opened: Callable[..., Folder]
) -> None:
    tier = opened(2 * MIB)
    put(tier, *[of_size(300_000, i) for i in range(4)])
    for spoil in (b"", b"x" * 10_000, bytes(5000)):
        (folder / "firn.lock").write_bytes(spoil)
        put(tier, of_size(100, 20 + len(spoil) % 7))
        assert du(folder) <= tier.usage().nbytes <= du(folder) + 64 * 1024
    (folder / "firn.lock").write_bytes(b"")
    other = opened(2 * MIB)
    put(other, *[of_size(300_000, 40 + i) for i in range(4)])
    assert du(folder) <= 2 * MIB


def test_what_a_user_copies_into_the_folder_is_counted(
    folder: Path, opened: Callable[..., Folder], tmp_path: Path
) -> None:
    put(Folder(tmp_path / "elsewhere"), *[of_size(300_000, i) for i in range(6)])
    tier = opened(2 * MIB)
    put(tier, of_size(300_000, 9))
    shutil.copytree(tmp_path / "elsewhere", folder, dirs_exist_ok=True, ignore=no_lock)
    assert len(tier.scan()) >= 4
    assert du(folder) <= 2 * MIB
    assert du(folder) <= tier.usage().nbytes <= du(folder) + 64 * 1024


def no_lock(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if name == "firn.lock"]
