"""Tiny models with random weights, one for each way in which models keep their past.

    python benchmarks/models.py FOLDER [dense hybrid window ssm] [--seed 7]

    dense    qwen3         four layers of plain attention           4 KiB per token
    hybrid   qwen3_next    three gated-delta layers, one attention  1 KiB per token and a state
    window   gemma3_text   two sliding windows of 512, two global   2 KiB per token and the windows
    ssm      mamba2        three recurrent layers                   a state

Float32, 2,048 tokens of vocabulary, a few MB each: any MLX server loads such a folder. The tokenizer is
trained on the spot on Python's own sources, so nothing is downloaded. It knows ASCII only: a random
model would pick halves of other characters, which streams hold back, and first tokens would seem late.

Takes some seconds for each model.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sysconfig
from pathlib import Path
from typing import Any

from report import BenchError, cli

VOCAB_SIZE = 2048
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CORPUS = ("asyncio", "email", "http", "json")
TEMPLATE = """{%- for message in messages -%}
<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}
{%- for part in message.content %}{{ part.text or '' }}{% endfor %}{% endif %}<|im_end|>
{% endfor -%}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 131_072,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
CONFIGS: dict[str, dict[str, Any]] = {
    "dense": COMMON | {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]},
    "hybrid": COMMON
    | {
        "model_type": "qwen3_next",
        "architectures": ["Qwen3NextForCausalLM"],
        "full_attention_interval": 4,
        "partial_rotary_factor": 0.25,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 32,
        "linear_value_head_dim": 32,
        "linear_conv_kernel_dim": 4,
        "num_experts": 0,
        "num_experts_per_tok": 0,
        "decoder_sparse_step": 1,
        "moe_intermediate_size": 0,
        "shared_expert_intermediate_size": 0,
        "mlp_only_layers": [],
    },
    "window": COMMON
    | {
        "model_type": "gemma3_text",
        "architectures": ["Gemma3ForCausalLM"],
        "query_pre_attn_scalar": 64,
        "sliding_window": 512,
        "sliding_window_pattern": 2,
        "rope_global_base_freq": 1_000_000.0,
        "rope_local_base_freq": 10_000.0,
    },
    "ssm": COMMON
    | {
        "model_type": "mamba2",
        "architectures": ["Mamba2ForCausalLM"],
        "num_hidden_layers": 3,
        "num_heads": 8,
        "state_size": 32,
        "conv_kernel": 4,
        "n_groups": 1,
        "expand": 2,
        "chunk_size": 256,
        "use_bias": False,
        "use_conv_bias": True,
        "layer_norm_epsilon": 1e-5,
        "time_step_rank": 16,
        "time_step_limit": [0.0, 1e9],
        "time_step_min": 0.001,
        "time_step_max": 0.1,
    },
}
QWEN3_8B: dict[str, Any] = COMMON | {
    "model_type": "qwen3",
    "vocab_size": 151_936,
    "hidden_size": 4096,
    "intermediate_size": 12_288,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rope_theta": 1_000_000.0,
    "tie_word_embeddings": False,
}
QWEN3_4B = QWEN3_8B | {
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "tie_word_embeddings": True,
}
QWEN3_06B = QWEN3_8B | {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "tie_word_embeddings": True,
}
LINEAR: dict[str, Any] = {
    "model_type": "qwen3_next",
    "architectures": ["Qwen3NextForCausalLM"],
    "full_attention_interval": 4,
    "partial_rotary_factor": 0.25,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "num_experts": 0,
    "num_experts_per_tok": 0,
    "decoder_sparse_step": 1,
    "moe_intermediate_size": 0,
    "shared_expert_intermediate_size": 0,
    "mlp_only_layers": [],
}
QWEN35_9B = QWEN3_8B | LINEAR
QWEN35_9B |= {
    "vocab_size": 248_320,
    "num_hidden_layers": 32,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 256,
}
HYBRID_06B = QWEN3_06B | LINEAR
HYBRID_06B |= {"vocab_size": 32_768, "num_hidden_layers": 24, "linear_num_value_heads": 16}
SHAPES: dict[str, tuple[dict[str, Any], str]] = {
    "tiny": (CONFIGS["dense"], "float32"),
    "hybrid": (CONFIGS["hybrid"], "float32"),
    "0.6b": (QWEN3_06B, "bfloat16"),
    "hybrid-0.6b": (HYBRID_06B, "bfloat16"),
    "4b": (QWEN3_4B, "bfloat16"),
    "8b": (QWEN3_8B, "bfloat16"),
}
"""The choices of --shape: a configuration, and the type of its weights."""
N_GLOBAL = {"dense": 4, "hybrid": 1, "window": 2, "ssm": 0}
FIXED_NBYTES = {"dense": 0, "hybrid": 60 << 10, "window": 1 << 20, "ssm": 220 << 10}


