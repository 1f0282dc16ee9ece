"""Facts about mlx-lm 0.32.2, each observed on the tiny model; test_zoo.py checks them all.

Differences are in units of the spread of the logits: rounding stays below 6e-5, and an early token
that is changed moves the last logits by 0.07 or more.

The Linux CPU wheel of mlx sums in one order whatever the shape, so most models are bit-for-bit
equal at every split here. That is this backend's doing: equality seen here proves nothing about
resuming off a chunk boundary on another one.
"""

from .base import VOCAB_SIZE, Entry, entry, table
from .text_window import MUSE_SPARK_TEXT

# Modules of mlx_lm.models that hold parts, not a model.
HELPERS = frozenset(
    {
        "activations",
        "base",
        "bitlinear_layers",
        "cache",
        "gated_delta",
        "mla",
        "pipeline",
        "rope_utils",
        "ssm",
        "switch_layers",
    }
)

UNBUILDABLE: dict[str, str] = {
    "bitnet": "BitLinear calls a Metal kernel without a fallback: the first forward on the CPU "
    "raises RuntimeError '[metal_kernel] No Metal back-end.'",
    "muse_spark": "its attention, norms and routing are Metal kernels without a fallback: the "
    "first forward on the CPU raises RuntimeError '[metal_kernel] No Metal back-end.'",
    "olmo": "importing the module ends the process (SystemExit) unless ai2-olmo is installed; with "
    "the import satisfied, prefill raises ValueError because it adds the mask, which is the string "
    "'causal', to the scores",
}

# The configs with which the failures above are shown.
ATTEMPTS: dict[str, Entry] = table(
    entry("bitnet"),
    Entry(
        "muse_spark",
        "muse_spark",
        {"model_type": "muse_spark", "vocab_size": VOCAB_SIZE, "text_config": MUSE_SPARK_TEXT},
    ),
    entry(
        "olmo", d_model=64, n_layers=3, mlp_hidden_size=192, n_heads=4, embedding_size=VOCAB_SIZE
    ),
)

KNOWN_UPSTREAM: dict[str, str] = {
    "afm7": "batched: layers that reuse KV rotate their queries by the padded length, not by the "
    "row's offset. The longest row is exact, shorter rows are off by 2.4 to 4.4; an extracted row "
    "is exact again, so the cached KV is right",
    "deepseek_v41": "LayerCache has no merge/extend/filter/extract, no state setter, no from_state "
    "and no trim; `state` holds the offset as an array",
    "gear": "mlx_lm.load fails: transformers 5.22 refuses the layer type 'conv_mixer' while it "
    "reads config.json for the tokenizer. mlx_lm.utils.load_model works",
    "gear-softcap": "as gear",
    "gemma2": "batched with grouped heads: the mask (B,1,1,S) is broadcast against scores "
    "(B,kv,rep,1,S), so row and KV head are confused. With 2 KV heads, rows of unequal length are "
    "silently wrong by 0.9 to 5.4 at B=2, and B=3 raises ValueError; B=1 is exact",
    "gemma3n": "without a cache the KV-shared layers compute their own KV: off by 3.1 from the "
    "same forward with a fresh cache. With a cache everything agrees",
    "gpt_bigcode": "batched: position ids come from numpy.arange(cache.offset), so offsets of more "
    "than one row raise ValueError",
    "internlm2-dynamic": "batched: the dynamic RoPE takes max() of an array of offsets and raises "
    "ValueError. Beyond max_position_embeddings the RoPE base depends on the length so far, so "
    "results depend on the chunks (off by 5.2 to 5.7 with a limit of 64 and 160 tokens)",
    "llama4": "ChunkedKVCache has no merge/extend/filter/extract",
    "minimax_m3_vl": "batched: key blocks are cut over cache slots, padding included, so a padded "
    "row selects other blocks once there are more than sparse_topk_blocks: off by 1.7 to 3.7. An "
    "extracted row stays off (0.4 to 1.0): the wrong hidden states are in its KV",
    "phi3small": "block-sparse layers add the boolean mask to the scores instead of applying it, "
    "so a token sees the rest of its block (token 80 moves positions 64..79). Chunks that are "
    "multiples of the block size are exact, others off by 2.5 to 5.9, decoding included. Batched, "
    "it is off by 2.1 to 2.3 at B=2 and raises ValueError at B=3, as gemma2 does",
    "plamo3": "prefill masks with window+1 while RotatingKVCache keeps window: decoding and "
    "chunked prefill see one token less than one long prefill. Off by 3.0 to 4.6, from the first "
    "chunk boundary at or after the window on. Batched equals single",
}

