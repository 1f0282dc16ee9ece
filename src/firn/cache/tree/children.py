"""The children of one node, sorted by their tokens.

In a sorted list of strings, those that share the longest prefix with a given string are next to
where it would be inserted. So the child that shares most with a prompt is found with a few
comparisons, even among 20,000 siblings: the cost depends on what matches, not on what is stored.

Owner: the tree.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

import numpy as np

from firn.core.values import NARROW, PACKED_DTYPE, PackedTokens, unpacked


class PackedChild(Protocol):
    """`packed`: its tokens, each of `width` bytes."""

    @property
    def packed(self) -> bytes: ...

    @property
    def width(self) -> int: ...


C = TypeVar("C", bound=PackedChild)


class Children(Generic[C]):
    """No two children have the same tokens."""

    __slots__ = ("_children", "_width")

    def __init__(self) -> None:
        self._children: list[C] = []
        self._width = NARROW
        """The widest child's width: all are compared at this width."""

    def __len__(self) -> int:
        return len(self._children)

    def __iter__(self) -> Iterator[C]:
        return iter(self._children)

    def add(self, child: C) -> None:
        if child.width > self._width:
            self._width = child.width
            self._children.sort(key=self._key)
        self._children.insert(self._place(self._key(child)), child)

    def remove(self, child: C) -> None:
        i = self._place(self._key(child))
        assert self._children[i] is child
        del self._children[i]

    def get(self, tokens: PackedTokens, start: int, end: int) -> C | None:
        """The child with exactly tokens [start, end)."""
        wanted = tokens.cut(start, end, self._width)
        if len(wanted) != (end - start) * self._width:
            return None
        if len(self._children) == 1:
            (child,) = self._children
            return child if self._key(child) == wanted else None
        i = self._place(wanted)
        there = i < len(self._children) and self._key(self._children[i]) == wanted
        return self._children[i] if there else None

    def closest(self, tokens: PackedTokens, start: int, end: int) -> Iterator[tuple[C, int]]:
        """Children that share tokens from `start` on, with how many; those that share most first.

        end: no child reaches further, so what follows need not be looked at.
        """
        wanted = tokens.cut(start, min(end, len(tokens)), self._width)
        right = self._place(wanted)
        left = right - 1
        n_left, n_right = self._shared(left, wanted), self._shared(right, wanted)
        while n_left or n_right:
            if n_right >= n_left:
                yield self._children[right], n_right
                right += 1
                n_right = self._shared(right, wanted)
            else:
                yield self._children[left], n_left
                left -= 1
                n_left = self._shared(left, wanted)

    def shared_with_siblings(self, child: C) -> int:
        """How many tokens it shares with the sibling that shares most."""
        own = self._key(child)
        i = self._place(own)
        return max(self._shared(i - 1, own), self._shared(i + 1, own))

    def prefixes(self, tokens: PackedTokens, start: int, end: int) -> Iterator[C]:
        """Children that are a prefix of tokens [start, end), the longest first."""
        wanted = tokens.cut(start, end, self._width)
        while wanted:
            i = self._place(wanted)
            if i < len(self._children) and self._key(self._children[i]) == wanted:
                yield self._children[i]
                n = len(wanted) // self._width - 1
            else:
                # A prefix of `wanted` sorts before it and shares all of its tokens with every string
                # between the two, so it is no longer than what the left neighbour shares.
                n = self._shared(i - 1, wanted)
            wanted = wanted[: n * self._width]

    def extensions(self, tokens: PackedTokens, start: int, end: int) -> Iterator[C]:
        """Children that begin with tokens [start, end), one with exactly these included."""
        wanted = tokens.cut(start, end, self._width)
        if len(wanted) != (end - start) * self._width:
            return
        for i in range(self._place(wanted), len(self._children)):
            if not self._key(self._children[i]).startswith(wanted):
                return
            yield self._children[i]

    def _key(self, child: C) -> bytes:
        if child.width == self._width:
            return child.packed
        return unpacked(child.packed, child.width).astype(PACKED_DTYPE[self._width]).tobytes()

    def _place(self, wanted: bytes) -> int:
        return bisect_left(self._children, wanted, key=self._key)

    def _shared(self, i: int, wanted: bytes) -> int:
        """How many tokens the i-th child shares with these; 0 where there is no such child."""
        if not 0 <= i < len(self._children):
            return 0
        other = self._key(self._children[i])
        n = min(len(wanted), len(other))
        if wanted[:n] == other[:n]:
            return n // self._width
        a, b = (np.frombuffer(t, dtype=np.uint8, count=n) for t in (wanted, other))
        return int(np.argmax(a != b)) // self._width
