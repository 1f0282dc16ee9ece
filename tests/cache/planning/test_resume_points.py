"""What a resume point costs is known without its records, and is what they add up to."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest

from firn.cache.ledger import Ledger
from firn.cache.parts import Needs, Part
from firn.cache.planning.estimates import Estimates
from firn.cache.planning.match import NOTHING, ResumePoints, Walk, last_match
from firn.cache.planning.plan import _ReadCosts, make_plan
from firn.cache.tree import CheckpointKind, Node, Record, Tree
from firn.core.keys import Key
from firn.core.values import KeyTokens, Namespace, PackedTokens

BLOCK = 8
ROOT = Key(b"r" * 32)
PLACES = ("", "ssd", "store")
NEEDS = [
    Needs(pages=True, window=0, state=False),
    Needs(pages=True, window=0, state=False, grid=8),
    Needs(pages=True, window=20, state=False),
    Needs(pages=False, window=5, state=True),
    Needs(pages=True, window=0, state=True),
    Needs(pages=True, window=11, state=True),
]


class Some:
    """Records that may be used: those that are anywhere."""

    def __init__(self, where: Mapping[Record, str]) -> None:
        self._where = where

    def has(self, record: Record) -> bool:
        return record in self._where


class Held(Some):
    """Records that need not be loaded."""

    def has(self, record: Record) -> bool:
        return not self._where[record]


def grown(needs: Needs, rng: random.Random) -> tuple[Walk, dict[Record, str]]:
    """A prompt of twelve blocks and a half, in a tree with branches, tails and holes; and where each
    record is. Some are nowhere."""
    tree, prompt = Tree(BLOCK), np.arange(100, dtype=np.uint64)
    where: dict[Record, str] = {}
    ledger = Ledger(tree)
    for name in PLACES[1:]:
        ledger.add_tier(name)
    node: Node = tree.root(ROOT, Namespace(""))

    def add(parent: Node, tokens: KeyTokens, n: int) -> Node:
        child = tree.child(parent, PackedTokens(tokens), parent.end, parent.end + n)
        parts = [*needs.by_block, *([Part.STATE] if needs.state and rng.random() < 0.4 else [])]
        for part in parts:
            if rng.random() < 0.97:
                record = tree.add(child, part, nbytes=rng.randint(1, 999), kind=CheckpointKind.TURN)
                where[record] = rng.choice(PLACES)
                if where[record]:
                    ledger.found(record, PLACES.index(where[record]) - 1)
        return child

    for _ in range(rng.randint(0, 13)):
        if rng.random() < 0.4:
            other = prompt.copy()
            other[node.end + rng.randrange(1, BLOCK) :] += 1000
            add(node, other, min(BLOCK, 100 - node.end))
        if rng.random() < 0.3:
            add(node, prompt, rng.randrange(1, min(BLOCK, 100 - node.end)))
        if node.end + BLOCK > 100:
            break
        node = add(node, prompt, BLOCK)
    unbroken = [(30, 41)] if rng.random() < 0.3 else []
    root = tree.root(ROOT, Namespace(""))
    return Walk.of(tree, root, PackedTokens(prompt), unbroken=unbroken), where


@pytest.mark.parametrize("needs", NEEDS, ids=str)
def test_what_a_point_costs_is_what_its_records_add_up_to(needs: Needs) -> None:
    n_seen = 0
    for seed in range(150):
        walk, where = grown(needs, random.Random(seed))
        points = ResumePoints.of(walk, needs, Some(where))
        costs = _ReadCosts(points, Held(where), PLACES[1:])
        for point in points.up_to(len(walk.tokens)):
            match = point.match()
            to_load = Counter[str]()
            for record in match.records:
                to_load[where[record]] += record.nbytes
            del to_load[""]
            assert match.n_tokens == point.n_tokens == sum(s.n_tokens for s in match.segments)
            assert len(set(match.records)) == len(match.records)
            assert costs.of(point) == (to_load, match.nbytes_of(match.records))
            n_seen += bool(match.records)
    assert n_seen > 150


@pytest.mark.parametrize("needs", NEEDS, ids=str)
def test_points_up_to_a_position_are_those_that_lie_there(needs: Needs) -> None:
    for seed in range(60):
        walk, where = grown(needs, random.Random(seed))
        points = ResumePoints.of(walk, needs, Some(where))
        every = [p.match() for p in points.up_to(len(walk.tokens))]
        assert every[-1] == NOTHING
        assert every[0] == last_match(walk, needs, Some(where))
        for position in range(101):
            there = [p.match() for p in points.up_to(position)]
            assert there == [m for m in every if m.n_tokens <= position]


@pytest.mark.parametrize("needs", NEEDS, ids=str)
def test_a_plan_looks_at_each_record_a_few_times(needs: Needs) -> None:
    """However many resume points a prompt has: with a look for each of them, a prompt of a million
    tokens would stop all streams for seconds."""
    n_blocks = 2000
    prompt = np.arange(n_blocks * BLOCK + 1, dtype=np.uint64)
    tree, n_looks = Tree(BLOCK), 0
    node: Node = tree.root(ROOT, Namespace(""))
    ledger = Ledger(tree)
    ledger.add_tier("ssd")
    for start in range(0, n_blocks * BLOCK, BLOCK):
        node = tree.child(node, PackedTokens(prompt[start : start + BLOCK]), 0, BLOCK)
        for part in (*needs.by_block, *([Part.STATE] if needs.state else [])):
            ledger.found(tree.add(node, part, nbytes=1000, kind=CheckpointKind.TURN), 0)

    class Counting:
        def has(self, record: Record) -> bool:
            nonlocal n_looks
            n_looks += 1
            return False

    class Names(Sequence[str]):
        def __getitem__(self, tier: Any) -> Any:
            nonlocal n_looks
            n_looks += 1
            return ("ssd",)[tier]

        def __len__(self) -> int:
            return 1

    walk = Walk.of(tree, tree.root(ROOT, Namespace("")), PackedTokens(prompt))
    plan = make_plan(walk, needs, Estimates(), Names(), available=Counting())
    assert plan.target.n_tokens == n_blocks * BLOCK
    assert n_looks < 10 * n_blocks
