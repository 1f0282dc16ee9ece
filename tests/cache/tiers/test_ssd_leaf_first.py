"""Eviction by age removes a chain from its end, whoever evicts, and however coarse file times are.

Several tiers on one folder stand for several processes: they share nothing else. Each is used as
by a tree, which knows the stamps that it set and those that its scans reported.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from firn.cache.parts import Part
from firn.cache.storage.container import Name, TierEntry
from firn.cache.storage.faults import TierFull
from firn.cache.tiers._folder import Disk
from tests.cache.tiers.folders import Clock
from tests.cache.tiers.records import Folder, Record, beside, chain, of_size, record

STEP_S = 2.0
"""Between the stamps of a record and of what depends on it; as coarse as FAT's times."""
TRUNK = chain(4, nbytes=20_000)
BRANCH = [record(range(900, 908), parent=TRUNK[1], layers=(TRUNK[0].header.tensors,))]
RECORDS = [*TRUNK, *BRANCH, *chain(3, first=5000, nbytes=30_000)]
RECORDS += [beside(one, part) for one in RECORDS[1::2] for part in (Part.STATE, Part.WINDOW)]
BY_NAME = {r.name: r for r in RECORDS}
LIMIT = 230_000
sides = st.integers(0, 2)


def needed_by(one: Record) -> Record | None:
    """What must outlive it: its block's pages, or the pages of the block before."""
    key = one.header.key if one.header.part is not Part.PAGES else one.header.parent
    return BY_NAME.get(Name(key, Part.PAGES))


def path_of(one: Record) -> list[Record]:
    """From its chain's first record to this one."""
    above = needed_by(one)
    return [one] if above is None else [*path_of(above), one]


class Coarse(Disk):
    """Times in steps of two seconds, rounded down."""

    def set_mtime(self, path: str, at: float) -> None:
        super().set_mtime(path, at // STEP_S * STEP_S)


class Server:
    """One process: what it takes to be stored, and with which stamp."""

    def __init__(self, folder: Path, wall: Clock, *, is_coarse: bool) -> None:
        disk = Coarse(folder) if is_coarse else Disk(folder)
        self.folder = Folder(folder, LIMIT, wall=wall, disk=disk)
        self.wall = wall
        self.stamps: dict[Name, float] = {}

    def scan(self) -> None:
        for change in self.folder.scan():
            if isinstance(change, TierEntry):
                self.stamps[change.name] = change.used_at
            else:
                self.stamps.pop(change.name, None)

    def use(self, one: Record) -> None:
        """Touch what is stored of a path, and write the rest."""
        stored = [r for r in path_of(one) if r.name in self.stamps]
        for depth, each in enumerate(stored):
            stamp = self.wall() - STEP_S * depth
            self.stamps[each.name] = max(self.stamps[each.name], stamp)
        self.folder.tier.touch({str(r.name): self.stamps[r.name] for r in stored})
        for depth, each in enumerate(path_of(one)):
            if depth >= len(stored) and not self.write(each, self.wall() - STEP_S * depth):
                return

    def write(self, one: Record, stamp: float) -> bool:
        above = needed_by(one)
        if above is not None:
            stamp = min(stamp, self.stamps[above.name] - STEP_S)
        try:
            stored = self.folder.write(one, used_at=stamp)
        except TierFull:
            return False
        self.stamps[one.name] = stamp
        for name in stored.evicted:
            self.stamps.pop(name, None)
        return True


class LeafFirst(RuleBasedStateMachine):
    is_coarse = True

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="firn-leaves-"))
        self.wall = Clock()
        self.servers = [Server(self.root, self.wall, is_coarse=self.is_coarse) for _ in range(3)]

    def teardown(self) -> None:
        shutil.rmtree(self.root)

    @rule(side=sides, which=st.integers(0, len(RECORDS) - 1), later=st.floats(0, 20))
    def use(self, side: int, which: int, later: float) -> None:
        self.wall.step(later)
        self.servers[side].scan()
        self.servers[side].use(RECORDS[which])

    @rule(side=sides, n=st.integers(0, 5), nbytes=st.integers(1, 60_000))
    def crowd_out(self, side: int, n: int, nbytes: int) -> None:
        """Another prompt's record; no scan before it."""
        self.wall.step(0.1)
        self.servers[side].write(of_size(nbytes, 1000 + n), self.wall())

    @rule(side=sides, share=st.floats(0, 1))
    def shrink(self, side: int, share: float) -> None:
        self.servers[side].folder.evict_to(int(LIMIT * share))

    @rule(side=sides)
    def restart(self, side: int) -> None:
        self.servers[side] = Server(self.root, self.wall, is_coarse=self.is_coarse)

    @invariant()
    def nothing_has_lost_what_it_needs(self) -> None:
        there = {p.name.removesuffix(".safetensors") for p in self.root.glob("??/*")}
        for one in RECORDS:
            above = needed_by(one)
            if str(one.name) in there and above is not None:
                assert str(above.name) in there


class FineLeafFirst(LeafFirst):
    is_coarse = False


TestCoarseTimes = LeafFirst.TestCase
TestCoarseTimes.settings = settings(max_examples=40, stateful_step_count=25, deadline=None)
TestFineTimes = FineLeafFirst.TestCase
TestFineTimes.settings = settings(max_examples=20, stateful_step_count=25, deadline=None)
