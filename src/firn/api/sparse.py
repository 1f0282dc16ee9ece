"""Sparse prefill in the API: which requests are refused, and how a reply is marked as approximate."""

from __future__ import annotations

from collections.abc import Sequence

from firn.core.errors import InvalidValue
from firn.core.events import Admitted
from firn.core.sparse import IN_FULL, SparseRules
from firn.core.values import GenerateRequest

PARAM = "sparse_prefill"
HEADER = b"x-firn-approximate"


def refuse_sparse(request: GenerateRequest, rules: SparseRules) -> None:
    """Raises InvalidValue if the request asks for sparse prefill where that is not possible."""
    keep = request.sparse_keep
    if keep is None or keep == IN_FULL:
        return
    if not rules.allowed:
        raise InvalidValue(
            PARAM, "this server reads prompts in full; it must be started with --sparse-prefill"
        )
    if request.echo and request.top_logprobs is not None:
        raise InvalidValue(
            PARAM, "cannot be combined with logprobs of the prompt, which need all of it"
        )


def header_of(admitted: Sequence[Admitted]) -> list[tuple[bytes, bytes]]:
    """The header of an approximate reply; the usage at its end has the final count."""
    shares = sorted({a.keep for a in admitted if a.keep is not None})
    if not shares:
        return []
    n_skipped = sum(a.n_skipped for a in admitted)
    skipped = f", skipped={n_skipped}" if n_skipped else ""
    return [(HEADER, f"keep={shares[0]:g}{skipped}".encode())]
