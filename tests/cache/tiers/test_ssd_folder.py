"""The SSD tier's folder: names, modes, limits, last use, strangers, and several tiers on one."""

from __future__ import annotations

import json
import os
import shutil
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from firn.cache.faults import Missing, Refused, TierFault
from firn.cache.parts import Part
from firn.cache.tiers import Entry, Gone
from firn.cache.tiers._disk import Disk
from firn.cache.tiers._mirror import QUARANTINE_FILES
from firn.cache.tiers._shared import FolderLock
from firn.cache.tiers.ssd import (
    DEFAULT_LIMIT_NBYTES,
    ModelNote,
    SsdSettings,
    SsdTier,
    default_limit,
    suggested_limit,
)
from tests.cache.tiers.records import FINGERPRINT, Record, beside, chain, holds, of_size, record

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
def opened(folder: Path, wall: Clock) -> Callable[..., SsdTier]:
    def open_tier(limit_nbytes: int = 64 * MIB, **more: object) -> SsdTier:
        settings = replace(SsdSettings(folder, limit_nbytes), **more)  # type: ignore[arg-type]
        return SsdTier(settings, wall=wall)

    return open_tier


def put(tier: SsdTier, *records: Record) -> None:
    for one in records:
        tier.write(one.header, one.buffers)


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
    folder: Path, opened: Callable[..., SsdTier]
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
        put(SsdTier(SsdSettings(path, MIB)), record())
    assert stat.S_IMODE(ours.stat().st_mode) == 0o700
    assert stat.S_IMODE(theirs.stat().st_mode) == 0o755
    assert stat.S_IMODE((theirs / "tmp").stat().st_mode) == 0o700


def test_strangers_files_are_neither_counted_nor_touched(
    folder: Path, opened: Callable[..., SsdTier]
) -> None:
    """Someone may point us at a folder with two-digit subfolders of its own: git's objects, say."""
    for i in range(256):
        (folder / f"{i:02x}").mkdir(parents=True)
        (folder / f"{i:02x}" / "0123456789").write_bytes(b"x" * 20_000)
    (folder / "notes.txt").write_bytes(b"y" * 100_000)
    tier = opened(3 * MIB)
    put(tier, *[of_size(200_000, i) for i in range(30)])
    list(tier.scan())
    assert tier.usage().n_foreign == 0
    assert tier.usage().counts["evictions"] > 10
    tier.evict_to(0)
    assert len([p for p in folder.glob("??/*") if p.name == "0123456789"]) == 256
    assert (folder / "notes.txt").exists()


# --- one limit -----------------------------------------------------------------------------


def test_the_tier_counts_what_du_counts(folder: Path, opened: Callable[..., SsdTier]) -> None:
    tier = opened(8 * MIB)
    for i in range(60):
        put(tier, of_size(1000 + 7919 * i, i))
        assert du(folder) <= tier.usage().nbytes <= 8 * MIB
    assert tier.usage().nbytes - du(folder) < 64 * 1024
    fresh = opened(8 * MIB)
    list(fresh.scan())
    assert abs(fresh.usage().nbytes - tier.usage().nbytes) < 64 * 1024


def test_empty_subfolders_do_not_pile_up(folder: Path, opened: Callable[..., SsdTier]) -> None:
    tier = opened()
    records = [of_size(100, i) for i in range(50)]
    put(tier, *records)
    for one in records:
        tier.delete(one.name)
    assert list(folder.glob("??")) == []


def test_a_lower_limit_is_kept_from_the_scan_on(
    folder: Path, opened: Callable[..., SsdTier]
) -> None:
    put(opened(32 * MIB), *[of_size(400_000, i) for i in range(40)])
    small = opened(4 * MIB)
    found = [e for e in small.scan() if isinstance(e, Entry)]
    assert du(folder) <= 4 * MIB
    assert 5 < len(found) < 11
    assert all(small.read(e.name) for e in found)


def test_the_last_to_open_the_folder_sets_the_limit_for_all(
    folder: Path, opened: Callable[..., SsdTier]
) -> None:
    large = opened(32 * MIB)
    put(large, *[of_size(400_000, i) for i in range(8)])
    small = opened(2 * MIB)
    list(small.scan())
    put(large, *[of_size(400_000, 50 + i) for i in range(8)])
    assert du(folder) <= 2 * MIB
    guest = opened(99 * MIB, guest=True)
    put(guest, *[of_size(400_000, 80 + i) for i in range(8)])
    assert du(folder) <= 2 * MIB
    again = opened(32 * MIB)
    list(again.scan())
    put(again, *[of_size(400_000, 90 + i) for i in range(8)])
    assert du(folder) > 3 * MIB


