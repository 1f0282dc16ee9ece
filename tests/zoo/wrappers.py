"""Multimodal modules of mlx-lm: they run the text model that their config nests."""

from .base import Config, Entry, table, wrapper
from .text_dense import DENSE
from .text_hybrid import HYBRID, KIMI_K3_TEXT, PRISM_TEXT, QWEN35_MOE_TEXT, QWEN35_TEXT
from .text_moe import EXPERTS
from .text_window import (
    GEMMA3N_TEXT,
    LLAMA4_TEXT,
    MINIMAX_M3_TEXT,
    UNSCALED,
    WINDOWED,
)


def _text(config: Config, gains: dict[str, float] | None = None) -> Entry:
    """A nested text config that is not a module of its own."""
    return Entry("", "", config, gains=gains or {})


def _packed(path: str, *, block: int, embedding: bool = False) -> Config:
    return {"path": path, "block": block, "embedding": embedding, "dtype": "float16"}


PRISM = wrapper(
    "prism_hadamard_qwen35",
    _text(PRISM_TEXT),
    schema_version=2,
    tensor_namespace="mlx-vlm-qwen3_5",
    gdn_activation_layout="grouped",
    quantization={"bits": 2, "group_size": 128, "mode": "affine"},
    modules=[
        _packed("model.layers.0.mlp.down_proj", block=512),
        _packed("model.layers.1.mlp.up_proj", block=0),
        _packed("model.layers.3.self_attn.q_proj", block=0),
    ],
    notes="qwen3_5 with 2-bit rotated weights in the listed modules",
)

WRAPPERS = table(
    wrapper("gemma3", WINDOWED["gemma3_text"]),
    wrapper("gemma3n", _text(GEMMA3N_TEXT, UNSCALED), notes="KV-shared layers have no cache"),
    wrapper("gemma4", WINDOWED["gemma4_text"], notes="KV-shared layers have no cache"),
    wrapper("kimi_k25", EXPERTS["deepseek_v3"]),
    wrapper("kimi_k3", _text(KIMI_K3_TEXT)),
    wrapper("kimi_vl", EXPERTS["deepseek_v3"]),
    wrapper("lfm2-vl", HYBRID["lfm2"]),
    wrapper("llama4", _text(LLAMA4_TEXT), notes="chunked local attention"),
    wrapper("minimax_m3_vl", _text(MINIMAX_M3_TEXT), notes="block-sparse attention with an index"),
    wrapper("mistral3", DENSE["llama"]),
    wrapper(
        "mistral3-ministral",
        WINDOWED["ministral3"],
        module="mistral3",
        notes="the wrapper has no make_cache, so window layers get a plain KVCache",
    ),
    wrapper("mistral3-mistral4", EXPERTS["mistral4"], module="mistral3"),
    wrapper("pixtral", DENSE["llama"]),
    PRISM,
    wrapper("qwen2_vl", DENSE["qwen2"]),
    wrapper("qwen3_5", _text(QWEN35_TEXT)),
    wrapper("qwen3_5_moe", _text(QWEN35_MOE_TEXT)),
    wrapper("qwen3_vl", DENSE["qwen3"]),
    wrapper("qwen3_vl_moe", EXPERTS["qwen3_moe"]),
)
