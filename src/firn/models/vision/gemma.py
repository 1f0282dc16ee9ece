"""Pictures whose tokens see each other.

In Gemma 4 all tokens of a picture can see each other, later ones included. mlx-vlm's mask allows
that only if the whole prompt is read in one pass; here a chunk may follow others, as long as no
picture is cut.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx

VISUAL = "vision"


def has_whole_pictures(model: Any) -> bool:
    """Whether a picture's tokens see each other."""
    config = getattr(model.config, "text_config", None)
    inner = getattr(model.language_model, "model", None)
    return getattr(config, "use_bidirectional_attention", None) == VISUAL and hasattr(
        inner, "_apply_blockwise_bidirectional_overlay"
    )


def attend_to_whole_pictures(model: Any) -> None:
    """Replace this model's mask overlay by one that also works for a chunk with a past."""
    inner = model.language_model.model

    def overlay(base: mx.array, kinds: mx.array | None) -> mx.array:
        """`base` is (..., n, past + n): the last n columns are the chunk's own tokens."""
        if kinds is None:
            return base
        n = kinds.shape[1]
        block = inner._block_sequence_ids_for_mask(kinds)
        same = (block[:, :, None] != -1) & (block[:, :, None] == block[:, None, :])
        past = mx.zeros((*same.shape[:2], base.shape[-1] - n), dtype=mx.bool_)
        return base | mx.concatenate([past, same], axis=-1)[:, None]

    inner._apply_blockwise_bidirectional_overlay = overlay
