"""Mixture-of-experts models with full attention, among them multi-head latent attention."""

from .base import MLA, MOE, VOCAB_SIZE, entry, table

DEEPSEEK_YARN = {
    "type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 1024,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}

LONGCAT = {
    **MLA,
    "attention_method": "MLA",
    "zero_expert_type": "identity",
    "ffn_hidden_size": 96,
    "moe_topk": 2,
    "expert_ffn_hidden_size": 48,
    "n_routed_experts": 4,
    "zero_expert_num": 2,
    "num_layers": 2,
    "routed_scaling_factor": 1.0,
    "mla_scale_q_lora": True,
    "mla_scale_kv_lora": True,
}

EXPERTS = table(
    entry("Klear", MOE),
    entry("bailing_moe", MOE),
    entry("bailing_moe-group", MOE, module="bailing_moe", num_experts=8, n_group=4, topk_group=2, use_qk_norm=True, score_function="sigmoid", moe_router_enable_expert_bias=True),
    entry(
        "dbrx",
        d_model=64,
        n_layers=3,
        n_heads=4,
        ffn_config={"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
        attn_config={"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
    ),
    entry("deepseek", MOE),
    entry("deepseek_v2", MOE, MLA, topk_method="greedy", rope_scaling=DEEPSEEK_YARN),
    entry("deepseek_v3", MOE, MLA, rope_scaling=DEEPSEEK_YARN),
    entry("dots1", MOE, scoring_func="noaux_tc"),
    entry(
        "ernie4_5_moe",
        MOE,
        use_bias=False,
        moe_num_experts=4,
        moe_k=2,
        moe_layer_start_index=1,
        moe_num_shared_experts=1,
    ),
    entry("glm4_moe", MOE, rope_scaling=None, use_qk_norm=True, partial_rotary_factor=0.5),
    entry("glm4_moe_lite", MOE, MLA, num_nextn_predict_layers=0),
    entry(
        "granitemoe",
        MOE,
        logits_scaling=1.0,
        attention_multiplier=0.25,
        embedding_multiplier=1.0,
        residual_multiplier=1.0,
    ),
    entry(
        "hunyuan",
        MOE,
        num_hidden_layers=4,
        moe_topk=2,
        num_shared_expert=1,
        use_mixed_mlp_moe=True,
        use_qk_norm=True,
        use_cla=True,
        cla_share_factor=2,
        rope_scaling={"alpha": 2.0, "factor": 1.0, "type": "dynamic"},
        notes="every second layer reuses its neighbour's key and value projections, "
        "but keeps a cache of its own",
    ),
    entry("longcat_flash", LONGCAT, notes="two attentions per layer, so two caches in a CacheList"),
    entry(
        "longcat_flash_ngram",
        LONGCAT,
        ngram_vocab_size_ratio=2,
        emb_neighbor_num=3,
        emb_split_num=2,
        notes="the first cache holds the last token ids, for the n-gram embedding; "
        "one more cache than layers",
    ),
    entry("minimax", MOE, rotary_dim=8),
    entry("mistral4", MOE, MLA, rope_parameters={"rope_theta": 10000.0, "type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024, "llama_4_scaling_beta": 0.1}),
    entry("mixtral", MOE),
    entry("olmoe", MOE),
    entry("phimoe", MOE, rope_scaling={"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.5] * 8, "long_mscale": 1.2, "short_mscale": 1.2, "original_max_position_embeddings": 1024}, original_max_position_embeddings=1024),
    entry("phixtral", num_vocab=VOCAB_SIZE, model_dim=64, num_heads=4, num_layers=3, rotary_dim=8, num_experts_per_tok=2, num_local_experts=4),
    entry("qwen2_moe", MOE),
    entry("qwen3_moe", MOE),
    entry("solar_open", MOE, partial_rotary_factor=1.0),
)
