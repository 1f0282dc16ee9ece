"""Finds fixed strings in a stream, however the stream is cut.

Text that may be the beginning of a needle is held back; everything else passes immediately. Linear
in the text: one Knuth-Morris-Pratt automaton per needle, and a shortcut for text without any
needle's first character.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class ScanResult(NamedTuple):
    """`before` can be passed on; `needle` is what ended it ("" if nothing did); `after` follows."""

    before: str
    needle: str
    after: str


class StreamFinder:
    """Finds the needle that ends first; of those that end together, the longest.

    Owner: the caller that feeds it. `pending` is the text that is held back.
    """

    def __init__(self, needles: Iterable[str]) -> None:
        self.needles = tuple(dict.fromkeys(n for n in needles if n))
        self.pending = ""
        self._first = "".join({n[0] for n in self.needles})
        self._fail = [_failure(n) for n in self.needles]
        self._depth = [0] * len(self.needles)

    def feed(self, text: str) -> ScanResult:
        """Reads up to the first needle, or to the end of the text. Starts afresh after a needle."""
        if not self.pending:
            for char in self._first:
                if char in text:
                    break
            else:
                return ScanResult(text, "", "")
        start = len(self.pending)
        text = self.pending + text
        depth = self._depth
        for i in range(start, len(text)):
            longest = self._step(text[i])
            if longest:
                self._depth = [0] * len(depth)
                self.pending = ""
                end = i + 1
                return ScanResult(text[: end - longest], text[end - longest : end], text[end:])
        n_free = len(text) - max(depth, default=0)
        self.pending = text[n_free:]
        return ScanResult(text[:n_free], "", "")

    def flush(self) -> str:
        """The text that was held back: no needle can complete any more."""
        pending, self.pending = self.pending, ""
        self._depth = [0] * len(self._depth)
        return pending

    def _step(self, char: str) -> int:
        """Reads one character; the length of the longest needle that it completes, or 0."""
        longest = 0
        depth = self._depth
        for j, needle in enumerate(self.needles):
            k = depth[j]
            while k and needle[k] != char:
                k = self._fail[j][k - 1]
            if needle[k] == char:
                k += 1
            depth[j] = k
            if k == len(needle):
                longest = max(longest, k)
        return longest


def _failure(needle: str) -> list[int]:
    """For each prefix, the length of its longest border: the match to fall back to."""
    table = [0] * len(needle)
    k = 0
    for i in range(1, len(needle)):
        while k and needle[k] != needle[i]:
            k = table[k - 1]
        if needle[k] == needle[i]:
            k += 1
        table[i] = k
    return table
