"""What a prompt shares with any of its siblings, against a plain list of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from firn.cache.tree.children import Children
from firn.core.values import NARROW, WIDE, KeyTokens, PackedTokens, unpacked

tokens = st.sampled_from([1, 2, 3, 1 << 20, (1 << 63) + 1, (1 << 63) + 2])
runs = st.lists(tokens, min_size=1, max_size=6)


@dataclass(frozen=True)
class Leaf:
    packed: bytes
    width: int


def array(run: list[int]) -> KeyTokens:
    return np.array(run, dtype=np.uint64)


def leaf(run: list[int]) -> Leaf:
    return Leaf(*PackedTokens(array(run)).narrowest(0, len(run)))


def shared(a: list[int], b: list[int]) -> int:
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


def made(siblings: set[tuple[int, ...]]) -> Children[Leaf]:
    children: Children[Leaf] = Children()
    for run in siblings:
        children.add(leaf(list(run)))
    return children


def run_of(child: Leaf) -> tuple[int, ...]:
    return tuple(int(t) for t in unpacked(child.packed, child.width))


families = st.sets(runs.map(tuple), max_size=12)


@given(families, runs, st.integers(0, 3))
def test_against_a_list(siblings: set[tuple[int, ...]], prompt: list[int], start: int) -> None:
    children, text = made(siblings), PackedTokens(array([7] * start + prompt))
    end = start + len(prompt)
    want = sorted((shared(list(s), prompt) for s in siblings), reverse=True)
    longest = start + max(map(len, siblings), default=0)
    assert [n for _, n in children.closest(text, start, longest)] == [n for n in want if n]
    for child, n in children.closest(text, start, longest):
        assert shared(list(run_of(child)), prompt) == n
    exact = children.get(text, start, end)
    assert (exact is not None) == (tuple(prompt) in siblings)
    begins = sorted((s for s in siblings if tuple(prompt[: len(s)]) == s), key=len, reverse=True)
    assert [run_of(c) for c in children.prefixes(text, start, end)] == begins
    longer = {s for s in siblings if s[: len(prompt)] == tuple(prompt)}
    assert {run_of(c) for c in children.extensions(text, start, end)} == longer


@given(families, st.data())
def test_whoever_goes_is_not_found_any_more(
    siblings: set[tuple[int, ...]], data: st.DataObject
) -> None:
    children = made(siblings)
    for child in list(children):
        if data.draw(st.booleans()):
            children.remove(child)
            siblings = siblings - {run_of(child)}
    assert {run_of(c) for c in children} == siblings


@given(runs)
def test_the_narrowest_form_holds_all(run: list[int]) -> None:
    child = leaf(run)
    assert list(run_of(child)) == run
    assert child.width == (WIDE if max(run) >> 32 else NARROW)


def test_a_plain_block_behind_a_picture_is_as_narrow_as_any() -> None:
    text = PackedTokens(array([1, 1 << 63, 2, 3]))
    assert text.narrowest(2, 4) == PackedTokens(array([2, 3])).narrowest(0, 2)
    assert text.cut(0, 4, NARROW) == PackedTokens(array([1])).cut(0, 1, NARROW)
