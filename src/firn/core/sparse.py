"""What requests may ask of sparse prefill, and what a server allows. All frozen."""

from __future__ import annotations

from dataclasses import dataclass

MIN_TOKENS_IF_ASKED = 1024
"""Shorter prompts are read in full even if a request asks for less: that does not take long."""
IN_FULL = 1.0
"""The share that a request asks for if its prompt must be read in full."""


@dataclass(frozen=True, slots=True)
class Sparse:
    """A prompt with more than `over` uncached tokens may be thinned to the share `keep` of them."""

    keep: float
    over: int


@dataclass(frozen=True, slots=True)
class SparseRules:
    """A server's settings for sparse prefill.

    keep: the share, unless a request gives one. over: prompts with more uncached tokens are thinned
    even if the request does not ask for it; 0: none are.
    """

    allowed: bool = False
    keep: float = 0.3
    over: int = 0

    def of(self, asked: float | None) -> Sparse | None:
        if asked is not None:
            return Sparse(asked, MIN_TOKENS_IF_ASKED) if self.allowed else None
        return Sparse(self.keep, self.over) if self.allowed and self.over else None
