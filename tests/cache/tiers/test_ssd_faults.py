"""Disk full, read-only, permission lost, folder gone: writing pauses, reports it, and resumes."""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from firn.cache.storage.container import TierEntry
from firn.cache.storage.faults import Refused, TierFault
from firn.cache.tiers import Buffer, Gone
from firn.cache.tiers._folder import Disk
from firn.cache.tiers._space import FULL
from firn.cli.cache.work import CacheFolder
from firn.core.errors import SetupError
from tests.cache.tiers.folders import Clock, du, put
from tests.cache.tiers.records import Folder, chain, of_size, record
from tests.faulty_tier import FaultyDisk

MIB = 1 << 20
NOBODY = 65534


def faulty(folder: Path, clock: Clock, limit_nbytes: int = 8 * MIB) -> tuple[Folder, FaultyDisk]:
    disk = FaultyDisk(folder)
    return Folder(folder, limit_nbytes, disk=disk, clock=clock), disk


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (errno.ENOSPC, "disk full"),
        (errno.EDQUOT, "disk full"),
        (errno.EIO, "I/O error"),
        (errno.EROFS, "read-only"),
        (errno.EACCES, "no permission"),
        (errno.EINVAL, "system error"),
    ],
)
@pytest.mark.parametrize("op", ["create", "write", "write_page", "rename", "set_mtime"])
def test_writing_pauses_and_recovers(tmp_path: Path, op: str, number: int, reason: str) -> None:
    clock = Clock(0.0)
    tier, disk = faulty(tmp_path, clock)
    kept, wanted = of_size(1000, 0), of_size(1000, 1)
    put(tier, kept)
    disk.errors[op] = number
    with pytest.raises(TierFault) as caught:
        put(tier, wanted)
    assert caught.value.reason == reason
    assert list((tmp_path / "tmp").iterdir()) == []
    status = tier.usage().status
    assert status.state == "paused"
    assert reason in status.reason
    assert status.since > 0
    assert tier.holds(kept) or number in FULL, "on a full disk it had to make room"
    n_tries = disk.calls[op]
    with pytest.raises(TierFault) as caught:
        put(tier, wanted)
    assert caught.value.reason == "paused"
    assert disk.calls[op] == n_tries, "it is too early for another try"
    disk.errors.clear()
    clock.step(1.0)
    put(tier, wanted)
    assert tier.usage().status.state == "ok"
    assert tier.holds(wanted)
    assert tier.usage().drops == {reason: 1, "paused": 1}


def test_retries_come_ever_later_but_never_stop(tmp_path: Path) -> None:
    clock = Clock(0.0)
    tier, disk = faulty(tmp_path, clock)
    disk.errors["create"] = errno.ENOSPC
    tried_at: list[float] = []
    since: set[float] = set()
    for _ in range(300):
        n = disk.calls["create"]
        with pytest.raises(TierFault):
            put(tier, record())
        since.add(tier.usage().status.since)
        if disk.calls["create"] > n:
            tried_at.append(clock.now)
        clock.step(1.0)
    gaps = [b - a for a, b in itertools.pairwise(tried_at)]
    assert gaps[:7] == [1, 2, 4, 8, 16, 32, 60]
    assert set(gaps[6:]) == {60}
    assert len(since) == 1, "the first failure is when it began"


def test_a_failed_eviction_is_a_fault_and_the_limit_holds(tmp_path: Path) -> None:
    clock = Clock(0.0)
    tier, disk = faulty(tmp_path, clock, 2 * MIB)
    put(tier, *[of_size(300_000, i) for i in range(6)])
    disk.errors["unlink"] = errno.EACCES
    with pytest.raises(TierFault):
        put(tier, *[of_size(300_000, 10 + i) for i in range(3)])
    assert du(tmp_path) <= 2 * MIB
    disk.errors.clear()
    clock.step(1.0)
    put(tier, *[of_size(300_000, 20 + i) for i in range(3)])
    assert du(tmp_path) <= 2 * MIB
    assert all(tier.holds(of_size(300_000, 20 + i)) for i in range(3))


