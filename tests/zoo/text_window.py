"""Models with layers that see a window, a chunk or selected parts of the context."""

from .base import COMMON, MLA, MOE, WINDOW, entry, sliding, table

ROPE_BY_KIND = {
    "full_attention": {"rope_type": "default", "rope_theta": 1000000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
}

# The original length is short, so that prompts of the tests reach the query scaling beyond it.
MINISTRAL_ROPE = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "llama_4_scaling_beta": 0.1,
}

# These attend without a scale factor: sharpened further, they amplify rounding a thousandfold.
UNSCALED = {"q_norm": 0.25}

GEMMA3N_TEXT = {
    **COMMON,
    **sliding(6, every=2),
    "model_type": "gemma3n_text",
    "num_kv_shared_layers": 2,
    "vocab_size_per_layer_input": COMMON["vocab_size"],
    "rope_local_base_freq": 10000.0,
    "rope_theta": 1000000.0,
    "final_logit_softcapping": 30.0,
    "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0, 0.0, 0.0],
    "hidden_size_per_layer_input": 16,
    "altup_num_inputs": 2,
    "altup_coef_clip": 120.0,
    "altup_correct_scale": True,
    "altup_active_idx": 0,
    "laurel_rank": 8,
}

GEMMA4 = {
    "global_head_dim": 32,
    "vocab_size_per_layer_input": COMMON["vocab_size"],
    "hidden_size_per_layer_input": 16,
    "num_kv_shared_layers": 2,
    "sliding_window_pattern": 2,
    "tie_word_embeddings": True,
}

GEMMA4_MOE = {
    **GEMMA4,
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 48,
    "attention_k_eq_v": True,
    "num_global_key_value_heads": 1,
}

LLAMA4_TEXT = {
    **COMMON,
    "model_type": "llama4_text",
    "num_hidden_layers": 4,
    "attention_chunk_size": WINDOW,
    "interleave_moe_layer_step": 2,
    "intermediate_size_mlp": 96,
    "num_experts_per_tok": 1,
    "num_local_experts": 4,
    "rope_scaling": None,
    "use_qk_norm": True,
}

MUSE_SPARK_TEXT = {
    **COMMON,
    **sliding(4, every=4),
    "post_norm_eps": 1e-5,
    "rope_parameters": {"rope_theta": 10000.0},
    "layer_rope_theta": [10000.0, 10000.0, 10000.0, 0],
    "final_logit_softcapping": 20.0,
    "output_multiplier": 0.5,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_hidden_size": 32,
    "moe_intermediate_size": 48,
    "qk_scale_factor": 2.0,
}

MINIMAX_M3_TEXT = {
    **COMMON,
    **MOE,
    "num_hidden_layers": 4,
    "dense_intermediate_size": 96,
    "intermediate_size": 48,
    "rotary_dim": 8,
    "moe_layer_freq": [0, 1, 1, 1],
    "sparse_attention_config": {
        "sparse_num_index_heads": 2,
        "sparse_index_dim": 16,
        "sparse_block_size": 16,
        "sparse_topk_blocks": 3,
        "sparse_local_block": 1,
        "sparse_attention_freq": [0, 1, 1, 1],
    },
}

SPARSE_INDEX = {"index_head_dim": 16, "index_n_heads": 2, "index_topk": WINDOW}

