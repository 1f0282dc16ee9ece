"""Resume points around ranges that must be read in one piece."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from firn.cache.parts import Needs, Part
from firn.cache.planning.match import Walk, last_match, resume_points
from firn.cache.tree import CheckpointKind, Node, Record, Tree
from firn.core.keys import Key
from firn.core.values import KeyTokens, Namespace, PackedTokens

BLOCK = 8
ROOT = Key(b"r" * 32)
PROMPT: KeyTokens = np.arange(100, dtype=np.uint64)
EVERYONE = Namespace("")


def stored(n_tokens: int, *parts: Part) -> Tree:
    """A tree that holds the prompt's first tokens: whole blocks, then a tail."""
    tree = Tree(BLOCK)
    node: Node = tree.root(ROOT, EVERYONE)
    for start in range(0, n_tokens, BLOCK):
        node = tree.child(node, PackedTokens(PROMPT), start, min(start + BLOCK, n_tokens))
        for part in parts:
            tree.add(node, part, nbytes=1, kind=CheckpointKind.TURN)
    return tree


@dataclass(frozen=True)
class Before:
    """Only what ends before this position may be used."""

    end: int

    def has(self, record: Record) -> bool:
        return record.node.end <= self.end


def resumes(tree: Tree, needs: Needs, *unbroken: tuple[int, int]) -> list[int]:
    way = Walk.of(tree, tree.root(ROOT, EVERYONE), PackedTokens(PROMPT), unbroken=unbroken)
    return [m.n_tokens for m in resume_points(way, needs, Before(1 << 30))]


def resume(tree: Tree, needs: Needs, *unbroken: tuple[int, int]) -> int:
    return resumes(tree, needs, *unbroken)[0]


PAGES = Needs(pages=True, window=0, state=False)
WINDOW = Needs(pages=True, window=16, state=False)
STATE = Needs(pages=True, window=0, state=True)
GRID = Needs(pages=True, window=0, state=False, grid=8)


@pytest.mark.parametrize(
    ("n_stored", "unbroken", "want"),
    [
        (40, [], 40),
        (40, [(30, 50)], 30),  # stored to the picture's middle
        (44, [(30, 50)], 30),  # ... in a tail
        (40, [(30, 40)], 40),  # whole
        (40, [(40, 50)], 40),  # not begun
        (40, [(2, 60)], 2),
        (40, [(0, 60)], 0),
        (40, [(10, 20), (30, 50)], 30),
        (99, [(90, 100)], 90),
    ],
)
def test_pages_resume_where_the_picture_begins(
    n_stored: int, unbroken: list[tuple[int, int]], want: int
) -> None:
    assert resume(stored(n_stored, Part.PAGES), PAGES, *unbroken) == want
    both = stored(n_stored, Part.PAGES, Part.WINDOW)
    assert resume(both, WINDOW, *unbroken) == want


def test_states_inside_a_picture_are_passed_over() -> None:
    root = stored(40, Part.PAGES, Part.STATE)
    assert resume(root, STATE) == 40
    assert resume(root, STATE, (30, 50)) == 24
    assert resume(root, STATE, (24, 50)) == 24


def test_the_grid_is_kept() -> None:
    root = stored(40, Part.PAGES)
    assert resume(root, GRID, (30, 50)) == 24
    assert resume(root, GRID, (23, 50)) == 16


def test_no_point_lies_inside() -> None:
    positions = resumes(stored(64, Part.PAGES), PAGES, (10, 30), (33, 62))
    assert positions == [64, 33, 32, 10, 8, 0]


def test_a_picture_whose_next_block_is_gone_is_read_from_its_start() -> None:
    """Blocks [0, 40) are there, the tree remembers more, and the picture begins inside a block."""
    tree = stored(64, Part.PAGES, Part.WINDOW)
    way = Walk.of(tree, tree.root(ROOT, EVERYONE), PackedTokens(PROMPT), unbroken=[(30, 50)])
    for needs, want in ((PAGES, 30), (WINDOW, 30), (GRID, 24)):
        match = last_match(way, needs, Before(40))
        assert match.n_tokens == want
        assert sum(segment.n_tokens for segment in match.segments) == want
