"""The children of one node, ordered by their tokens.

Among strings in dictionary order, those that share most with a given one lie next to where it would
stand. So what a prompt shares with any of 20,000 siblings is found by a few comparisons, whatever their
number: cost by what matches, not by what is stored.

Owner: the tree.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

import numpy as np

from firn.core.keys import KeyTokens


class Child(Protocol):
    @property
    def text(self) -> bytes:
        """Its tokens as `sortable` makes them: half of a node's memory, so there is one copy."""
        ...


C = TypeVar("C", bound=Child)
NARROW, WIDE = ">u4", ">u8"
"""Token ids fit 32 bits; only the digests that stand for pictures need 64."""


def sortable(tokens: KeyTokens) -> bytes:
    """Bytes that sort like the tokens; a leading byte tells how wide they are."""
    narrow = not len(tokens) or int(tokens.max()) < 1 << 32
    return bytes([narrow]) + tokens.astype(NARROW if narrow else WIDE).tobytes()


def tokens_of(text: bytes) -> KeyTokens:
    return np.frombuffer(text, dtype=NARROW if text[0] else WIDE, offset=1).astype(np.uint64)


def n_tokens_of(text: bytes) -> int:
    return (len(text) - 1) // (4 if text[0] else 8)


class Children(Generic[C]):
    """No two children have the same tokens."""

    __slots__ = ("_children", "_is_wide")

    def __init__(self) -> None:
        self._children: list[C] = []
        self._is_wide = False
        """Some child has tokens that need 64 bits: all are compared as such."""

    def __len__(self) -> int:
        return len(self._children)

    def __iter__(self) -> Iterator[C]:
        return iter(self._children)

    def add(self, child: C) -> None:
        if not child.text[0] and not self._is_wide:
            self._is_wide = True
            self._children.sort(key=self._key)
        self._children.insert(self._place(self._key(child)), child)

    def remove(self, child: C) -> None:
        i = self._place(self._key(child))
        assert self._children[i] is child
        del self._children[i]

    def get(self, tokens: KeyTokens) -> C | None:
        """The child with exactly these tokens."""
        text = self._text(tokens)
        i = self._place(text)
        found = i < len(self) and self._key(self._children[i]) == text
        return self._children[i] if found else None

    def closest(self, tokens: KeyTokens) -> Iterator[tuple[C, int]]:
        """Children that share at least a token with these, with how many; most shared first."""
        text = self._text(tokens)
        right = self._place(text)
        left = right - 1
        n_left, n_right = self._shared(left, text), self._shared(right, text)
        while n_left or n_right:
            if n_right >= n_left:
                yield self._children[right], n_right
                right += 1
                n_right = self._shared(right, text)
            else:
                yield self._children[left], n_left
                left -= 1
                n_left = self._shared(left, text)

    def prefixes(self, tokens: KeyTokens) -> Iterator[C]:
        """Children whose tokens these begin with, longest first."""
        text = self._text(tokens)
        while text:
            i = self._place(text)
            if i < len(self) and self._key(self._children[i]) == text:
                yield self._children[i]
                n = len(text) // self._width - 1
            else:
                # A prefix of the text sorts before it, and so shares all of its tokens with every
                # string between the two: it is no longer than what the neighbour shares.
                n = self._shared(i - 1, text)
            text = text[: n * self._width]

    def longer(self, tokens: KeyTokens) -> Iterator[C]:
        """Children that begin with these tokens, the child with exactly these among them."""
        text = self._text(tokens)
        for i in range(self._place(text), len(self)):
            if not self._key(self._children[i]).startswith(text):
                return
            yield self._children[i]

    @property
    def _width(self) -> int:
        return 8 if self._is_wide else 4

    def _key(self, child: C) -> bytes:
        if child.text[0] and self._is_wide:
            return tokens_of(child.text).astype(WIDE).tobytes()
        return child.text[1:]

    def _text(self, tokens: KeyTokens) -> bytes:
        if not self._is_wide and len(tokens) and int(tokens.max()) >= 1 << 32:
            # No child goes on as far as the first wide token.
            tokens = tokens[: int(np.argmax(tokens >= 1 << 32))]
        return tokens.astype(WIDE if self._is_wide else NARROW).tobytes()

    def _place(self, text: bytes) -> int:
        return bisect_left(self._children, text, key=self._key)

    def _shared(self, i: int, text: bytes) -> int:
        """Tokens that the i-th child and the text begin with alike; 0 where there is no such child."""
        if not 0 <= i < len(self):
            return 0
        other = self._key(self._children[i])
        n = min(len(text), len(other))
        if text[:n] == other[:n]:
            return n // self._width
        a, b = (np.frombuffer(t, dtype=np.uint8, count=n) for t in (text, other))
        return int(np.argmax(a != b)) // self._width
