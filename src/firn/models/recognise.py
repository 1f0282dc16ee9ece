"""Is this a vision checkpoint? Read from config.json alone, before any weight and without mlx-vlm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TOWER_KEYS = (
    "vision_config",
    "mm_vision_tower",
    "vision_tower",
    "img_processor",
    "vision_cfg",
    "visual",
)
"""Where families say what their vision tower is. Text-only exports leave them out, empty or null."""
FLAT_KEYS = ("vision_n_layers", "vision_num_layers")
BY_NAME = frozenset(
    {"bunny-llama", "llava-qwen2", "llava_qwen2", "molmo", "moondream1", "moondream2", "moondream3",
     "phi3_v", "phi4mm", "phi4-siglip"}
)  # fmt: skip
"""Families whose configuration need not mention a tower."""


def is_vision(config: Mapping[str, Any]) -> bool:
    """Whether the checkpoint takes pictures."""
    if config.get("skip_vision"):
        return False
    inner = config.get("thinker_config")
    if isinstance(inner, Mapping) and is_vision(inner):
        return True
    if str(config.get("model_type", "")).lower() in BY_NAME:
        return True
    return any(config.get(key) for key in (*TOWER_KEYS, *FLAT_KEYS))
