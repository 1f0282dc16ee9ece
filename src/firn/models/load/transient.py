"""Memory that a prefill chunk takes while it runs, estimated from the model's configuration.

A GPU computes attention of more than 8 queries in one kernel only for a few head sizes (see
`ScaledDotProductAttention::use_fallback` in MLX); for all others, as on a CPU, the scores of a chunk
against its whole past are held in memory. These are initial estimates: the engine
corrects them by the peaks it measures.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from firn.core.memory_plan import Transient

N_HIDDEN, N_INNER, N_ATTENTION = 8, 3, 4
"""Arrays of a token's hidden, feed-forward and attention width that are alive at the same time."""


def transient_of(
    config: Mapping[str, Any], *, fused_head_dims: frozenset[int], dtype: str
) -> Transient:
    """config: a model folder's; a vision model's text part counts. fused_head_dims: those that the
    device has a kernel for. dtype: what it computes in."""
    item_nbytes = 4 if dtype == "float32" else 2
    text = config.get("text_config")
    tree: Mapping[str, Any] = {**config, **text} if isinstance(text, Mapping) else config
    hidden = _first(tree, "hidden_size", "n_embd", "d_model", "dim", "model_dim")
    n_heads = _first(tree, "num_attention_heads", "n_head", "n_heads", "num_heads")
    inner = max(_inner_widths(tree), default=4 * hidden)
    dims = list(_head_dims(tree, hidden, n_heads))
    width = N_HIDDEN * hidden + N_INNER * inner + N_ATTENTION * n_heads * max(dims, default=0)
    unfused = n_heads > 0 and any(dim not in fused_head_dims for dim in dims)
    return Transient(width * item_nbytes, n_heads * item_nbytes if unfused else 0)


def _inner_widths(tree: Mapping[str, Any]) -> Iterator[int]:
    yield _first(tree, "intermediate_size", "n_inner", "ffn_dim", "ffn_hidden_size")
    per_token = _first(tree, "num_experts_per_tok", "num_experts_per_token", "top_k_experts")
    per_token += _first(tree, "n_shared_experts", "num_shared_experts")
    width = _first(tree, "moe_intermediate_size", "expert_intermediate_size")
    yield per_token * (width or _first(tree, "intermediate_size"))


def _head_dims(tree: Mapping[str, Any], hidden: int, n_heads: int) -> Iterator[int]:
    if rope := _first(tree, "qk_rope_head_dim"):  # latent attention: queries and values differ
        yield _first(tree, "qk_nope_head_dim") + rope
        return
    named = _first(tree, "head_dim", "attention_head_dim")
    if named or n_heads:
        yield named or hidden // n_heads
    if wide := _first(tree, "global_head_dim"):
        yield wide


def _first(tree: Mapping[str, Any], *names: str) -> int:
    """The first of these that is a number; 0 if none is. A list (one width per layer) counts as its
    largest."""
    for name in names:
        value = tree.get(name)
        if isinstance(value, list):
            value = max((v for v in value if isinstance(v, int)), default=None)
        if isinstance(value, int) and not isinstance(value, bool):
            return value
    return 0
