"""The SSD tier's folder: names, modes, limits, last use, strangers, and several tiers on one."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from firn.cache.parts import Part
from firn.cache.storage.faults import Missing, Refused, TierFault
from firn.cache.storage.io import TierEntry
from firn.cache.tiers import Gone, TierOptions
from firn.cache.tiers._folder import (
    DEFAULT_LIMIT_NBYTES,
    Disk,
    FolderLock,
    default_limit,
)
from firn.cache.tiers._known import HEAP_SLACK
from firn.cache.tiers.ssd import QUARANTINE_FILES, SsdTier
from tests.cache.tiers.records import Folder, Record, beside, chain, of_size, record

MIB = 1 << 20
GIB = 1 << 30


class Clock:
    def __init__(self, now: float = 1_800_000_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def step(self, seconds: float = 1.0) -> None:
        self.now += seconds


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "firn"


@pytest.fixture
def wall() -> Clock:
    return Clock()


@pytest.fixture
def opened(folder: Path, wall: Clock) -> Callable[..., Folder]:
    def open_folder(limit_nbytes: int = 64 * MIB, **more: Any) -> Folder:
        return Folder(folder, limit_nbytes, wall=wall, **more)

    return open_folder


def put(tier: Folder, *records: Record) -> None:
    for one in records:
        tier.write(one)


def du(folder: Path) -> int:
    """Real bytes, each file once, folders as well."""
    found = {}
    for base, _, names in os.walk(folder):
        for path in [base, *(os.path.join(base, n) for n in names)]:
            st = os.lstat(path)
            found[st.st_ino] = st.st_blocks * 512
    return sum(found.values())


def files(folder: Path) -> set[str]:
    return {str(p.relative_to(folder)) for p in folder.glob("??/*")}


# --- names and modes -----------------------------------------------------------------------


def test_names_are_digests_and_nobody_else_may_look(
    folder: Path, opened: Callable[..., Folder]
) -> None:
    old = os.umask(0)
    try:
        tier = opened()
        one = record(range(3, 20))
        put(tier, one)
    finally:
        os.umask(old)
    text = one.header.key.hex()
    assert files(folder) == {f"{text[:2]}/{text}.pages.safetensors"}
    for base, _, names in os.walk(folder):
        assert stat.S_IMODE(os.stat(base).st_mode) == 0o700, base
        for name in names:
            assert stat.S_IMODE(os.stat(os.path.join(base, name)).st_mode) == 0o600, name
    assert list((folder / "tmp").iterdir()) == []
    assert (folder / "CACHEDIR.TAG").read_text().startswith("Signature: 8a477f597d28d172789f06886")


def test_a_folder_of_ours_is_closed_again_and_another_is_left_alone(
    tmp_path: Path, wall: Clock
) -> None:
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    for path in (ours, theirs):
        path.mkdir(mode=0o755)
        path.chmod(0o755)
    (theirs / "holiday.jpg").write_bytes(b"x")
    for path in (ours, theirs):
        put(Folder(path, MIB), record())
    assert stat.S_IMODE(ours.stat().st_mode) == 0o700
    assert stat.S_IMODE(theirs.stat().st_mode) == 0o755
    assert stat.S_IMODE((theirs / "tmp").stat().st_mode) == 0o700


def test_strangers_files_are_neither_counted_nor_touched(
    folder: Path, opened: Callable[..., Folder]
) -> None:
    """Someone may point us at a folder with two-digit subfolders of its own: git's objects, say."""
    for i in range(256):
        (folder / f"{i:02x}").mkdir(parents=True)
        (folder / f"{i:02x}" / "0123456789").write_bytes(b"x" * 20_000)
    (folder / "notes.txt").write_bytes(b"y" * 100_000)
    tier = opened(3 * MIB)
    put(tier, *[of_size(200_000, i) for i in range(30)])
    tier.scan()
    assert tier.usage().n_foreign == 0
    assert tier.usage().counts["evictions"] > 10
    tier.evict_to(0)
    assert len([p for p in folder.glob("??/*") if p.name == "0123456789"]) == 256
    assert (folder / "notes.txt").exists()