def test_the_default_limit() -> None:
    assert default_limit(100 * GIB) == DEFAULT_LIMIT_NBYTES == 10 * GIB
    assert default_limit(40 * GIB) == 10 * GIB
    assert default_limit(39 * GIB) == 39 * GIB // 4
    assert default_limit(0) == 0
    # What the cache uses already does not shrink its limit at the next start.
    assert default_limit(31 * GIB, 9 * GIB) == 10 * GIB


def test_a_limit_for_a_folder_that_is_not_there(
    folder: Path, opened: Callable[..., SsdTier]
) -> None:
    assert 0 < suggested_limit(folder) <= DEFAULT_LIMIT_NBYTES
    put(opened(), record())
    assert 0 < suggested_limit(folder) <= DEFAULT_LIMIT_NBYTES


# --- last use ------------------------------------------------------------------------------


def test_last_use_survives_a_restart(opened: Callable[..., SsdTier], wall: Clock) -> None:
    tier = opened(3 * MIB)
    old, used, new = (of_size(500_000, i) for i in range(3))
    for one in (old, used, new):
        put(tier, one)
        wall.step(100)
    tier.touch([used.name])
    wall.step(100)
    fresh = opened(3 * MIB)
    entries = {e.name: e for e in fresh.scan() if isinstance(e, Entry)}
    assert entries[used.name].last_use > entries[new.name].last_use > entries[old.name].last_use
    put(fresh, *[of_size(500_000, 10 + i) for i in range(5)])
    assert holds(fresh, used)
    assert not holds(fresh, old)
    assert not holds(fresh, new)


def test_a_use_elsewhere_counts(opened: Callable[..., SsdTier], wall: Clock) -> None:
    """This tier has not heard of the use; it looks before it evicts."""
    tier, other = opened(3 * MIB), opened(3 * MIB)
    first, second = of_size(500_000, 0), of_size(500_000, 1)
    put(tier, first)
    wall.step()
    put(tier, second)
    list(other.scan())
    wall.step(1000)
    other.touch([first.name])
    wall.step()
    put(tier, *[of_size(500_000, 10 + i) for i in range(5)])
    assert holds(tier, first)
    assert not holds(tier, second)


def test_touching_is_throttled(opened: Callable[..., SsdTier], wall: Clock) -> None:
    tier = opened()
    one = record()
    put(tier, one)
    for _ in range(100):
        wall.step(1.0)
        tier.touch([one.name])
    assert tier.usage().counts["touches"] == 1
    wall.step(100)
    tier.touch([one.name])
    assert tier.usage().counts["touches"] == 2


def test_dates_in_the_future_do_not_live_for_ever(
    folder: Path, opened: Callable[..., SsdTier], wall: Clock
) -> None:
    tier = opened(3 * MIB)
    odd = of_size(500_000, 0)
    put(tier, odd)
    path = folder / next(iter(files(folder)))
    os.utime(path, (wall.now + 1e8, wall.now + 1e8))
    fresh = opened(3 * MIB)
    list(fresh.scan())
    for i in range(10):
        wall.step()
        put(fresh, of_size(500_000, 10 + i))
    assert not holds(fresh, odd)


# --- several tiers on one folder -----------------------------------------------------------


def test_tiers_learn_from_each_other(opened: Callable[..., SsdTier]) -> None:
    a, b = opened(), opened()
    records = chain(4)
    put(a, *records)
    assert list(a.scan()) == []
    assert {e.name for e in b.scan() if isinstance(e, Entry)} == {r.name for r in records}
    assert holds(b, records[3])
    tail = beside(records[3], Part.STATE)
    put(b, tail)
    (found,) = a.scan()
    assert isinstance(found, Entry)
    assert found.name == tail.name
    b.delete(tail.name)
    assert list(a.scan()) == [Gone(tail.name)]
    assert list(a.scan()) == []
    assert list(b.scan()) == []


def test_a_read_needs_no_scan(opened: Callable[..., SsdTier]) -> None:
    a, b = opened(), opened()
    one = record()
    put(a, one)
    assert holds(b, one)


