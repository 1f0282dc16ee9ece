"""What requests may ask of sparse prefill, and what a server allows. All of it is frozen."""

from __future__ import annotations

from dataclasses import dataclass

ASKED_OVER = 1024
"""Shorter prompts are read in full even if a request asks for less: it does not take long."""
IN_FULL = 1.0
"""The share that a request asks for whose prompt must be read as a whole."""


@dataclass(frozen=True, slots=True)
class Sparse:
    """If more than `over` tokens of a prompt are not cached, it may be thinned to the share `keep` of
    them."""

    keep: float
    over: int


@dataclass(frozen=True, slots=True)
class SparseRules:
    """A server's settings for sparse prefill. keep: if a request does not say. over: prompts with
    more cold tokens are thinned unasked; 0: none are."""

    allowed: bool = False
    keep: float = 0.3
    over: int = 0

    def of(self, asked: float | None) -> Sparse | None:
        if asked is not None:
            return Sparse(asked, ASKED_OVER) if self.allowed else None
        return Sparse(self.keep, self.over) if self.allowed and self.over else None