# --- one limit -----------------------------------------------------------------------------


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
    found = small.names()
    assert du(folder) <= 4 * MIB
    assert 5 < len(found) < 11
    assert all(small.tier.read(str(name)) for name in found)


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


def test_the_default_limit() -> None:
    assert default_limit(100 * GIB) == DEFAULT_LIMIT_NBYTES == 10 * GIB
    assert default_limit(40 * GIB) == 10 * GIB
    assert default_limit(39 * GIB) == 39 * GIB // 4
    assert default_limit(0) == 0
    # What the cache uses already does not shrink its limit at the next start.
    assert default_limit(31 * GIB, 9 * GIB) == 10 * GIB


def test_a_limit_that_nobody_gave_is_found_by_the_first_scan(folder: Path) -> None:
    """Opening the tier looks at nothing: the disk may be slow, and the server is to start."""
    tier = SsdTier(TierOptions(str(folder)), disk=Small(folder))
    assert not folder.exists()
    assert tier.usage().limit_nbytes == DEFAULT_LIMIT_NBYTES
    assert list(tier.scan()) == []
    assert 0 <= tier.usage().limit_nbytes - GIB // 4 < MIB


class Small(Disk):
    def free_nbytes(self) -> int:
        return GIB


# --- last use ------------------------------------------------------------------------------


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
    """This tier has not heard of the use; it looks before it evicts."""
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
    """Else another process could find a child above its parent, and evict the parent."""

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


def test_deleted_records_leave_nothing_in_memory(opened: Callable[..., Folder]) -> None:
    """A folder below its limit may see many come and go."""
    tier, one = opened(3 * MIB), of_size(100)
    kept = chain(3)
    put(tier, *kept)
    for _ in range(2 * HEAP_SLACK):
        put(tier, one)
        tier.delete(one)
    assert len(tier.tier._known._heap) < 2 * HEAP_SLACK
    tier.evict_to(0)
    assert not any(tier.holds(r) for r in kept), "they can still be evicted"


# --- several tiers on one folder -----------------------------------------------------------


def test_tiers_learn_from_each_other(opened: Callable[..., Folder]) -> None:
    a, b = opened(), opened()
    records = chain(4)
    put(a, *records)
    assert a.scan() == []
    assert b.names() == {r.name for r in records}
    assert b.holds(records[3])
    tail = beside(records[3], Part.STATE)
    put(b, tail)
    (found,) = a.scan()
    assert isinstance(found, TierEntry)
    assert found.name == tail.name
    b.delete(tail)
    assert a.scan() == [Gone(tail.name)]
    assert a.scan() == []
    assert b.scan() == []


def test_a_read_needs_no_scan(opened: Callable[..., Folder]) -> None:
    a, b = opened(), opened()
    one = record()
    put(a, one)
    assert b.holds(one)


def test_nobody_writes_what_another_has_written(opened: Callable[..., Folder]) -> None:
    a, b = opened(), opened()
    records = chain(3)
    put(a, *records)
    put(b, *records)
    b.scan()
    assert "writes" not in b.usage().counts
    assert b.usage().n_files == {"pages": 3}


def test_what_a_user_deletes_by_hand_is_noticed(
    folder: Path, opened: Callable[..., Folder]
) -> None:
    tier = opened()
    first, second = of_size(100, 0), of_size(100, 1)
    put(tier, first, second)
    for path in folder.glob("??/*"):
        path.unlink()
    with pytest.raises(Missing):
        tier.read(first)
    assert set(tier.scan()) == {Gone(first.name), Gone(second.name)}
    put(tier, first)
    assert tier.holds(first)


def test_a_file_that_vanished_can_be_written_again_at_once(
    folder: Path, opened: Callable[..., Folder]
) -> None:
    tier = opened()
    one = record()
    put(tier, one)
    (folder / next(iter(files(folder)))).unlink()
    assert not tier.holds(one)
    put(tier, one)
    assert tier.holds(one)