def test_nobody_writes_what_another_has_written(opened: Callable[..., SsdTier]) -> None:
    a, b = opened(), opened()
    records = chain(3)
    put(a, *records)
    put(b, *records)
    assert "writes" not in b.usage().counts
    assert b.usage().n_files[Part.PAGES] == 3


def test_a_parent_that_another_evicted_is_missed_before_the_write(
    opened: Callable[..., SsdTier],
) -> None:
    a, b = opened(), opened()
    first, second = chain(2)
    put(a, first)
    list(b.scan())
    a.delete(first.name)
    with pytest.raises(Refused):
        put(b, second)


def test_what_a_user_deletes_by_hand_is_noticed(
    folder: Path, opened: Callable[..., SsdTier]
) -> None:
    tier = opened()
    first, second = of_size(100, 0), of_size(100, 1)
    put(tier, first, second)
    for path in folder.glob("??/*"):
        path.unlink()
    with pytest.raises(Missing):
        tier.read(first.name)
    assert set(tier.scan()) == {Gone(first.name), Gone(second.name)}
    put(tier, first)
    assert holds(tier, first)


def test_a_file_that_vanished_can_be_written_again_at_once(
    folder: Path, opened: Callable[..., SsdTier]
) -> None:
    tier = opened()
    one = record()
    put(tier, one)
    (folder / next(iter(files(folder)))).unlink()
    assert not holds(tier, one)
    put(tier, one)
    assert holds(tier, one)


def test_a_stuck_process_does_not_stop_this_one(folder: Path) -> None:
    tier = SsdTier(SsdSettings(folder, MIB, lock_timeout_s=0.05))
    one = record()
    put(tier, one)
    with FolderLock(Disk(folder), timeout_s=1).hold():
        with pytest.raises(TierFault) as caught:
            put(tier, of_size(10, 1))
        assert caught.value.reason == "locked"
        assert holds(tier, one)
        assert list(SsdTier(SsdSettings(folder, MIB, lock_timeout_s=0.05)).scan())
    assert tier.usage().status.state == "paused"


# --- the write budget ----------------------------------------------------------------------


def test_the_write_budget_is_one_for_all_and_rolls(
    opened: Callable[..., SsdTier], wall: Clock
) -> None:
    a = opened(write_budget_nbytes=MIB)
    put(a, *[of_size(200_000, i) for i in range(3)])
    b = opened(write_budget_nbytes=MIB)
    put(b, *[of_size(200_000, 10 + i) for i in range(2)])
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
    put(a, of_size(200_000, 30))


# --- files that are not ours to read ------------------------------------------------------


def test_foreign_files_are_kept_counted_and_go_first(
    folder: Path, opened: Callable[..., SsdTier], wall: Clock
) -> None:
    one = of_size(300_000, 0)
    put(opened(), one)
    path = folder / next(iter(files(folder)))
    newer = path.read_bytes().replace(b'"firn":"1"', b'"firn":"7"', 1)
    path.write_bytes(newer)
    odd = path.parent / "left-by-an-old-version.safetensors"
    odd.write_bytes(b"z" * 300_000)
    os.utime(odd, (wall.now + 10, wall.now + 10))
    os.utime(path, (wall.now + 10, wall.now + 10))
    tier = opened(2 * MIB)
    assert list(tier.scan()) == []
    usage = tier.usage()
    assert usage.n_foreign == 2
    assert usage.nbytes > 600_000
    assert usage.n_quarantined == 0
    with pytest.raises(Missing):
        tier.read(one.name)
    assert path.exists()
    wall.step(100)
    put(tier, *[of_size(300_000, 10 + i) for i in range(6)])
    assert not path.exists()
    assert not odd.exists()
    assert all(holds(tier, of_size(300_000, 10 + i)) for i in range(6))


def test_a_foreign_file_gives_way_to_the_record_of_its_name(
    folder: Path, opened: Callable[..., SsdTier]
) -> None:
    one = record()
    put(opened(), one)
    path = folder / next(iter(files(folder)))
    path.write_bytes(path.read_bytes().replace(b'"firn":"1"', b'"firn":"7"', 1))
    tier = opened()
    list(tier.scan())
    put(tier, one)
    assert holds(tier, one)
    assert tier.usage().n_foreign == 0
    assert len(files(folder)) == 1


