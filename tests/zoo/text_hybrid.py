"""Models with recurrent layers: state space, gated delta, linear attention, convolution."""

from .base import COMMON, MLA, MOE, WINDOW, entry, table

STATE = 32
"""mlx-lm's Metal kernels divide a state among 32 threads: less would leave them nothing."""

MAMBA2 = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_d_state": STATE,
    "mamba_d_conv": 4,
    "mamba_n_groups": 1,
    "mamba_proj_bias": False,
    "mamba_conv_bias": True,
}

GATED_DELTA = {
    "num_hidden_layers": 4,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
    "full_attention_interval": 4,
    "partial_rotary_factor": 0.5,
}

GRANITE_HYBRID = {
    **MAMBA2,
    "mamba_expand": 1,
    "num_hidden_layers": 4,
    "embedding_multiplier": 1.0,
    "attention_multiplier": 0.25,
    "logits_scaling": 1.0,
    "residual_multiplier": 1.0,
    "layer_types": ["mamba", "mamba", "attention", "mamba"],
}

KIMI_LINEAR = {
    **MOE,
    **MLA,
    "num_hidden_layers": 4,
    "model_max_length": 4096,
    "linear_attn_config": {
        "kda_layers": [1, 2, 3],
        "full_attn_layers": [4],
        "num_heads": 2,
        "head_dim": 32,
        "short_conv_kernel_size": 4,
    },
}

KIMI_K3_TEXT = {
    **COMMON,
    **KIMI_LINEAR,
    "model_type": "kimi_linear",
    "hidden_act": "situ",
    "activation_situ_beta": 1.0,
    "activation_situ_linear_beta": 1.0,
    "attn_res_block_size": 2,
    "mla_use_output_gate": True,
    "linear_attn_config": {**KIMI_LINEAR["linear_attn_config"], "gate_lower_bound": -5.0},
}

LFM2 = {
    "num_hidden_layers": 4,
    "conv_bias": False,
    "conv_L_cache": 3,
    "block_dim": 64,
    "block_multiple_of": 16,
    "block_ffn_dim_multiplier": 1.0,
    "block_auto_adjust_ff_dim": False,
    "layer_types": ["conv", "full_attention", "conv", "full_attention"],
}

NEMOTRON_H = {
    "mamba_num_heads": 4,
    "mamba_head_dim": 16,
    "mamba_proj_bias": False,
    "ssm_state_size": STATE,
    "conv_kernel": 4,
    "n_groups": 1,
    "use_bias": False,
    "use_conv_bias": True,
}

QWEN35_TEXT = {
    **COMMON,
    **GATED_DELTA,
    "model_type": "qwen3_5_text",
    "rope_parameters": {
        "type": "default",
        "mrope_section": [2, 1, 1],
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
    },
}

QWEN35_MOE_TEXT = {**QWEN35_TEXT, **MOE, "model_type": "qwen3_5_moe_text"}

PRISM_TEXT = {
    **QWEN35_TEXT,
    "hidden_size": 128,
    "intermediate_size": 512,
    "head_dim": 32,
}

HYBRID = table(
    entry(
        "baichuan_m1",
        num_hidden_layers=4,
        sliding_window=WINDOW,
        sliding_window_layers=[1, 3],
        num_swa_attention_heads=4,
        num_swa_key_value_heads=4,
        conv_window=2,
        notes="each layer has a CacheList: last key and value of the convolution, and KV",
    ),
    entry(
        "bailing_hybrid",
        MOE,
        MLA,
        num_hidden_layers=4,
        layer_group_size=2,
        group_norm_size=2,
        partial_rotary_factor=0.5,
    ),
    entry(
        "bailing_moe_linear",
        MOE,
        num_hidden_layers=4,
        num_key_value_heads=4,
        layer_group_size=2,
        group_norm_size=2,
        use_qk_norm=True,
    ),
    entry(
        "bailing_moe_v3",
        MOE,
        MLA,
        num_hidden_layers=4,
        num_experts=8,
        n_group=4,
        topk_group=2,
        moe_shared_expert_intermediate_size=48,
        layer_group_size=4,
        head_dim=32,
    ),
    entry(
        "falcon_h1",
        MAMBA2,
        mamba_d_ssm=64,
        mamba_chunk_size=16,
        lm_head_multiplier=1.0,
        notes="attention and state space side by side in each layer: a CacheList of both",
    ),
    entry(
        "gear",
        num_hidden_layers=4,
        sliding_window=WINDOW,
        layer_types=["conv_mixer", "sliding_attention", "conv_mixer", "full_attention"],
        notes="three kinds of cache in one model",
    ),
    entry(
        "gear-softcap",
        module="gear",
        num_hidden_layers=4,
        sliding_window=WINDOW,
        layer_types=["conv_mixer", "sliding_attention", "conv_mixer", "full_attention"],
        attn_logit_softcapping=50.0,
    ),
    entry("granitemoehybrid", MOE, GRANITE_HYBRID),
    entry("granitemoehybrid-dense", GRANITE_HYBRID, module="granitemoehybrid"),
    entry(
        "jamba",
        MOE,
        num_hidden_layers=4,
        attn_layer_offset=1,
        attn_layer_period=2,
        expert_layer_offset=1,
        expert_layer_period=2,
        mamba_d_conv=4,
        mamba_d_state=8,
        mamba_expand=2,
    ),
    entry("kimi_linear", KIMI_LINEAR),
    entry("lfm2", LFM2),
    entry("lfm2_moe", MOE, LFM2, use_expert_bias=True, num_dense_layers=1),
    entry(
        "mamba",
        intermediate_size=128,
        state_size=8,
        conv_kernel=4,
        use_bias=False,
        use_conv_bias=True,
        time_step_rank=4,
    ),
    entry(
        "mamba-falcon",
        module="mamba",
        model_type="falcon_mamba",
        intermediate_size=128,
        state_size=8,
        conv_kernel=4,
        use_bias=False,
        use_conv_bias=True,
        time_step_rank=4,
    ),
    entry(
        "mamba2",
        num_heads=8,
        intermediate_size=128,
        state_size=STATE,
        conv_kernel=4,
        n_groups=2,
        use_bias=False,
        use_conv_bias=True,
        time_step_limit=[0.001, 100.0],
        time_step_rank=4,
    ),
    entry(
        "nemotron_h",
        MOE,
        NEMOTRON_H,
        hybrid_override_pattern=["M", "-", "*", "E", "M"],
        num_hidden_layers=5,
        moe_shared_expert_intermediate_size=48,
        notes="layers without a mixer have no cache, so the list is shorter than the layers",
    ),
    entry(
        "olmo_hybrid",
        GATED_DELTA,
        linear_num_key_heads=4,
        linear_allow_neg_eigval=True,
        layer_types=["linear_attention"] * 3 + ["full_attention"],
    ),
    entry(
        "plamo2",
        num_hidden_layers=4,
        hidden_size_per_head=16,
        mamba_d_state=STATE,
        mamba_num_heads=4,
        mamba_step=2,
        attention_window_size=WINDOW,
    ),
    entry("qwen3_next", MOE, GATED_DELTA),
    entry(
        "recurrent_gemma",
        num_hidden_layers=3,
        num_key_value_heads=1,
        conv1d_width=4,
        logits_soft_cap=30.0,
        attention_window_size=WINDOW,
        block_types=["recurrent", "recurrent", "attention"],
    ),
    entry(
        "rwkv7",
        head_dim=STATE,
        a_low_rank_dim=8,
        v_low_rank_dim=8,
        gate_low_rank_dim=8,
        decay_low_rank_dim=8,
    ),
)