def session_nbytes(name: str, n_tokens: int) -> int:
    """Bytes of a live session of this length: keys and values of global layers, and the rest."""
    per_layer = 2 * int(COMMON["num_key_value_heads"]) * int(COMMON["head_dim"]) * 4
    return n_tokens * N_GLOBAL[name] * per_layer + FIXED_NBYTES[name]


def random_model(config: dict[str, Any], *, dtype: Any, seed: int = 7) -> Any:
    """A model with this configuration and random weights, evaluated one array at a time.

    The thread that calls this owns the arrays.
    """
    import mlx.core as mx
    from mlx.utils import tree_flatten, tree_unflatten

    module = importlib.import_module(f"mlx_lm.models.{config['model_type']}")
    mx.random.seed(seed)
    model = module.Model(module.ModelArgs.from_dict(config))
    weights = []
    for name, w in tree_flatten(model.parameters()):
        cast = w.astype(dtype) if mx.issubdtype(w.dtype, mx.floating) else w
        mx.eval(cast)
        weights.append((name, cast))
    model.update(tree_unflatten(weights))
    model.eval()
    return model


def write_model(folder: Path, config: dict[str, Any], *, seed: int, dtype: str = "float32") -> int:
    """Writes a model folder as servers expect it; returns the number of parameters."""
    import mlx.core as mx
    from mlx.utils import tree_flatten

    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder, n_tokens=int(config["vocab_size"]))
    model = random_model(config, dtype=getattr(mx, dtype), seed=seed)
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    # Written last: a folder that has it is complete.
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return sum(w.size for w in weights.values())


def write_tokenizer(folder: Path, *, n_tokens: int = VOCAB_SIZE) -> None:
    """n_tokens: the model's vocabulary; tokens that no text produces have names, too."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    library = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(f for package in CORPUS for f in (library / package).glob("*.py"))
    lines = [x for f in files for x in f.read_text("utf-8").splitlines(True) if x.isascii()]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=SPECIAL_TOKENS, show_progress=False
    )
    tokenizer.train_from_iterator(lines, trainer)
    saved = json.loads(tokenizer.to_str())
    vocab = saved["model"]["vocab"]
    vocab |= {f"t{i}": i for i in range(len(vocab), n_tokens)}
    (folder / "tokenizer.json").write_text(json.dumps(saved), encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "model_max_length": COMMON["max_position_embeddings"],
        "clean_up_tokenization_spaces": False,
        "chat_template": TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("folder", type=Path, help="where the model folders go")
    options.add_argument("names", nargs="*", help="which ones (default: all)")
    options.add_argument("--seed", type=int, default=7, help="of the weights")
    args = options.parse_args()
    for name in args.names or CONFIGS:
        if name not in CONFIGS:
            raise BenchError(f"there is no model {name}; there are {', '.join(CONFIGS)}")
        try:
            n = write_model(args.folder / name, CONFIGS[name], seed=args.seed)
        except ImportError as e:
            raise BenchError(f"{e}; run this with a Python that has mlx-lm") from e
        print(f"{name}: {n / 1e6:.1f} million parameters in {args.folder / name}")


if __name__ == "__main__":
    cli(main)