# The same facts as sets, for tests that must know what to expect.
WRONG_IN_CHUNKS = frozenset({"phi3small", "plamo3"})
WRONG_IN_BATCHES = frozenset(
    {"afm7", "gemma2", "gpt_bigcode", "internlm2-dynamic", "minimax_m3_vl", "phi3small"}
)
NO_BATCH_METHODS = frozenset({"deepseek_v41", "llama4"})
NO_STATE_ROUND_TRIP = frozenset({"deepseek_v41"})
UNLOADABLE = frozenset({"gear", "gear-softcap"})

# What make_prompt_cache yields, where it is not one KVCache per layer.
CACHES: dict[str, str] = {
    "afm7": "KVCache*2",
    "nanbeige": "KVCache*4",
    "nemotron-nas": "KVCache*3",
    "llama-sliding": "RotatingKVCache KVCache RotatingKVCache KVCache",
    "afmoe": "RotatingKVCache*3 KVCache",
    "cohere2": "RotatingKVCache*3 KVCache",
    "deepseek_v32": "CacheList(KVCache,KVCache)*3",
    "deepseek_v41": "LayerCache*5",
    "exaone4": "RotatingKVCache*3 KVCache",
    "exaone_moe": "RotatingKVCache*3 KVCache",
    "gemma3_text": "RotatingKVCache KVCache RotatingKVCache KVCache",
    "gemma4_text": "RotatingKVCache KVCache RotatingKVCache KVCache",
    "gemma4_text-moe": "RotatingKVCache KVCache RotatingKVCache KVCache",
    "glm_moe_dsa": "CacheList(KVCache,KVCache)*3",
    "gpt_oss": "RotatingKVCache KVCache RotatingKVCache KVCache",
    "iquestloopcoder": "KVCache*2 RotatingKVCache*2",
    "laguna": "RotatingKVCache*3 KVCache",
    "mellum": "RotatingKVCache*3 KVCache",
    "mimo_v2_flash": "KVCache RotatingKVCache*2 KVCache",
    "ministral3": "RotatingKVCache KVCache RotatingKVCache KVCache",
    "muse_glimmer": "RotatingKVCache*3 KVCache",
    "olmo3": "RotatingKVCache*3 KVCache",
    "plamo3": "RotatingKVCache*3 KVCache",
    "spark2_5": "RotatingKVCache*3 KVCache",
    "step3p5": "RotatingKVCache*3 KVCache",
    "longcat_flash": "CacheList(KVCache,KVCache)*2",
    "longcat_flash_ngram": "ArraysCache CacheList(KVCache,KVCache)*2",
    "baichuan_m1": "CacheList(ArraysCache,KVCache) CacheList(ArraysCache,RotatingKVCache) "
    "CacheList(ArraysCache,KVCache) CacheList(ArraysCache,RotatingKVCache)",
    "bailing_hybrid": "ArraysCache KVCache ArraysCache KVCache",
    "bailing_moe_linear": "ArraysCache KVCache ArraysCache KVCache",
    "bailing_moe_v3": "ArraysCache*3 KVCache",
    "falcon_h1": "CacheList(ArraysCache,KVCache)*3",
    "gear": "ArraysCache RotatingKVCache ArraysCache KVCache",
    "gear-softcap": "ArraysCache RotatingKVCache ArraysCache KVCache",
    "granitemoehybrid": "ArraysCache*2 KVCache ArraysCache",
    "granitemoehybrid-dense": "ArraysCache*2 KVCache ArraysCache",
    "jamba": "ArraysCache KVCache ArraysCache KVCache",
    "kimi_linear": "ArraysCache*3 KVCache",
    "lfm2": "ArraysCache KVCache ArraysCache KVCache",
    "lfm2_moe": "ArraysCache KVCache ArraysCache KVCache",
    "mamba": "ArraysCache*3",
    "mamba-falcon": "ArraysCache*3",
    "mamba2": "ArraysCache*3",
    "nemotron_h": "ArraysCache KVCache ArraysCache",
    "olmo_hybrid": "ArraysCache*3 KVCache",
    "plamo2": "ArraysCache KVCache ArraysCache KVCache",
    "qwen3_next": "ArraysCache*3 KVCache",
    "recurrent_gemma": "ArraysCache*2 RotatingKVCache",
    "rwkv7": "ArraysCache*3",
    "gemma3": "RotatingKVCache KVCache RotatingKVCache KVCache",
    "gemma3n": "RotatingKVCache KVCache RotatingKVCache KVCache",
    "gemma4": "RotatingKVCache KVCache RotatingKVCache KVCache",
    "kimi_k3": "ArraysCache*3 KVCache",
    "lfm2-vl": "ArraysCache KVCache ArraysCache KVCache",
    "llama4": "ChunkedKVCache*3 KVCache",
    "minimax_m3_vl": "CacheList(KVCache) CacheList(KVCache,KVCache)*3",
    "prism_hadamard_qwen35": "ArraysCache*3 KVCache",
    "qwen3_5": "ArraysCache*3 KVCache",
    "qwen3_5_moe": "ArraysCache*3 KVCache",
}