def test_deletes_and_touches_do_not_hide_or_spread_faults(tmp_path: Path) -> None:
    tier, disk = faulty(tmp_path, Clock(0.0))
    one = record()
    put(tier, one)
    disk.errors["unlink"] = errno.EROFS
    with pytest.raises(TierFault):
        tier.delete(one)
    disk.errors["set_mtime"] = errno.EROFS
    tier.touch([one], at=9e9)
    assert tier.holds(one)


@pytest.mark.parametrize("op", ["make_folder", "open_lock"])
def test_a_folder_that_cannot_be_locked_is_still_read(tmp_path: Path, op: str) -> None:
    records = chain(3)
    put(Folder(tmp_path, MIB), *records)
    clock = Clock(0.0)
    tier, disk = faulty(tmp_path, clock)
    disk.errors[op] = errno.EROFS
    assert len([e for e in tier.scan() if isinstance(e, TierEntry)]) == 3
    assert all(tier.holds(r) for r in records)
    assert tier.usage().status.state == "paused"
    disk.errors.clear()
    clock.step(1.0)
    put(tier, of_size(10, 9))
    assert tier.usage().status.state == "ok"


class OpensOnce(Disk):
    """Opens each file only once; a scan reopens a record with metadata beyond its first read."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self.opened: set[str] = set()

    def open(self, path: str, flags: int = os.O_RDONLY) -> int:
        if path in self.opened:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        self.opened.add(path)
        return super().open(path, flags)


def test_a_record_that_a_scan_cannot_open_costs_that_record_only(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    long = of_size(10, tokens=range(20_000))
    older, newer = of_size(10, 1), of_size(10, 2)
    writer = Folder(tmp_path, wall=clock)
    for one in (older, long, newer):
        clock.step()
        writer.write(one)
    tier = Folder(tmp_path, disk=OpensOnce(tmp_path), wall=clock)
    assert tier.names() == {older.name, newer.name}
    assert tier.usage().counts["read_faults"] == 1
    (line,) = [r.message for r in caplog.records if r.name == "firn.cache"]
    assert str(long.name) in line


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    clock = Clock(0.0)
    tier = Folder(tmp_path / "file" / "cache", MIB, clock=clock)
    assert tier.scan() == []
    clock.step(1.0)
    with pytest.raises(TierFault):
        put(tier, record())
    assert not tier.holds(record())
    (tmp_path / "file").unlink()
    clock.step(60.0)
    put(tier, record())
    assert tier.holds(record())


def test_a_deleted_folder_is_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    tier, other = (Folder(folder, MIB) for _ in range(2))
    records = chain(3)
    put(tier, *records)
    other.scan()
    shutil.rmtree(folder)
    assert not any(tier.holds(r) for r in records)
    put(tier, *records)
    assert all(tier.holds(r) for r in records)
    shutil.rmtree(folder)
    put(other, *records)
    assert all(tier.holds(r) for r in records)
    assert tier.usage().status.state == other.usage().status.state == "ok"


def test_a_folder_deleted_half_way_through_a_write(tmp_path: Path) -> None:
    folder = tmp_path / "cache"

    class Deleting(FaultyDisk):
        n_times = 1

        def rename(self, path: str, to: str) -> None:
            if self.n_times:
                self.n_times -= 1
                shutil.rmtree(self.folder)
            super().rename(path, to)

    tier = Folder(folder, MIB, disk=Deleting(folder))
    put(tier, record())
    assert tier.holds(record())
    assert tier.usage().status.state == "ok"
    assert len(list((folder / "tmp").iterdir())) == 0


# --- real disks ----------------------------------------------------------------------------


@contextlib.contextmanager
def mounted(folder: Path, size: str) -> Iterator[None]:
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no small file system can be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True, capture_output=True)


def test_a_disk_that_is_really_full(tmp_path: Path) -> None:
    clock = Clock(0.0)
    with mounted(tmp_path / "small", "2m"):
        tier = Folder(tmp_path / "small" / "cache", 64 * MIB, clock=clock)
        records = chain(12, nbytes=300_000)
        with pytest.raises(Refused, match="full"):
            put(tier, *records)
        n_written = int(tier.usage().counts["writes"])
        assert n_written > 2
        assert all(tier.holds(r) for r in records[:n_written]), "a chain loses nothing to its end"
        later = [of_size(300_000, 70 + i) for i in range(3)]
        for i, one in enumerate(later):
            tier.write(one, used_at=tier.wall() + i)
        assert all(tier.holds(r) for r in later)
        assert tier.usage().status.state == "ok"
        tier.tier.close()


def test_a_disk_that_becomes_read_only(tmp_path: Path) -> None:
    clock = Clock(0.0)
    small = tmp_path / "small"
    with mounted(small, "4m"):
        folder = small / "cache"
        tier = Folder(folder, 2 * MIB, clock=clock)
        records = chain(3)
        put(tier, *records)
        tier.tier.close()
        remount = ["mount", "-o", "remount,ro", str(small)]
        if subprocess.run(remount, capture_output=True, check=False).returncode:
            pytest.skip("no file system can be made read-only here")
        with pytest.raises(TierFault) as caught:
            put(tier, of_size(10, 5))
        assert caught.value.reason == "read-only"
        assert all(tier.holds(r) for r in records)
        fresh = Folder(folder, 2 * MIB, clock=clock)
        assert len(fresh.scan()) == 3
        subprocess.run(["mount", "-o", "remount,rw", str(small)], check=True, capture_output=True)
        clock.step(1.0)
        put(tier, of_size(10, 5))
        assert tier.usage().status.state == "ok"
        tier.tier.close()


@contextlib.contextmanager
def as_nobody(folder: Path) -> Iterator[None]:
    """As an ordinary user: root is refused nothing."""
    if os.geteuid() != 0:
        yield
        return
    for path in [folder, *folder.rglob("*")]:
        os.chown(path, NOBODY, NOBODY)
    for path in folder.parents:
        if path.stat().st_uid == 0 and path.stat().st_mode & 0o005 != 0o005:
            if "pytest" not in str(path):
                pytest.skip("an ordinary user cannot get at the test's folder")
            path.chmod(0o755)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)


def test_permission_lost_and_given_back(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    clock = Clock(0.0)
    records = chain(3)
    put(Folder(folder, MIB), *records)
    with as_nobody(folder):
        tier = Folder(folder, MIB, clock=clock)
        assert len(tier.scan()) == 3
        (folder / "tmp").chmod(0o500)
        with pytest.raises(TierFault) as caught:
            put(tier, of_size(10, 5))
        assert caught.value.reason == "no permission"
        assert all(tier.holds(r) for r in records)
        (folder / "tmp").chmod(0o700)
        clock.step(1.0)
        put(tier, of_size(10, 5))
        assert tier.usage().status.state == "ok"
        folder.chmod(0)
        try:
            with pytest.raises(TierFault):
                tier.read(records[0])
            with pytest.raises(TierFault):
                tier.scan()
            with pytest.raises(SetupError):
                CacheFolder(folder, None).inventory()
        finally:
            folder.chmod(0o700)
        assert tier.holds(records[0])


def test_what_was_evicted_for_a_write_that_failed_is_told_by_the_scan(tmp_path: Path) -> None:
    clock = Clock(0.0)
    tier, disk = faulty(tmp_path, clock, 2 * MIB)
    old = [of_size(300_000, i) for i in range(6)]
    put(tier, *old)
    assert tier.scan() == []
    disk.errors["write"] = errno.ENOSPC
    with pytest.raises(TierFault):
        put(tier, of_size(600_000, 50))
    gone = {r.name for r in old if not tier.holds(r)}
    assert gone
    assert {c.name for c in tier.scan() if isinstance(c, Gone)} == gone
    assert tier.scan() == []


# --- a full disk ---------------------------------------------------------------------------


class SmallDisk(Disk):
    """A disk with little space, some of which other programs take."""

    def __init__(self, folder: Path, space_nbytes: int) -> None:
        super().__init__(folder)
        self.space_nbytes = space_nbytes

    def free_nbytes(self) -> int:
        return self.space_nbytes - du(self.folder)

    def write(self, fd: int, pieces: Sequence[Buffer]) -> None:
        if sum(map(len, pieces)) > self.free_nbytes():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write(fd, pieces)


def test_on_a_full_disk_new_records_take_the_place_of_the_oldest(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The limit is far away; when there is space again, the tier uses it."""
    clock, wall = Clock(0.0), Clock()
    disk = SmallDisk(tmp_path, 2 * MIB)
    tier = Folder(tmp_path, 64 * MIB, disk=disk, clock=clock, wall=wall)
    records = [of_size(200_000, i) for i in range(40)]
    for one in records[:20]:
        wall.step()
        tier.write(one)
    assert all(tier.holds(one) for one in records[15:20]), "the newest are kept"
    assert not any(tier.holds(one) for one in records[:10])
    assert tier.usage().status.state == "ok"
    assert tier.usage().limit_nbytes < 2 * MIB
    assert not tier.usage().drops
    told = [r.message for r in caplog.records if "is full" in r.message]
    assert len(told) == 1
    disk.space_nbytes = 128 * MIB
    for one in records[20:]:
        wall.step()
        clock.step(10.0)
        tier.write(one)
    clock.step(60.0)
    tier.scan()
    assert tier.usage().limit_nbytes == 64 * MIB
    n_held = sum(tier.holds(one) for one in records)
    assert n_held >= 20, "what came after the space is there beside the rest"


