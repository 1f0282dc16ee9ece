"""Further families of mlx-vlm, tested with -m sweep."""

from typing import Any

from .base import MLA, MOE, WINDOW, Config
from .text_hybrid import GATED_DELTA
from .vision_main import (
    GEMMA4_TEXT,
    MEAN_STD,
    MROPE,
    QWEN_VISION,
    SIGLIP,
    TEXT,
    VISION_BY_NAME,
    qwen,
)
from .vision_parts import CHATML, LLAVA, VOCAB_SIZE, VisionEntry, token_id

PINPOINTS = [[48, 48], [48, 96], [96, 48]]


def _like(name: str, base: str, *, config: Config, **own: Any) -> VisionEntry:
    """Another configuration of a family."""
    from dataclasses import replace

    entry = VISION_BY_NAME[base]
    return replace(entry, name=name, config={**entry.config, **config}, **own)


MORE: tuple[VisionEntry, ...] = (
    qwen(
        "qwen3_vl_moe",
        text_config={**TEXT, **MOE, "model_type": "qwen3_vl_moe_text", "rope_scaling": MROPE},
        vision_config={
            **QWEN_VISION,
            "model_type": "qwen3_vl_moe",
            "deepstack_visual_indexes": [0, 1],
        },
    ),
    qwen(
        "qwen3_5_moe",
        text_config={
            **TEXT,
            **MOE,
            **GATED_DELTA,
            "model_type": "qwen3_5_moe_text",
            "rope_parameters": {
                "type": "default",
                "mrope_section": [2, 1, 1],
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    _like(
        "gemma4-causal",
        "gemma4",
        config={
            "text_config": {
                **GEMMA4_TEXT,
                "use_bidirectional_attention": None,
                "num_hidden_layers": 6,
                "layer_types": ["sliding_attention", "full_attention"] * 3,
                "num_kv_shared_layers": 2,
            }
        },
        notes="as the small ones are: pictures are causal, the last layers share their KV",
    ),
    VisionEntry(
        "glm4v",
        {
            "model_type": "glm4v",
            "vocab_size": VOCAB_SIZE,
            "image_token_id": token_id("<|image|>"),
            "image_token_index": token_id("<|image|>"),
            "video_token_id": token_id("<|video|>"),
            "vision_start_token_id": token_id("<|begin_of_image|>"),
            "vision_end_token_id": token_id("<|end_of_image|>"),
            "text_config": {
                **TEXT,
                "model_type": "glm4v_text",
                "eos_token_id": [token_id("<|im_end|>")],
                "partial_rotary_factor": 0.5,
                "rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1]},
            },
            "vision_config": {**QWEN_VISION, "model_type": "glm4v_vision", "image_size": 64},
        },
        "<|begin_of_image|><|image|><|end_of_image|>",
        preprocessor={
            "image_processor_type": "Glm4vImageProcessor",
            "patch_size": 8,
            "merge_size": 2,
            "temporal_patch_size": 2,
            "size": {"shortest_edge": 256, "longest_edge": 96 * 96},
            **MEAN_STD,
        },
    ),
    VisionEntry(
        "aya_vision",
        {
            "model_type": "aya_vision",
            "image_token_index": token_id("<|IMG_PATCH|>"),
            "downsample_factor": 2,
            "alignment_intermediate_size": 96,
            "text_config": {
                **TEXT,
                "model_type": "cohere2",
                "num_hidden_layers": 4,
                "sliding_window": WINDOW,
                "sliding_window_pattern": 2,
                "logit_scale": 1.0,
            },
            "vision_config": {**SIGLIP, "image_size": 32},
        },
        "<image>",
        preprocessor={
            "image_processor_type": "GotOcr2ImageProcessor",
            "size": {"height": 32, "width": 32},
            "max_patches": 2,
            **MEAN_STD,
        },
        processor={
            "processor_class": "AyaVisionProcessor",
            "patch_size": 8,
            "img_size": 32,
            "downsample_factor": 2,
            "image_token": "<image>",
        },
    ),
    VisionEntry(
        "internvl_chat",
        {
            "model_type": "internvl_chat",
            "vocab_size": VOCAB_SIZE,
            "image_token_index": token_id("<IMG_CONTEXT>"),
            "text_config": {**TEXT, "model_type": "qwen3"},
            "vision_config": {**SIGLIP, "model_type": "intern_vit_6b"},
        },
        "<image>",
        preprocessor={"image_size": 64},
    ),
    VisionEntry(
        "kimi_vl",
        {
            "model_type": "kimi_vl",
            "vocab_size": VOCAB_SIZE,
            "media_placeholder_token_id": token_id("<|media_pad|>"),
            "text_config": {**TEXT, **MOE, **MLA, "model_type": "deepseek_v3"},
            "vision_config": {
                "model_type": "moonvit",
                "depth": 2,
                "embed_dim": 32,
                "hidden_size": 32,
                "num_heads": 2,
                "patch_size": 8,
                "intermediate_size": 48,
                "init_pos_emb_height": 8,
                "init_pos_emb_width": 8,
                "spatial_merge_size": 2,
            },
        },
        "<|media_start|>image<|media_content|><|media_pad|><|media_end|>",
        preprocessor={
            "patch_size": 8,
            "merge_kernel_size": [2, 2],
            "in_token_limit": 64,
            **MEAN_STD,
        },
    ),
    VisionEntry(
        "llava_onevision",
        {
            "model_type": "llava_onevision",
            "vocab_size": VOCAB_SIZE,
            "image_token_index": token_id("<image>"),
            "video_token_index": token_id("<|video|>"),
            "image_grid_pinpoints": PINPOINTS,
            "vision_aspect_ratio": "anyres_max_9",
            "text_config": {**TEXT, "model_type": "qwen2"},
            "vision_config": {**SIGLIP, "image_size": 48},
        },
        "<image>",
        preprocessor={
            "image_processor_type": "LlavaOnevisionImageProcessor",
            "size": {"height": 48, "width": 48},
            "image_grid_pinpoints": PINPOINTS,
            **MEAN_STD,
        },
        processor={
            "processor_class": "LlavaOnevisionProcessor",
            "num_image_tokens": 36,
            "vision_feature_select_strategy": "full",
        },
    ),
    VisionEntry(
        "paddleocr_vl",
        {
            **TEXT,
            "model_type": "paddleocr_vl",
            "hidden_size": 1024,  # hard-coded in the projector
            "image_token_id": token_id("<|image_pad|>"),
            "video_token_id": token_id("<|video_pad|>"),
            "vision_start_token_id": token_id("<|vision_start|>"),
            "vision_end_token_id": token_id("<|vision_end|>"),
            "use_bias": False,
            "rope_scaling": MROPE,
            "vision_config": {**SIGLIP, "model_type": "paddleocr_vl", "spatial_merge_size": 2},
        },
        "<|vision_start|><|image_pad|><|vision_end|>",
        CHATML,
        preprocessor={
            "patch_size": 8,
            "merge_size": 2,
            "temporal_patch_size": 1,
            "min_pixels": 256,
            "max_pixels": 96 * 96,
            **MEAN_STD,
        },
        extra_tokens={"image_token": "<|image_pad|>"},
    ),
)

REFUSED: tuple[VisionEntry, ...] = (
    VisionEntry(
        "llava_next",
        {
            "model_type": "llava_next",
            "vocab_size": VOCAB_SIZE,
            "image_token_index": token_id("<image>"),
            "text_config": {**TEXT, "model_type": "mistral"},
            "vision_config": {
                **SIGLIP,
                "model_type": "clip_vision_model",
                "projection_dim": 32,
                "image_size": 48,
                "vocab_size": 32,
            },
        },
        "<image>\n",
        LLAVA,
        preprocessor={
            "image_processor_type": "LlavaNextImageProcessor",
            "size": {"shortest_edge": 48},
            "crop_size": {"height": 48, "width": 48},
            "image_grid_pinpoints": PINPOINTS,
            **MEAN_STD,
        },
        processor={
            "processor_class": "LlavaNextProcessor",
            "patch_size": 8,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
        notes="the model puts in another number of features than there are placeholders",
    ),
)
"""Families that cannot be driven in chunks: recognised, and refused at load."""
