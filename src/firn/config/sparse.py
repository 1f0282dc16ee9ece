"""Settings of sparse prefill."""

from __future__ import annotations

from dataclasses import dataclass

from firn.config.options import option

AUTO_THRESHOLD_TOKENS = 16_384


@dataclass(frozen=True, slots=True)
class SparseConfig:
    sparse_prefill: bool = option(
        False,
        "Allow requests to have only the important part of a long cold prompt read "
        '("sparse_prefill": {"keep": 0.3}), as scored by --draft-model: faster, but approximate.',
    )
    sparse_prefill_over: int = option(
        0,
        "Read every prompt with more cold tokens than this sparsely, requested or not; auto is "
        "16384.",
        low=0,
        high=2**31 - 1,
        metavar="off|auto|N",
        words={"off": 0, "auto": AUTO_THRESHOLD_TOKENS},
    )
    """0: only if a request asks for it."""
    sparse_prefill_keep: float = option(
        0.3,
        "Share of the skippable cold tokens to read, if a request sets none.",
        low=0.01,
        high=1,
    )
