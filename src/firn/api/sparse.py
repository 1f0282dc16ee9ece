"""Sparse prefill in the API: what is refused, and how a reply says that it is approximate."""

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
        raise InvalidValue(PARAM, "this server reads prompts in full (see --sparse-prefill)")
    if request.echo and request.top_logprobs is not None:
        raise InvalidValue(
            PARAM, "cannot be combined with the prompt's logprobs: these need all of it"
        )


def header_of(admitted: Sequence[Admitted]) -> list[tuple[bytes, bytes]]:
    """The header that says so before the reply; the usage at its end has the final numbers."""
    shares = sorted({each.keep for each in admitted if each.keep is not None})
    if not shares:
        return []
    n_skipped = sum(each.n_skipped for each in admitted)
    skipped = f", skipped={n_skipped}" if n_skipped else ""
    return [(HEADER, f"keep={shares[0]:g}{skipped}".encode())]
