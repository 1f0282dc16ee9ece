"""The families that people run most, one tiny model each."""

from typing import Any

from .base import COMMON, WINDOW, Config, sliding
from .text_hybrid import GATED_DELTA, LFM2
from .vision_parts import GEMMA, IDEFICS, LLAVA, MISTRAL, VOCAB_SIZE, VisionEntry, token_id

TEXT: Config = {**COMMON, "vocab_size": VOCAB_SIZE}
QWEN_IDS: Config = {
    "image_token_id": token_id("<|image_pad|>"),
    "video_token_id": token_id("<|video_pad|>"),
    "vision_start_token_id": token_id("<|vision_start|>"),
    "vision_end_token_id": token_id("<|vision_end|>"),
}
QWEN_MARKUP = "<|vision_start|><|image_pad|><|vision_end|>"
QWEN_PIXELS: Config = {
    "patch_size": 8,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "min_pixels": 256,
    "max_pixels": 96 * 96,
}
QWEN_VISION: Config = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 48,
    "out_hidden_size": 64,
    "num_heads": 2,
    "patch_size": 8,
    "spatial_patch_size": 8,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 32,
    "fullatt_block_indexes": [1],
    "num_position_embeddings": 64,
}
MROPE: Config = {"type": "mrope", "mrope_section": [4, 2, 2]}
SIGLIP: Config = {
    "model_type": "siglip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "patch_size": 8,
    "image_size": 64,
    "num_channels": 3,
    "layer_norm_eps": 1e-6,
}
MEAN_STD: Config = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}


GEMMA4_TEXT: Config = {
    **TEXT,
    **sliding(4, every=2),
    "model_type": "gemma4_text",
    "global_head_dim": 16,
    "vocab_size_per_layer_input": VOCAB_SIZE,
    "hidden_size_per_layer_input": 8,
    "num_kv_shared_layers": 0,
    "use_double_wide_mlp": False,
    "tie_word_embeddings": True,
    "use_bidirectional_attention": "vision",
}
GEMMA4_VISION: Config = {
    "model_type": "gemma4_vision",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 16,
    "patch_size": 8,
    "pooling_kernel_size": 2,
    "default_output_length": 70,
    "position_embedding_size": 64,
}
PIXTRAL_VISION: Config = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "head_dim": 16,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 96,
    "patch_size": 16,
    "rope_theta": 10000.0,
}
PIXTRAL_PIXELS: Config = {
    "image_processor_type": "PixtralImageProcessor",
    "size": {"longest_edge": 96},
    "patch_size": {"height": 16, "width": 16},
    **MEAN_STD,
}
IDEFICS_PIXELS: Config = {
    "size": {"longest_edge": 96},
    "max_image_size": {"longest_edge": 48},
    "do_image_splitting": True,
    **MEAN_STD,
}
IDEFICS_TOKENS = {
    "image_token": "<image>",
    "fake_image_token": "<fake_token_around_image>",
    "global_image_token": "<global-img>",
    "end_of_utterance_token": "<end_of_utterance>",
}


def qwen(name: str, **own: Any) -> VisionEntry:
    config: Config = {"model_type": name, "vocab_size": VOCAB_SIZE, **QWEN_IDS, **own}
    config.setdefault("vision_config", {**QWEN_VISION, "model_type": name})
    return VisionEntry(name, config, QWEN_MARKUP, preprocessor=QWEN_PIXELS)


