"""Dense models whose every layer attends to everything (plus those that reuse another's KV)."""

from .base import MLA, entry, table

GPT = {
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_ctx": 4096,
    "n_positions": 4096,
    "n_inner": 128,
}

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}

YARN_ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}

# phi3small writes -inf to fixed ids up to 100351 of its logits; a smaller vocabulary would be
# written out of bounds.
PHI3SMALL_VOCAB = 100352

DENSE = table(
    entry("llama"),
    entry("llama-tied", module="llama", tie_word_embeddings=True, rope_scaling=LLAMA3_ROPE),
    entry("llama-yarn", module="llama", rope_scaling=YARN_ROPE),
    entry(
        "afm7",
        hidden_dim=64,
        num_layers=4,
        num_kv_reuse_layers=2,
        num_heads=4,
        num_kv_heads=2,
        hidden_dim_scale_factor=2.0,
        # Its 8-bit rounding of keys and values then spans about -4 to 4.
        gains={"quant_key_scale": 0.03, "quant_value_scale": 0.03},
        notes="the last two layers have no KV: they read the KV of the last layer that has one",
    ),
    entry("apertus", post_norm=False, qk_norm=True),
    entry("cohere", logit_scale=1.0, use_qk_norm=False),
    entry("cohere-qknorm", module="cohere", logit_scale=1.0, use_qk_norm=True),
    entry("ernie4_5", use_bias=False),
    entry("exaone", num_layers=3),
    entry("gemma"),
    entry(
        "gemma2",
        attn_logit_softcapping=50.0,
        final_logit_softcapping=30.0,
        query_pre_attn_scalar=16,
        notes="mlx-lm runs every layer with full attention, unlike the reference",
    ),
    entry("glm"),
    entry("glm4", partial_rotary_factor=0.5),
    entry("gpt2", GPT),
    entry("gpt_bigcode", GPT),
    entry("gpt_neox", rotary_emb_base=10000, rotary_pct=0.25, num_key_value_heads=4),
    entry("gptj", GPT, rotary_dim=8),
    entry(
        "granite",
        logits_scaling=1.0,
        attention_multiplier=0.25,
        embedding_multiplier=1.0,
        residual_multiplier=1.0,
    ),
    entry("helium"),
    entry(
        "hunyuan_v1_dense",
        rope_scaling={"alpha": 2.0, "factor": 1.0, "type": "dynamic"},
    ),
    entry("internlm2"),
    entry("internlm2-dynamic", module="internlm2", rope_scaling={"type": "dynamic", "factor": 2.0}),
    entry("internlm3"),
    entry("lille-130m", n_embd=64, n_head=4, n_kv_heads=2, n_layer=3, block_size=4096),
    entry("mimo", num_nextn_predict_layers=0),
    entry("minicpm", dim_model_base=64, scale_depth=1.4, scale_emb=1.0),
    entry(
        "minicpm3",
        MLA,
        dim_model_base=64,
        scale_depth=1.4,
        scale_emb=1.0,
        rope_scaling={
            "type": "longrope",
            "original_max_position_embeddings": 1024,
            "short_factor": [1.0] * 4,
            "long_factor": [1.0] * 4,
        },
    ),
    entry(
        "nanbeige",
        num_hidden_layers=2,
        num_loops=2,
        notes="the layers run twice; the cache list holds one cache per layer and loop",
    ),
    entry("nanochat"),
    entry("nemotron", hidden_act="relu2"),
    entry(
        "nemotron-nas",
        num_hidden_layers=4,
        block_configs=[
            {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"no_op": True}, "ffn": {"ffn_mult": 1.0}},
            {"attention": {"n_heads_in_group": 4}, "ffn": {"replace_with_linear": True}},
            {"attention": {"n_heads_in_group": 2}, "ffn": {"no_op": True}},
        ],
        notes="a layer without attention has no cache, so the list is shorter than the layers",
    ),
    entry("olmo2"),
    entry(
        "openelm",
        num_transformer_layers=3,
        model_dim=64,
        ffn_dim_divisor=16,
        num_query_heads=[4, 4, 6],
        num_kv_heads=[1, 2, 3],
        ffn_multipliers=[1.0, 1.5, 2.0],
        notes="the number of KV heads differs from layer to layer",
    ),
    entry("phi", num_key_value_heads=4, partial_rotary_factor=0.5),
    entry("phi3"),
    entry(
        "phi3-longrope",
        module="phi3",
        rope_scaling={
            "type": "longrope",
            "short_factor": [1.0] * 8,
            "long_factor": [1.5] * 8,
        },
        original_max_position_embeddings=1024,
    ),
    entry(
        "phi3small",
        vocab_size=PHI3SMALL_VOCAB,
        hidden_size=32,
        num_attention_heads=4,
        ff_intermediate_size=64,
        gegelu_limit=20.0,
        dense_attention_every_n_layers=2,
        blocksparse_block_size=32,
        blocksparse_num_local_blocks=2,
        blocksparse_vert_stride=2,
        notes="block-sparse layers; needs its own 100K vocabulary, see PHI3SMALL_VOCAB",
    ),
    entry("plamo", n_shared_head=2),
    entry("qwen", kv_channels=16, num_key_value_heads=4),
    entry("qwen2"),
    entry("qwen3"),
    entry("seed_oss"),
    entry("smollm3", num_hidden_layers=4, no_rope_layer_interval=2),
    entry("stablelm", use_qkv_bias=True, partial_rotary_factor=0.25),
    entry(
        "stablelm-parallel",
        module="stablelm",
        use_qkv_bias=False,
        partial_rotary_factor=0.25,
        use_parallel_residual=True,
        qk_layernorm=True,
    ),
    entry("starcoder2"),
    entry("talkie", gains={"a_g": 3.0}),
    entry("telechat3"),
    entry(
        "youtu_llm",
        MLA,
        notes="multi-head latent attention without experts",
    ),
    entry(
        "llama4_text",
        num_hidden_layers=4,
        intermediate_size_mlp=96,
        no_rope_layers=[1, 1, 1, 0],
        use_qk_norm=True,
    ),
)
