"""The folder against a plain set of names: whatever two tiers do, it holds just those records."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from firn.cache.parts import Part
from firn.cache.storage.container import Name, TierEntry
from firn.cache.storage.faults import TierFull
from firn.cache.tiers import Gone
from tests.cache.tiers.folders import Clock, du
from tests.cache.tiers.records import Folder, Record, beside, chain

LIMIT = 300_000
TREES = [chain(4, first=1000 * i, nbytes=12_000 * (i + 1)) for i in range(3)]
RECORDS = [r for tree in TREES for r in tree]
RECORDS += [beside(tree[i], part) for tree in TREES for i in (1, 3) for part in list(Part)[1:]]
BY_NAME = {r.name: r for r in RECORDS}

records = st.sampled_from(RECORDS)
sides = st.integers(0, 1)


class FolderMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="firn-model-"))
        self.wall = Clock()
        self.tiers = [self.fresh(), self.fresh()]
        self.stored: set[Name] = set()
        self.heard: list[set[Name]] = [set(), set()]

    def fresh(self) -> Folder:
        return Folder(self.folder, LIMIT, wall=self.wall)

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    @initialize()
    def begin(self) -> None:
        for tier in self.tiers:
            assert tier.scan() == []

    @rule(side=sides, one=records)
    def write(self, side: int, one: Record) -> None:
        self.wall.step()
        try:
            stored = self.tiers[side].write(one)
        except TierFull:
            return
        assert stored.new == (one.name not in self.stored)
        assert set(stored.evicted) <= self.stored
        self.stored -= set(stored.evicted)
        self.stored.add(one.name)
        self.heard[side] -= set(stored.evicted)
        self.heard[side].add(one.name)

    @rule(side=sides, one=records)
    def read(self, side: int, one: Record) -> None:
        assert self.tiers[side].holds(one) == (one.name in self.stored)

    @rule(side=sides, one=records)
    def delete(self, side: int, one: Record) -> None:
        self.tiers[side].delete(one)
        self.stored.discard(one.name)
        self.heard[side].discard(one.name)

    @rule(side=sides, some=st.lists(records, max_size=4))
    def touch(self, side: int, some: list[Record]) -> None:
        self.wall.step()
        self.tiers[side].touch(some)

    @rule(side=sides)
    def scan(self, side: int) -> None:
        """After a scan a tier's caller knows exactly what is there."""
        for change in self.tiers[side].scan():
            if isinstance(change, Gone):
                self.heard[side].discard(change.name)
            else:
                assert isinstance(change, TierEntry)
                self.heard[side].add(change.name)
        assert self.heard[side] == self.stored

    @rule(side=sides)
    def restart(self, side: int) -> None:
        self.tiers[side].tier.close()
        self.tiers[side] = self.fresh()
        self.heard[side] = {c.name for c in self.tiers[side].scan()}
        assert self.heard[side] == self.stored

    @rule(side=sides, share=st.floats(0.2, 1.0))
    def shrink(self, side: int, share: float) -> None:
        self.tiers[side].evict_to(int(LIMIT * share))
        left = {n for n in self.stored if self.tiers[side].holds(BY_NAME[n])}
        assert du(self.folder) <= LIMIT * share or not left
        self.stored = left  # the next scan reports the rest as gone

    @invariant()
    def the_limit_holds(self) -> None:
        assert du(self.folder) <= LIMIT
        assert all(t.usage().nbytes <= LIMIT for t in self.tiers)


TestFolder = FolderMachine.TestCase
TestFolder.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