MAIN: tuple[VisionEntry, ...] = (
    qwen(
        "qwen2_vl",
        **TEXT,
        rope_scaling=MROPE,
        vision_config={
            "model_type": "qwen2_vl",
            "depth": 2,
            "embed_dim": 32,
            "hidden_size": 64,
            "num_heads": 2,
            "patch_size": 8,
            "spatial_patch_size": 8,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "mlp_ratio": 2,
        },
    ),
    qwen("qwen2_5_vl", **TEXT, rope_scaling=MROPE),
    qwen(
        "qwen3_vl",
        text_config={**TEXT, "model_type": "qwen3_vl_text", "rope_scaling": MROPE},
        vision_config={
            **QWEN_VISION,
            "model_type": "qwen3_vl",
            "deepstack_visual_indexes": [0, 1],
        },
    ),
    qwen(
        "qwen3_5",
        text_config={
            **TEXT,
            **GATED_DELTA,
            "model_type": "qwen3_5_text",
            "rope_parameters": {
                "type": "default",
                "mrope_section": [2, 1, 1],
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    VisionEntry(
        "gemma3",
        {
            "model_type": "gemma3",
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 64,
            "image_token_index": token_id("<image_soft_token>"),
            "pad_token_id": 0,
            "text_config": {
                **TEXT,
                "model_type": "gemma3_text",
                "num_hidden_layers": 4,
                "query_pre_attn_scalar": 16,
                "sliding_window": WINDOW,
                "sliding_window_pattern": 2,
                "mm_tokens_per_image": 16,
            },
            "vision_config": SIGLIP,
        },
        "<start_of_image>",
        GEMMA,
        preprocessor={
            "image_processor_type": "Gemma3ImageProcessor",
            "size": {"height": 64, "width": 64},
            "image_seq_length": 16,
            **MEAN_STD,
        },
        processor={"processor_class": "Gemma3Processor", "image_seq_length": 16},
        extra_tokens={
            "image_token": "<image_soft_token>",
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
        },
    ),
    VisionEntry(
        "llava",
        {
            "model_type": "llava",
            "vocab_size": VOCAB_SIZE,
            "image_token_index": token_id("<image>"),
            "vision_feature_layer": -2,
            "text_config": {**TEXT, "model_type": "llama"},
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
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": 48},
            "crop_size": {"height": 48, "width": 48},
            **MEAN_STD,
        },
        processor={
            "processor_class": "LlavaProcessor",
            "patch_size": 8,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
        },
    ),
)
MAIN += (
    VisionEntry(
        "gemma4",
        {
            "model_type": "gemma4",
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 64,
            "image_token_id": token_id("<|image|>"),
            "audio_token_id": token_id("<|audio|>"),
            "video_token_id": token_id("<|video|>"),
            "boi_token_id": token_id("<|image>"),
            "eoi_token_id": token_id("<image|>"),
            "vision_soft_tokens_per_image": 70,
            "audio_config": None,
            "text_config": GEMMA4_TEXT,
            "vision_config": GEMMA4_VISION,
        },
        "<|image|>",
        GEMMA,
        processor={
            "processor_class": "Gemma4Processor",
            "image_seq_length": 70,
            "image_processor": {
                "image_processor_type": "Gemma4ImageProcessor",
                "patch_size": 8,
                "max_soft_tokens": 70,
                "pooling_kernel_size": 2,
            },
        },
        extra_tokens={
            "image_token": "<|image|>",
            "boi_token": "<|image>",
            "eoi_token": "<image|>",
            "audio_token": "<|audio|>",
        },
    ),
    VisionEntry(
        "lfm2_vl",
        {
            "model_type": "lfm2_vl",
            "image_token_id": token_id("<image>"),
            "downsample_factor": 2,
            "encoder_patch_size": 8,
            "max_image_tokens": 32,
            "min_image_tokens": 4,
            "tile_size": 64,
            "projector_hidden_size": 48,
            "text_config": {**TEXT, **LFM2, "model_type": "lfm2", "block_ff_dim": 96},
            "vision_config": {
                **SIGLIP,
                "model_type": "siglip2_vision_model",
                "num_patches": 64,
            },
        },
        "<image>",
        preprocessor={
            "image_processor_type": "Lfm2VlImageProcessorFast",
            "downsample_factor": 2,
            "encoder_patch_size": 8,
            "max_image_tokens": 32,
            "min_image_tokens": 4,
            "tile_size": 64,
            **MEAN_STD,
        },
        processor={"processor_class": "Lfm2VlProcessor", "use_image_special_tokens": True},
        extra_tokens={
            "image_token": "<image>",
            "image_start_token": "<|image_start|>",
            "image_end_token": "<|image_end|>",
            "image_thumbnail": "<|img_thumbnail|>",
        },
    ),
    VisionEntry(
        "pixtral",
        {
            "model_type": "pixtral",
            "vocab_size": VOCAB_SIZE,
            "image_token_index": token_id("[IMG]"),
            "text_config": {**TEXT, "model_type": "mistral"},
            "vision_config": PIXTRAL_VISION,
        },
        "[IMG]",
        MISTRAL,
        preprocessor=PIXTRAL_PIXELS,
        processor={"processor_class": "PixtralProcessor", "patch_size": 16},
    ),
    VisionEntry(
        "mistral3",
        {
            "model_type": "mistral3",
            "vocab_size": VOCAB_SIZE,
            "image_token_index": token_id("[IMG]"),
            "spatial_merge_size": 2,
            "text_config": {
                **TEXT,
                "model_type": "ministral3",
                "rope_parameters": {
                    "rope_theta": 10000.0,
                    "original_max_position_embeddings": 4096,
                    "llama_4_scaling_beta": 0.1,
                },
                **sliding(3, every=2),
            },
            "vision_config": {**PIXTRAL_VISION, "patch_size": 8},
        },
        "[IMG]",
        MISTRAL,
        preprocessor={**PIXTRAL_PIXELS, "patch_size": {"height": 8, "width": 8}},
        processor={
            "processor_class": "PixtralProcessor",
            "patch_size": 8,
            "spatial_merge_size": 2,
        },
    ),
    VisionEntry(
        "idefics3",
        {
            "model_type": "idefics3",
            "vocab_size": VOCAB_SIZE,
            "image_token_id": token_id("<image>"),
            "scale_factor": 2,
            "text_config": {**TEXT, "model_type": "llama"},
            "vision_config": {**SIGLIP, "image_size": 48},
        },
        "<image>",
        IDEFICS,
        preprocessor={**IDEFICS_PIXELS, "image_processor_type": "Idefics3ImageProcessor"},
        processor={"processor_class": "Idefics3Processor", "image_seq_len": 9},
        extra_tokens=IDEFICS_TOKENS,
    ),
    VisionEntry(
        "smolvlm",
        {
            "model_type": "smolvlm",
            "vocab_size": VOCAB_SIZE,
            "image_token_id": token_id("<image>"),
            "scale_factor": 2,
            "text_config": {**TEXT, "model_type": "llama"},
            "vision_config": {**SIGLIP, "image_size": 48},
        },
        "<image>",
        IDEFICS,
        preprocessor={**IDEFICS_PIXELS, "image_processor_type": "SmolVLMImageProcessor"},
        processor={"processor_class": "SmolVLMProcessor", "image_seq_len": 9},
        extra_tokens=IDEFICS_TOKENS,
    ),
)
VISION_BY_NAME = {entry.name: entry for entry in MAIN}
