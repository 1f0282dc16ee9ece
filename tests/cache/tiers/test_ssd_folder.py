"""The SSD tier's folder: names, modes, strangers' files, and files that cannot be read."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from firn.cache.storage.faults import Missing
from firn.cache.tiers import _folder
from firn.cache.tiers._folder import QUARANTINE_FILES
from tests.cache.tiers.folders import Clock, files, put
from tests.cache.tiers.records import Folder, of_size, record

MIB = 1 << 20


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


def test_folders_above_a_new_one_are_private_too(tmp_path: Path) -> None:
    put(Folder(tmp_path / "made" / "below", MIB), record())
    assert stat.S_IMODE((tmp_path / "made").stat().st_mode) == 0o700


def test_strangers_files_are_neither_counted_nor_touched(
    folder: Path, opened: Callable[..., Folder]
) -> None:
    """Someone may point us at a folder with two-digit subfolders of its own: git's objects, say."""
    for i in range(256):
        (folder / f"{i:02x}").mkdir(parents=True)
        (folder / f"{i:02x}" / "0123456789").write_bytes(b"x" * 20_000)
    (folder / "notes.txt").write_bytes(b"y" * 100_000)
    for name in ("tmp", "quarantine"):  # of somebody's project
        (folder / name).mkdir()
        (folder / name / "draft.txt").write_bytes(b"z" * MIB)
    tier = opened(3 * MIB)
    put(tier, *[of_size(200_000, i) for i in range(30)])
    tier.scan()
    assert tier.usage().n_foreign == 0
    assert tier.usage().counts["evictions"] > 10
    tier.evict_to(0)
    assert len([p for p in folder.glob("??/*") if p.name == "0123456789"]) == 256
    assert (folder / "notes.txt").exists()
    assert [(folder / name / "draft.txt").exists() for name in ("tmp", "quarantine")] == [
        True,
        True,
    ]


# --- files that are not ours to read --------------------------------------------------------


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
    assert caplog.text.count("1 records here are from another version") == 1
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


def test_what_a_mac_writes_does_not_fill_its_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[int, int]] = []
    real = _folder.fcntl.fcntl

    def fcntl(fd: int, command: int, argument: int = 0) -> int:
        if command != 48:
            return int(real(fd, command, argument))
        calls.append((os.fstat(fd).st_size, argument))
        raise OSError(errno.ENOTSUP, "not on this file system")

    monkeypatch.setattr(_folder, "NO_CACHE", 48)  # F_NOCACHE
    monkeypatch.setattr(_folder.fcntl, "fcntl", fcntl)
    folder = Folder(tmp_path / "records", MIB)
    new = record()
    put(folder, new)
    assert calls == [(0, 1)], "before its bytes are written"
    assert len(files(tmp_path / "records")) == 1
