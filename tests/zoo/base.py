"""What every tiny model is made of: the `Entry` record and the conventional config keys.

mlx-lm's `ModelArgs.from_dict` ignores keys it does not know, so one dictionary of conventional
names serves most architectures; an entry states only what is special about its own.
"""

from dataclasses import dataclass, field
from typing import Any

Config = dict[str, Any]

# The tokenizer has exactly this many ids, so every model can be loaded with it.
VOCAB_SIZE = 384
# Small enough that a prompt of 100 tokens crosses it several times.
WINDOW = 32


@dataclass(frozen=True)
class Entry:
    """One tiny model. `gains` multiplies the random weights whose path contains the key."""

    name: str
    module: str
    config: Config
    notes: str = ""
    gains: dict[str, float] = field(default_factory=dict)


COMMON: Config = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "layer_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
    "norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}

# Each family has its own word for the same number; all of them are given.
MOE: Config = {
    "num_experts": 4,
    "n_routed_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "num_experts_per_token": 2,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 48,
    "shared_intermediate_size": 48,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [0],
    "norm_topk_prob": True,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 1.0,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
}

MLA: Config = {
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}


def sliding(n_layers: int, *, every: int) -> Config:
    """A stack of window layers in which each `every`-th layer sees everything."""
    kinds = [
        "full_attention" if (i + 1) % every == 0 else "sliding_attention" for i in range(n_layers)
    ]
    return {"num_hidden_layers": n_layers, "sliding_window": WINDOW, "layer_types": kinds}


def entry(
    name: str,
    *parts: Config,
    module: str | None = None,
    notes: str = "",
    gains: dict[str, float] | None = None,
    **own: Any,
) -> Entry:
    """An entry on top of `COMMON`; later parts win, then the keyword arguments."""
    module = module or name
    config: Config = {"model_type": module, **COMMON}
    for part in parts:
        config.update(part)
    config.update(own)
    return Entry(name, module, config, notes, gains or {})


def wrapper(
    name: str, inner: Entry, *, module: str | None = None, notes: str = "", **own: Any
) -> Entry:
    """A multimodal module: the text model's config sits under `text_config`."""
    module = module or name
    config: Config = {
        "model_type": module,
        "vocab_size": VOCAB_SIZE,
        "text_config": inner.config,
        **own,
    }
    return Entry(name, module, config, notes, inner.gains)


def table(*entries: Entry) -> dict[str, Entry]:
    """Entries by name; a name given twice is a mistake."""
    found: dict[str, Entry] = {}
    for item in entries:
        if item.name in found:
            raise ValueError(f"two zoo entries are called {item.name!r}")
        found[item.name] = item
    return found
