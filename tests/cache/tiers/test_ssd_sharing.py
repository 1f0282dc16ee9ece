"""Several tiers on one folder: what they learn from each other, and their locks."""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from firn.cache.parts import Part
from firn.cache.storage.container import TierEntry
from firn.cache.storage.faults import Missing, TierFault
from firn.cache.tiers import Gone
from firn.cache.tiers._folder import (
    Disk,
    FolderLock,
)
from tests.cache.tiers.folders import Clock, Lockless, du, files, put
from tests.cache.tiers.records import Folder, beside, chain, of_size, record

MIB = 1 << 20


def test_tiers_learn_from_each_other(opened: Callable[..., Folder]) -> None:
    a, b = opened(), opened()
    records = chain(4)
    put(a, *records)
    assert a.scan() == []
    assert b.names() == {r.name for r in records}
    assert b.holds(records[3])
    tail = beside(records[3], Part.STATE)
    put(b, tail)
    (entry,) = a.scan()
    assert isinstance(entry, TierEntry)
    assert entry.name == tail.name
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


# --- locks ----------------------------------------------------------------------------------


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
    assert sum("file locking is not supported" in r.message for r in caplog.records) == 1


class Renumbered(Disk):
    """A file system that reports another inode number for a file each time."""

    def is_lock(self, fd: int) -> bool:
        return False


def test_a_lock_that_is_never_the_same_file_is_not_tried_for_ever(folder: Path) -> None:
    tier = Folder(folder, MIB, disk=Renumbered(folder), lock_timeout_s=0.05)
    with pytest.raises(TierFault, match="locked"):
        put(tier, record())
    assert tier.usage().status.state == "paused"


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
