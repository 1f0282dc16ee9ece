"""What is asked, and allowed, of sparse prefill. All of it is frozen."""

from __future__ import annotations

from dataclasses import dataclass

ASKED_OVER = 1024
"""Shorter prompts are read in full, even if a request asks for less: that is soon done."""


@dataclass(frozen=True, slots=True)
class Sparse:
    """A prompt may be thinned to the share `keep` of what is not cached of it, if that is more than
    `over` tokens."""

    keep: float
    over: int


@dataclass(frozen=True, slots=True)
class SparseRules:
    """What a server does about sparse prefill. keep: where a request says nothing. over: prompts with
    more cold tokens are read so unasked; 0: none."""

    allowed: bool = False
    keep: float = 0.3
    over: int = 0

    def of(self, asked: float | None) -> Sparse | None:
        if asked is not None:
            return Sparse(asked, ASKED_OVER) if self.allowed else None
        return Sparse(self.keep, self.over) if self.allowed and self.over else None
