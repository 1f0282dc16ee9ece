"""Key tokens: what a prompt's tokens are compared by (`core.keys` makes them)."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
import numpy.typing as npt

KeyTokens = npt.NDArray[np.uint64]

NARROW, WIDE = 4, 8
"""Bytes of a packed token. Ids fit 32 bits; digests of pictures, and ids with positions, need 64."""
PACKED_DTYPE = {NARROW: ">u4", WIDE: ">u8"}


class PackedTokens:
    """Key tokens as bytes that sort as the tokens do, packed once for many comparisons."""

    __slots__ = ("_packed", "_wide_at", "tokens")

    def __init__(self, tokens: KeyTokens) -> None:
        self.tokens = tokens
        self._wide_at: list[int] = []
        """Positions of tokens that need 64 bits."""
        if len(tokens) and tokens.max() >> np.uint64(32):
            self._wide_at = np.flatnonzero(tokens >> np.uint64(32)).tolist()
        low = tokens & np.uint64(0xFFFFFFFF) if self._wide_at else tokens
        self._packed = {NARROW: low.astype(PACKED_DTYPE[NARROW]).view(np.uint8).data}
        if self._wide_at:
            self._packed[WIDE] = tokens.astype(PACKED_DTYPE[WIDE]).view(np.uint8).data

    def __len__(self) -> int:
        return len(self.tokens)

    def cut(self, start: int, end: int, width: int) -> bytes:
        """Tokens [start, end) at this width; a narrow cut ends before the first wide token."""
        if self._wide_at and width == NARROW:
            i = bisect_left(self._wide_at, start)
            end = min(end, self._wide_at[i]) if i < len(self._wide_at) else end
        if width not in self._packed:
            return self.tokens[start:end].astype(PACKED_DTYPE[width]).tobytes()
        return bytes(self._packed[width][start * width : end * width])

    def narrowest(self, start: int, end: int) -> tuple[bytes, int]:
        """Tokens [start, end) at the smallest width that holds them, and that width."""
        narrow = self.cut(start, end, NARROW)
        if len(narrow) == (end - start) * NARROW:
            return narrow, NARROW
        return self.cut(start, end, WIDE), WIDE


def unpacked(packed: bytes, width: int) -> KeyTokens:
    return np.frombuffer(packed, dtype=PACKED_DTYPE[width]).astype(np.uint64)