def test_another_program_that_takes_the_space_leaves_the_newest_records(tmp_path: Path) -> None:
    wall = Clock()
    disk = SmallDisk(tmp_path, 4 * MIB)
    tier = Folder(tmp_path, 64 * MIB, disk=disk, clock=Clock(0.0), wall=wall)
    for i in range(10):
        wall.step()
        tier.write(of_size(200_000, i))
    disk.space_nbytes = du(tmp_path)  # not a byte is left
    for i in range(10, 13):
        wall.step()
        tier.write(of_size(200_000, i))
    assert all(tier.holds(of_size(200_000, i)) for i in range(5, 13))
    assert not tier.holds(of_size(200_000, 0))


def test_an_old_record_does_not_push_a_newer_one_off_a_full_disk(tmp_path: Path) -> None:
    wall = Clock()
    disk = SmallDisk(tmp_path, MIB)
    tier = Folder(tmp_path, 64 * MIB, disk=disk, clock=Clock(0.0), wall=wall)
    kept = [of_size(200_000, i) for i in range(4)]
    put(tier, *kept)
    with pytest.raises(Refused):
        tier.write(of_size(200_000, 9), used_at=wall.now - 1000.0)
    assert all(tier.holds(one) for one in kept)
    assert tier.usage().status.state == "ok"


def test_a_clearing_is_noted_on_a_full_disk(tmp_path: Path) -> None:
    class NoInodes(Disk):
        """Only what is deleted makes room for a file."""

        n_free = 0

        def unlink(self, path: str) -> None:
            super().unlink(path)
            self.n_free += 1

        def bury(self, root: str, at: float) -> None:
            if not self.n_free:
                raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
            super().bury(root, at)

    tier = Folder(tmp_path, 64 * MIB, disk=NoInodes(tmp_path))
    put(tier, *chain(5))
    tier.tier.bury("ab" * 32, 5.0)
    assert tier.tier.buried() == {"ab" * 32: 5.0}