def test_a_stuck_process_does_not_stop_this_one(folder: Path) -> None:
    tier = Folder(folder, MIB, lock_timeout_s=0.05)
    one = record()
    put(tier, one)
    with FolderLock(Disk(folder), timeout_s=1).hold():
        with pytest.raises(TierFault) as caught:
            put(tier, of_size(10, 1))
        assert caught.value.reason == "locked"
        assert tier.holds(one)
        assert Folder(folder, MIB, lock_timeout_s=0.05).scan()
    assert tier.usage().status.state == "paused"


# --- the write budget ----------------------------------------------------------------------


def test_the_write_budget_is_one_for_all_and_rolls(
    opened: Callable[..., Folder], wall: Clock
) -> None:
    a = opened(write_budget_nbytes=MIB)
    put(a, *[of_size(200_000, i) for i in range(3)])
    b = opened(write_budget_nbytes=MIB)
    put(b, *[of_size(200_000, 10 + i) for i in range(2)])
    list(a.scan())
    for tier in (a, b):  # what wears the disk, all writers of the last day together
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


# --- files that are not ours to read ------------------------------------------------------


def test_foreign_files_are_kept_counted_and_go_first(
    folder: Path, opened: Callable[..., Folder], wall: Clock
) -> None:
    put(opened(), of_size(300_000, 0))
    path = folder / next(iter(files(folder)))
    odd = path.parent / "left-by-an-old-version.safetensors"
    path.rename(odd)
    misplaced = path.parent / f"{'0' * 64}.pages.safetensors"
    misplaced.write_bytes(b"z" * 300_000)
    os.utime(odd, (wall.now + 10, wall.now + 10))
    tier = opened(2 * MIB)
    assert tier.scan() == []
    usage = tier.usage()
    assert usage.n_foreign == 2
    assert usage.nbytes > 600_000
    assert usage.n_quarantined == 0
    wall.step(-1000)
    put(tier, *[of_size(300_000, 10 + i) for i in range(6)])
    assert not misplaced.exists()
    assert not odd.exists()
    assert all(tier.holds(of_size(300_000, 10 + i)) for i in range(6))


