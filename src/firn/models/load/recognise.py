"""What a model folder's configuration shows without weights or MLX: pictures, context, scoring."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

TOWER_KEYS = (
    "vision_config",
    "mm_vision_tower",
    "vision_tower",
    "img_processor",
    "vision_cfg",
    "visual",
)
"""Where families describe their vision tower. Text-only exports leave these out, empty or null."""
FLAT_KEYS = ("vision_n_layers", "vision_num_layers")
BY_NAME = frozenset(
    {"bunny-llama", "llava-qwen2", "llava_qwen2", "molmo", "moondream1", "moondream2", "moondream3",
     "phi3_v", "phi4mm", "phi4-siglip"}
)  # fmt: skip
"""Families whose configuration need not mention a tower."""

DEFAULT_CONTEXT = 32768
CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length", "n_ctx")


def is_vision(config: Mapping[str, Any]) -> bool:
    """Whether the checkpoint accepts pictures."""
    if config.get("skip_vision"):
        return False
    inner = config.get("thinker_config")
    if isinstance(inner, Mapping) and is_vision(inner):
        return True
    if str(config.get("model_type", "")).lower() in BY_NAME:
        return True
    return any(config.get(key) for key in (*TOWER_KEYS, *FLAT_KEYS))


def context_length(config: Mapping[str, Any]) -> int:
    """How many tokens the model can attend to, by its configuration or by default."""
    return stated_context_length(config) or DEFAULT_CONTEXT


def stated_context_length(config: Mapping[str, Any]) -> int | None:
    """The context length in the configuration; None if it does not say."""
    for tree in (config, config.get("text_config") or {}):
        for key in CONTEXT_KEYS:
            value = tree.get(key)
            if isinstance(value, int) and value > 0:
                return value
    return None


def scoring_settings(folder: Path) -> Mapping[str, Any] | None:
    """A reranker folder's scoring settings: which two tokens are compared. None: there are none."""
    for path in sorted(folder.glob("*LogitScore/config.json")):
        try:
            settings = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if isinstance(settings, dict):
            return settings
    return None
