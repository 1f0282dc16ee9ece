"""What requests may ask of sparse prefill, what a server allows, how a reply is marked. All frozen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from firn.core.errors import InvalidValue
from firn.core.events import Admitted
from firn.core.values import GenerateRequest

MIN_TOKENS_IF_ASKED = 1024
"""Shorter prompts are read in full even if a request asks for less: that does not take long."""
PARAM = "sparse_prefill"
HEADER = b"x-firn-approximate"


@dataclass(frozen=True, slots=True)
class Sparse:
    """A prompt with more than `over` uncached tokens may be thinned to the share `keep` of them."""

    keep: float
    over: int


@dataclass(frozen=True, slots=True)
class SparseRules:
    """A server's settings for sparse prefill. Implements api.Preparations.

    keep: the share, unless a request gives one. over: prompts with more uncached tokens are thinned
    even if the request does not ask for it; 0: none are.
    """

    allowed: bool = False
    keep: float = 0.3
    over: int = 0

    def check(self, request: GenerateRequest) -> None:
        if request.keep is None or request.reads_all:
            return
        if not self.allowed:
            raise InvalidValue(
                PARAM, "this server reads prompts in full; it must be started with --sparse-prefill"
            )
        if request.echo and request.top_logprobs is not None:
            raise InvalidValue(
                PARAM, "cannot be combined with logprobs of the prompt, which need all of it"
            )

    def of(self, request: GenerateRequest) -> Sparse | None:
        if request.reads_all:
            return None
        if request.keep is not None:
            return Sparse(request.keep, MIN_TOKENS_IF_ASKED) if self.allowed else None
        return Sparse(self.keep, self.over) if self.allowed and self.over else None

    def headers(self, admitted: Sequence[Admitted]) -> list[tuple[bytes, bytes]]:
        """Marks an approximate reply; the usage at its end has the final count."""
        shares = sorted({a.keep for a in admitted if a.keep is not None})
        if not shares:
            return []
        n_skipped = sum(a.n_skipped for a in admitted)
        skipped = f", skipped={n_skipped}" if n_skipped else ""
        return [(HEADER, f"keep={shares[0]:g}{skipped}".encode())]
