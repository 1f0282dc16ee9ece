"""Damaged bytes are never returned: a miss, quarantined once, and written again."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from firn.cache.parts import Part
from firn.cache.storage.faults import Damaged, TierFault, Unusable
from firn.cache.tiers._folder import path_of
from tests.cache.tiers.folders import Clock
from tests.cache.tiers.folders import put as put_each
from tests.cache.tiers.records import Folder, Record, beside, chain, record
from tests.faulty_tier import FaultyDisk, put

MIB = 1 << 20
RECORDS = [*chain(3), beside(chain(1)[0], Part.STATE), beside(chain(2)[1], Part.WINDOW)]
Spoil = Callable[[bytes], bytes]


def flip(at: float, mask: int) -> Spoil:
    def spoil(raw: bytes) -> bytes:
        i = min(int(at * len(raw)), len(raw) - 1)
        return raw[:i] + bytes([raw[i] ^ mask]) + raw[i + 1 :]

    return spoil


def truncate(at: float) -> Spoil:
    return lambda raw: raw[: int(at * len(raw))]


def zero(at: float, length: int) -> Spoil:
    def spoil(raw: bytes) -> bytes:
        i = min(int(at * len(raw)), len(raw) - 1)
        piece = raw[i : i + length]
        return raw[:i] + bytes(len(piece)) + raw[i + length :]

    return spoil


def move(at: float, to: float, length: int) -> Spoil:
    """A block of the disk ends up in another place of the file."""

    def spoil(raw: bytes) -> bytes:
        i, j = int(at * len(raw)), int(to * len(raw))
        piece = raw[i : i + length]
        return (raw[:j] + piece + raw[j + len(piece) :])[: len(raw)]

    return spoil


fractions = st.floats(0, 0.9999)
spoils = st.one_of(
    st.builds(flip, fractions, st.integers(1, 255)),
    st.builds(truncate, fractions),
    st.builds(zero, fractions, st.integers(1, 600)),
    st.builds(move, fractions, fractions, st.integers(1, 600)),
    st.builds(lambda tail: lambda raw: raw + tail, st.binary(min_size=1, max_size=9)),
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("damage")


def filled(folder: Path) -> Folder:
    tier = Folder(folder, 16 * MIB)
    tier.scan()
    for one in RECORDS:
        tier.write(one)
    return tier


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(which=st.sampled_from(RECORDS), spoil=spoils, restart=st.booleans())
def test_any_damage_to_any_record_is_a_miss_and_quarantined_once(
    base: Path, which: Record, spoil: Spoil, restart: bool
) -> None:
    tier = filled(base)
    path = base / path_of(str(which.name))
    raw = path.read_bytes()
    spoilt = spoil(raw)
    if spoilt == raw:
        return
    put(path, spoilt)
    n_before = tier.usage().counts.get("quarantined", 0)
    if restart:
        tier, n_before = Folder(base, 16 * MIB), 0
        tier.scan()
    for _ in range(3):
        assert not tier.holds(which)
    for one in RECORDS:
        assert one is which or tier.holds(one)
    if not path.exists():  # if its version has changed it is foreign, and kept
        assert tier.usage().counts["quarantined"] == n_before + 1
    else:
        assert b'"firn":"2"' not in spoilt
    tier.write(which)
    assert tier.holds(which)


@pytest.mark.parametrize("restart", [False, True])
def test_exchanged_files_are_damaged_although_their_checksums_are_right(
    tmp_path: Path, restart: bool
) -> None:
    tier = filled(tmp_path)
    a, b = RECORDS[0], RECORDS[1]
    raw_a = (tmp_path / path_of(str(a.name))).read_bytes()
    raw_b = (tmp_path / path_of(str(b.name))).read_bytes()
    put(tmp_path / path_of(str(a.name)), raw_b)
    put(tmp_path / path_of(str(b.name)), raw_a)
    if restart:
        tier = Folder(tmp_path, 16 * MIB)
        assert tier.names() == {r.name for r in RECORDS[2:]}
    else:
        for one in (a, b):
            with pytest.raises(Damaged):
                tier.read(one)
    assert tier.usage().counts["quarantined"] == 2
    assert all(tier.holds(r) for r in RECORDS[2:])


def test_another_part_of_the_same_block_is_another_record(tmp_path: Path) -> None:
    tier = filled(tmp_path)
    pages, state = RECORDS[0], RECORDS[3]
    put(tmp_path / path_of(str(pages.name)), (tmp_path / path_of(str(state.name))).read_bytes())
    with pytest.raises(Damaged):
        tier.read(pages)


@pytest.mark.parametrize("op", ["read", "open", "stat_open"])
def test_a_moment_in_which_the_disk_cannot_read_costs_misses_and_no_record(
    tmp_path: Path, op: str
) -> None:
    """The bytes are as they were: they are found again after a pause."""
    disk, clock = FaultyDisk(tmp_path), Clock()
    tier = Folder(tmp_path, 16 * MIB, disk=disk, clock=clock)
    many = chain(40)
    put_each(tier, *many)
    tier.scan()
    disk.errors[op] = errno.EIO
    for one in many:
        with pytest.raises(TierFault, match="I/O error"):
            tier.read(one)
    disk.errors.clear()
    assert tier.names() == set(), "not at once"
    clock.step(10)
    assert tier.names() == {one.name for one in many}
    assert all(tier.holds(one) for one in many)
    counts = tier.usage().counts
    assert counts["read_faults"] == len(many)
    assert not counts.get("damaged")
    assert not counts.get("quarantined")
    clock.step(10)
    assert tier.names() == set(), "reported once"


def test_a_file_that_can_never_be_read_is_tried_less_and_less_and_kept(tmp_path: Path) -> None:
    disk, clock = FaultyDisk(tmp_path), Clock()
    tier = Folder(tmp_path, 16 * MIB, disk=disk, clock=clock)
    one = record()
    tier.write(one)
    disk.errors["read"] = errno.EIO
    with pytest.raises(TierFault):
        tier.read(one)
    n_reads = disk.calls["read"]
    for _ in range(2 * 3600 // 10):
        clock.step(10)
        assert tier.names() == set()
    assert disk.calls["read"] - n_reads <= 12, "in two hours"
    assert (tmp_path / path_of(str(one.name))).exists()
    disk.errors.clear()
    assert tier.write(one).new, "what is computed again takes its place"
    assert tier.holds(one)


def test_a_first_scan_that_cannot_read_sets_nothing_aside(tmp_path: Path) -> None:
    many = chain(40)
    put_each(Folder(tmp_path, 16 * MIB), *many)
    disk, clock = FaultyDisk(tmp_path), Clock()
    disk.errors["read"] = errno.EIO
    tier = Folder(tmp_path, 16 * MIB, disk=disk, clock=clock)
    assert tier.names() == set()
    disk.errors.clear()
    clock.step(10)
    assert tier.names() == {one.name for one in many}
    assert not tier.usage().counts.get("quarantined")


def test_a_bad_file_that_cannot_be_moved_is_not_read_again(tmp_path: Path) -> None:
    disk = FaultyDisk(tmp_path)
    tier = Folder(tmp_path, 16 * MIB, disk=disk)
    one = record()
    tier.write(one)
    path = tmp_path / path_of(str(one.name))
    put(path, path.read_bytes()[:-1])
    disk.errors["rename"] = 30
    with pytest.raises(Damaged):
        tier.read(one)
    n_opened = disk.calls["open"]
    with pytest.raises(Unusable):  # it is there: nobody has evicted it
        tier.read(one)
    assert disk.calls["open"] == n_opened
    assert path.exists()
    disk.errors.clear()
    assert tier.write(one).new, "a good one takes its place"
    assert tier.holds(one)


def test_a_damaged_parent_costs_its_children_nothing_but_reach(tmp_path: Path) -> None:
    tier = filled(tmp_path)
    first = RECORDS[0]
    path = tmp_path / path_of(str(first.name))
    put(path, b"")
    assert not tier.holds(first)
    assert tier.holds(RECORDS[2])
    tier.write(first)
    assert all(tier.holds(r) for r in RECORDS)