WINDOWED = table(
    entry("llama-sliding", sliding(4, every=2), module="llama"),
    entry("afmoe", MOE, sliding(4, every=4), num_dense_layers=1, n_group=1, topk_group=1),
    entry(
        "cohere2",
        logit_scale=1.0,
        num_hidden_layers=4,
        sliding_window=WINDOW,
        sliding_window_pattern=4,
    ),
    entry(
        "deepseek_v32",
        MOE,
        MLA,
        SPARSE_INDEX,
        notes="two caches per layer: latent KV, and the keys of the sparse index",
    ),
    entry(
        "deepseek_v41",
        MOE,
        num_hidden_layers=5,
        q_lora_rank=32,
        head_dim=32,
        qk_rope_head_dim=8,
        o_groups=2,
        o_lora_rank=16,
        sliding_window=WINDOW,
        compress_ratios=[0, 1, 1, 4, 4],
        kv_source_layer_ids=[1, 3],
        index_source_layer_ids=[1, 3],
        candidate_source_layer_id=3,
        candidate_topk_blocks=2,
        candidate_block_size=8,
        index_n_heads=2,
        index_head_dim=32,
        index_topk=16,
        rms_norm_eps=1e-6,
        notes="its own LayerCache: window, compressed groups, index keys and an open group",
    ),
    entry(
        "exaone4",
        sliding(4, every=4),
        rope_scaling={"rope_type": "default"},
        sliding_window_pattern="LLLG",
    ),
    entry("exaone_moe", MOE, sliding(4, every=4), is_moe_layer=[False, True, True, True]),
    entry(
        "gemma3_text",
        num_hidden_layers=4,
        sliding_window=WINDOW,
        sliding_window_pattern=2,
        query_pre_attn_scalar=16,
    ),
    entry(
        "gemma4_text",
        GEMMA4,
        sliding(6, every=2),
        notes="the last two layers reuse the KV of earlier layers and have no cache",
        gains=UNSCALED,
    ),
    entry("gemma4_text-moe", GEMMA4_MOE, sliding(4, every=2), module="gemma4_text", gains=UNSCALED),
    entry(
        "glm_moe_dsa",
        MOE,
        MLA,
        SPARSE_INDEX,
        rope_parameters={"rope_theta": 10000.0, "rope_type": "default"},
    ),
    entry("gpt_oss", MOE, sliding(4, every=2), rope_scaling=None),
    entry(
        "iquestloopcoder",
        num_hidden_layers=2,
        loop_num=2,
        loop_window_size=WINDOW,
        notes="two passes over the layers: full caches for the first, window caches for the second",
    ),
    entry(
        "laguna",
        MOE,
        sliding(4, every=4),
        rope_parameters=ROPE_BY_KIND,
        num_attention_heads_per_layer=[4, 4, 4, 2],
        mlp_layer_types=["dense", "sparse", "sparse", "sparse"],
    ),
    entry("mellum", MOE, sliding(4, every=4), rope_parameters=ROPE_BY_KIND),
    entry(
        "mimo_v2_flash",
        MOE,
        num_hidden_layers=4,
        hybrid_layer_pattern=[0, 1, 1, 0],
        moe_layer_freq=[0, 1, 1, 1],
        add_swa_attention_sink_bias=True,
        add_full_attention_sink_bias=False,
        sliding_window_size=WINDOW,
        layernorm_epsilon=1e-5,
        swa_rope_theta=10000.0,
        swa_num_attention_heads=4,
        swa_num_key_value_heads=4,
        v_head_dim=8,
        swa_head_dim=16,
        swa_v_head_dim=8,
        partial_rotary_factor=0.5,
    ),
    entry("ministral3", sliding(4, every=2), rope_parameters=MINISTRAL_ROPE),
    entry(
        "muse_glimmer",
        sliding(4, every=4),
        post_norm_eps=1e-5,
        qk_scale_factor=2.0,
        output_multiplier=0.5,
    ),
    entry("olmo3", sliding(4, every=4)),
    entry("plamo3", num_hidden_layers=4, sliding_window=WINDOW, sliding_window_pattern=4),
    entry("spark2_5", sliding(4, every=4), rope_parameters=ROPE_BY_KIND),
    entry(
        "step3p5",
        sliding(4, every=4),
        num_attention_groups=2,
        attention_other_setting={"num_attention_heads": 4, "num_attention_groups": 1},
        moe_num_experts=4,
        moe_top_k=2,
        moe_intermediate_size=48,
        share_expert_dim=48,
        moe_layers_enum="1,2,3",
    ),
)