def test_orphans_are_counted_kept_and_healed(folder: Path, opened: Callable[..., SsdTier]) -> None:
    records = chain(4)
    put(opened(), *records)
    hexes = [r.header.key.hex() for r in records]
    (folder / hexes[1][:2] / f"{hexes[1]}.pages.safetensors").unlink()
    tier = opened()
    assert len([e for e in tier.scan() if isinstance(e, Entry)]) == 3
    assert tier.usage().n_orphans == 1
    put(tier, records[1])
    assert tier.usage().n_orphans == 0
    assert all(holds(tier, r) for r in records)


def test_orphans_go_first(folder: Path, opened: Callable[..., SsdTier], wall: Clock) -> None:
    kept = of_size(300_000, 50)
    records = chain(3, nbytes=300_000)
    tier = opened(3 * MIB)
    put(tier, kept)
    wall.step(10)
    put(tier, *records)
    tier.delete(records[0].name)
    assert tier.usage().n_orphans == 1
    wall.step(10)
    put(tier, *[of_size(300_000, 60 + i) for i in range(9)])
    assert holds(tier, kept)
    assert not holds(tier, records[1])
    assert not holds(tier, records[2])
    assert tier.usage().n_orphans == 0


def test_quarantine_is_bounded_in_number_and_bytes(
    folder: Path, opened: Callable[..., SsdTier]
) -> None:
    put(opened(), *[of_size(10, i) for i in range(QUARANTINE_FILES + 20)])
    for path in folder.glob("??/*"):
        path.write_bytes(path.read_bytes()[:-1])
    tier = opened()
    assert list(tier.scan()) == []
    assert tier.usage().n_quarantined == QUARANTINE_FILES
    assert tier.usage().counts["quarantined"] == QUARANTINE_FILES + 20
    assert len(list((folder / "quarantine").iterdir())) == QUARANTINE_FILES
    put(tier, *[of_size(3 * MIB, 100 + i) for i in range(4)])
    for path in folder.glob("??/*"):
        path.write_bytes(path.read_bytes()[:-1])
    list(opened().scan())
    assert sum(p.stat().st_size for p in (folder / "quarantine").iterdir()) <= 64 * MIB // 16


def test_quarantine_makes_room_first(folder: Path, opened: Callable[..., SsdTier]) -> None:
    tier = opened(4 * MIB)
    put(tier, *[of_size(200_000, i) for i in range(10)])
    first = next(folder.glob("??/*"))
    first.write_bytes(first.read_bytes()[:-1])
    list(tier.scan())
    again = opened(4 * MIB)
    n_good = len(list(again.scan()))
    assert n_good == 9
    assert again.usage().n_quarantined == 1
    before = again.usage().nbytes
    put(again, of_size(4 * MIB - before + 50_000, 99))
    assert again.usage().n_quarantined == 0
    assert "evictions" not in again.usage().counts


# --- for people ----------------------------------------------------------------------------


def test_a_model_is_noted_for_people(folder: Path, opened: Callable[..., SsdTier]) -> None:
    tier = opened(model=ModelNote(FINGERPRINT, "tiny", "/models/tiny"))
    list(tier.scan())
    note = json.loads((folder / "models" / f"{FINGERPRINT.hex()}.json").read_text())
    assert note == {"name": "tiny", "path": "/models/tiny"}


def test_evicting_on_demand(folder: Path, opened: Callable[..., SsdTier]) -> None:
    tier = opened()
    put(tier, *chain(20, nbytes=100_000))
    before = du(folder)
    freed = tier.evict_to(MIB)
    assert du(folder) <= MIB
    assert freed == pytest.approx(before - du(folder), abs=20_000)
    assert tier.usage().n_orphans == 0
    shutil.rmtree(folder)
    assert tier.evict_to(0) >= 0


def test_the_limit_is_known_again_after_the_folder_was_deleted(
    folder: Path, opened: Callable[..., SsdTier]
) -> None:
    tier = opened(2 * MIB)
    put(tier, record())
    shutil.rmtree(folder)
    put(tier, record())
    guest = opened(99 * MIB, guest=True)
    put(guest, *[of_size(400_000, i) for i in range(8)])
    assert du(folder) <= 2 * MIB
    assert guest.usage().limit_nbytes == 2 * MIB