def test_records_of_another_version_are_misses_kept_and_go_by_age(
    folder: Path,
    opened: Callable[..., Folder],
    wall: Clock,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A newer firn may be using them, on the same folder."""
    one = of_size(300_000, 0)
    put(opened(), one)
    path = folder / next(iter(files(folder)))
    path.write_bytes(path.read_bytes().replace(b'"firn":"2"', b'"firn":"7"', 1))
    os.utime(path, (wall.now, wall.now))
    tier = opened(2 * MIB)
    with caplog.at_level("INFO", "firn.cache"):
        assert tier.scan() == []
        assert tier.scan() == []
    assert caplog.text.count("1 records here are of another version") == 1
    assert tier.usage().n_foreign == 1
    assert tier.usage().n_quarantined == 0
    with pytest.raises(Missing):
        tier.read(one)
    wall.step()
    put(tier, *[of_size(300_000, 10 + i) for i in range(4)])
    assert path.exists()
    wall.step()
    put(tier, *[of_size(300_000, 20 + i) for i in range(6)])
    assert not path.exists()


def test_a_foreign_file_gives_way_to_the_record_of_its_name(
    folder: Path, opened: Callable[..., Folder]
) -> None:
    one = record()
    put(opened(), one)
    path = folder / next(iter(files(folder)))
    path.write_bytes(path.read_bytes().replace(b'"firn":"2"', b'"firn":"7"', 1))
    tier = opened()
    tier.scan()
    put(tier, one)
    assert tier.holds(one)
    assert tier.usage().n_foreign == 0
    assert len(files(folder)) == 1


def test_quarantine_is_bounded_in_number_and_bytes(
    folder: Path, opened: Callable[..., Folder]
) -> None:
    put(opened(), *[of_size(10, i) for i in range(QUARANTINE_FILES + 20)])
    for path in folder.glob("??/*"):
        path.write_bytes(path.read_bytes()[:-1])
    tier = opened()
    assert tier.scan() == []
    assert tier.usage().n_quarantined == QUARANTINE_FILES
    assert tier.usage().counts["quarantined"] == QUARANTINE_FILES + 20
    assert len(list((folder / "quarantine").iterdir())) == QUARANTINE_FILES
    put(tier, *[of_size(3 * MIB, 100 + i) for i in range(4)])
    for path in folder.glob("??/*"):
        path.write_bytes(path.read_bytes()[:-1])
    opened().scan()
    assert sum(p.stat().st_size for p in (folder / "quarantine").iterdir()) <= 64 * MIB // 16


def test_quarantine_makes_room_first(folder: Path, opened: Callable[..., Folder]) -> None:
    tier = opened(4 * MIB)
    put(tier, *[of_size(200_000, i) for i in range(10)])
    first = next(folder.glob("??/*"))
    first.write_bytes(first.read_bytes()[:-1])
    tier.scan()
    again = opened(4 * MIB)
    n_good = len(again.scan())
    assert n_good == 9
    assert again.usage().n_quarantined == 1
    before = again.usage().nbytes
    put(again, of_size(4 * MIB - before + 50_000, 99))
    assert again.usage().n_quarantined == 0
    assert "evictions" not in again.usage().counts


# --- for people ----------------------------------------------------------------------------


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


# --- the numbers behind the lock -----------------------------------------------------------


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


class Lockless(Disk):
    """A file system that refuses locks: some network ones do, for some files or for all."""

    def __init__(self, folder: Path, number: int) -> None:
        super().__init__(folder)
        self._number = number

    def try_lock(self, fd: int) -> bool:
        real, fcntl.flock = fcntl.flock, self._flock
        try:
            return super().try_lock(fd)
        finally:
            fcntl.flock = real

    def _flock(self, fd: int, flags: int) -> None:
        raise OSError(self._number, os.strerror(self._number))


@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS])
def test_a_file_system_without_locks_is_used_all_the_same(
    folder: Path, wall: Clock, caplog: pytest.LogCaptureFixture, number: int
) -> None:
    tier = Folder(folder, 2 * MIB, disk=Lockless(folder, number), wall=wall)
    (folder / "tmp").mkdir(parents=True)
    stale = folder / "tmp" / f"{'ab' * 32}.pages.1.0.500000.tmp"
    fresh = folder / "tmp" / f"{'ac' * 32}.pages.1.0.500000.tmp"
    for path, age_s in ((stale, 7200), (fresh, 10)):
        path.write_bytes(b"x")
        os.utime(path, (wall.now - age_s, wall.now - age_s))
    tier.scan()
    assert not stale.exists()
    assert fresh.exists(), "its writer may be at work"
    for i in range(12):
        wall.step()
        put(tier, of_size(300_000, i))
        assert du(folder) <= 2 * MIB
    assert tier.holds(of_size(300_000, 11))
    assert tier.usage().status.state == "ok"
    assert sum("cannot be locked" in r.message for r in caplog.records) == 1


def test_locks_for_writers_only(folder: Path, opened: Callable[..., Folder]) -> None:
    """Network file systems refuse an exclusive lock on what was opened for reading."""

    class WritersOnly(Disk):
        def try_lock(self, fd: int) -> bool:
            if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
                raise OSError(errno.EBADF, "not open for writing")
            return super().try_lock(fd)

    tier = opened(disk=WritersOnly(folder))
    put(tier, record())
    (folder / "tmp" / f"{'ab' * 32}.pages.1.0.500000.tmp").write_bytes(b"x")
    tier.scan()
    assert list((folder / "tmp").iterdir()) == []
    put(tier, of_size(100, 1))
    assert tier.usage().status.state == "ok"


def test_links_are_neither_followed_nor_counted(
    folder: Path, opened: Callable[..., Folder], tmp_path: Path
) -> None:
    one = of_size(300_000)
    put(Folder(tmp_path / "elsewhere"), one)
    (there,) = (tmp_path / "elsewhere").glob("??/*")
    (folder / there.parent.name).mkdir(parents=True)
    (folder / there.parent.name / there.name).symlink_to(there)
    tier = opened()
    assert tier.scan() == []
    assert tier.usage().nbytes < 100_000
    tier.evict_to(0)
    assert there.exists()
