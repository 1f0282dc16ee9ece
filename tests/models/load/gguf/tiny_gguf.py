"""A tiny llama model as a GGUF file, written by the `gguf` package the way llama.cpp's converter does,
and the same weights in mlx-lm's form, to compare a conversion with."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import mlx.core as mx
import numpy as np
import numpy.typing as npt
from gguf.quants import dequantize, quantize
from mlx_lm.models import llama
from tokenizers import Tokenizer

from tests.zoo.folder import tokenizer_json

Floats = npt.NDArray[np.float32]
Kind = gguf.GGMLQuantizationType
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)
NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


@dataclass(frozen=True)
class Tiny:
    """A model defined by its seed. `matrices`, `embeddings`: how these are stored in the file."""

    matrices: Kind = Kind.Q4_1
    embeddings: Kind = Kind.Q8_0
    tied: bool = True
    n_layers: int = 2
    width: int = 64
    n_inner: int = 96
    n_heads: int = 4
    n_kv_heads: int = 2
    seed: int = 0

    @property
    def head_dim(self) -> int:
        return self.width // self.n_heads

    @property
    def args(self) -> llama.ModelArgs:
        return llama.ModelArgs(
            model_type="llama",
            hidden_size=self.width,
            num_hidden_layers=self.n_layers,
            intermediate_size=self.n_inner,
            num_attention_heads=self.n_heads,
            num_key_value_heads=self.n_kv_heads,
            rms_norm_eps=1e-5,
            vocab_size=len(vocabulary()),
            rope_theta=100_000.0,
            tie_word_embeddings=self.tied,
        )

    def kind(self, name: str) -> Kind:
        if "norm" in name:
            return Kind.F32
        return self.embeddings if "embed_tokens" in name or "lm_head" in name else self.matrices

    def weights(self) -> dict[str, Floats]:
        """The values that the file encodes, in float32, by mlx-lm's names and in its order."""
        rng = np.random.default_rng(self.seed)
        made: dict[str, Floats] = {}
        for name, shape in shapes(self):
            drawn = rng.standard_normal(shape, dtype=np.float32) * 0.15
            kind = self.kind(name)
            values = 1 + drawn if "norm" in name else drawn
            made[name] = dequantize(quantize(values, kind), kind).astype(np.float32)
        return made


TINY = Tiny()


def shapes(tiny: Tiny) -> Iterator[tuple[str, tuple[int, ...]]]:
    h, f, kv = tiny.width, tiny.n_inner, tiny.n_kv_heads * tiny.head_dim
    yield "model.embed_tokens", (len(vocabulary()), h)
    yield "model.norm", (h,)
    if not tiny.tied:
        yield "lm_head", (len(vocabulary()), h)
    sizes = dict(zip(NAMES, [(h,), (h,), (h, h), (kv, h), (kv, h), (h, h)], strict=False))
    sizes |= {"mlp.gate_proj": (f, h), "mlp.up_proj": (f, h), "mlp.down_proj": (h, f)}
    for i in range(tiny.n_layers):
        for name, shape in sizes.items():
            yield f"model.layers.{i}.{name}", shape


def reference(tiny: Tiny) -> llama.Model:
    """mlx-lm's model on these weights, in float32."""
    model = llama.Model(tiny.args)
    model.load_weights([(f"{k}.weight", mx.array(v)) for k, v in tiny.weights().items()])
    return model


def write(path: Path, tiny: Tiny = TINY, **changes: Any) -> Path:
    """changes: metadata entries to override; None leaves an entry out."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in (metadata(tiny) | changes).items():
        add(writer, key, value)
    for name, values in tiny.weights().items():
        theirs, kind = their_name(name), tiny.kind(name)
        if "q_proj" in name or "k_proj" in name:
            n_heads = tiny.n_heads if "q_proj" in name else tiny.n_kv_heads
            values = interleaved(values, n_heads)
        writer.add_tensor(f"{theirs}.weight", quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def interleaved(values: Floats, n_heads: int) -> Floats:
    """What llama.cpp's converter does to q and k, head by head: a, b, c, d -> a, c, b, d."""
    heads = np.split(values, n_heads)
    return np.concatenate([np.stack(np.split(h, 2), 1).reshape(h.shape) for h in heads])


def their_name(name: str) -> str:
    if name.startswith("model.layers."):
        _, _, layer, part = name.split(".", 3)
        return f"blk.{layer}.{NAMES[part]}"
    return {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}[
        name
    ]


def metadata(tiny: Tiny) -> dict[str, Any]:
    tokens = vocabulary()
    return {
        "llama.block_count": tiny.n_layers,
        "llama.context_length": 512,
        "llama.embedding_length": tiny.width,
        "llama.feed_forward_length": tiny.n_inner,
        "llama.attention.head_count": tiny.n_heads,
        "llama.attention.head_count_kv": tiny.n_kv_heads,
        "llama.rope.dimension_count": tiny.head_dim,
        "llama.rope.freq_base": 100_000.0,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if t in SPECIAL else 1 for t in tokens],
        "tokenizer.ggml.merges": merges(),
        "tokenizer.ggml.bos_token_id": tokens.index("<|im_start|>"),
        "tokenizer.ggml.eos_token_id": tokens.index("<|im_end|>"),
        "tokenizer.ggml.padding_token_id": tokens.index("<|im_end|>"),
        "tokenizer.ggml.unknown_token_id": tokens.index("<|endoftext|>"),
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": TEMPLATE,
    }


def add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if value is None:
        return
    whole = writer.add_int32 if isinstance(value, int) and value < 0 else writer.add_uint32
    put = {bool: writer.add_bool, int: whole, float: writer.add_float32}
    put |= {str: writer.add_string, list: writer.add_array}
    put[type(value)](key, value)


def vocabulary() -> list[str]:
    made = Tokenizer.from_str(tokenizer_json()).get_vocab()
    return sorted(made, key=lambda token: made[token])


def merges() -> list[str]:
    return [" ".join(pair) for pair in json.loads(tokenizer_json())["model"]["merges"]]
