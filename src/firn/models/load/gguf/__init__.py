"""Converts a GGUF file to an MLX model folder, for dense llama models with a byte-level vocabulary.

Everything is read and checked before the first file is written. A file that cannot be converted
without loss is rejected with a one-line error.
Only `packaged` uses it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from firn.models.load.gguf import tokenizer, weights
from firn.models.load.gguf.file import GgufFile, UnreadableGguf, parse

__all__ = ["UnreadableGguf", "convert"]

Progress = Callable[[int, int], None]
"""Bytes done, total bytes."""
DTYPES = {"float32": "F32", "uint32": "U32"}


def convert(
    data: bytes | memoryview,
    folder: Path,
    *,
    progress: Progress,
    sampling: Mapping[str, float] = MappingProxyType({}),
) -> None:
    """Convert a GGUF file, given as its bytes, into an empty folder.

    `sampling` is what the model's makers recommend, for generation_config.json: GGUF has no field
    for it. Raises UnreadableGguf for the file, OSError for the folder.
    """
    file = parse(data)
    shape = _shape(file)
    tied = "output.weight" not in file.tensors
    plan = weights.plan(file, shape, tied=tied)
    texts = tokenizer.files(file)
    texts["config.json"] = json.dumps(_config(file, shape, plan, tied=tied), indent=2)
    texts["generation_config.json"] = json.dumps(_special(file) | dict(sampling), indent=2)
    for name, text in texts.items():
        _write(folder / name, [text.encode()])
    _write(folder / "model.safetensors", _safetensors(plan, progress))


def _shape(file: GgufFile) -> weights.LlamaShape:
    architecture = file.text("general.architecture")
    if architecture != "llama" or file.metadata.get("llama.expert_count"):
        kind = "a mixture of experts" if architecture == "llama" else architecture
        raise UnreadableGguf(f"it is {kind}; firn converts dense llama models")
    if file.metadata.get("split.count", 1) != 1:
        raise UnreadableGguf("it is one part of several; firn converts models in one file")
    if file.metadata.get("llama.rope.scaling.type", "none") != "none":
        raise UnreadableGguf("its rotary positions are scaled, which firn does not convert")
    n_heads = n_kv_heads = file.integer("llama.attention.head_count")
    if "llama.attention.head_count_kv" in file.metadata:
        n_kv_heads = file.integer("llama.attention.head_count_kv")
    head_dim = file.integer("llama.rope.dimension_count")
    if head_dim < 2 or head_dim % 2 or not n_heads or not n_kv_heads:
        raise UnreadableGguf(f"it cannot have {n_heads} attention heads of width {head_dim}")
    return weights.LlamaShape(
        n_layers=file.integer("llama.block_count"),
        width=file.integer("llama.embedding_length"),
        n_inner=file.integer("llama.feed_forward_length"),
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=head_dim,
        n_vocab=len(file.texts("tokenizer.ggml.tokens")),
    )


def _config(
    file: GgufFile, shape: weights.LlamaShape, plan: weights.ConversionPlan, *, tied: bool
) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": shape.width,
        "intermediate_size": shape.n_inner,
        "num_hidden_layers": shape.n_layers,
        "num_attention_heads": shape.n_heads,
        "num_key_value_heads": shape.n_kv_heads,
        "head_dim": shape.head_dim,
        "max_position_embeddings": file.integer("llama.context_length"),
        "rms_norm_eps": file.number("llama.attention.layer_norm_rms_epsilon"),
        "rope_theta": file.number("llama.rope.freq_base"),
        "vocab_size": shape.n_vocab,
        "tie_word_embeddings": tied,
        **_special(file),
    }
    quantization = plan.quantization()
    return config | ({"quantization": quantization} if quantization else {})


def _special(file: GgufFile) -> dict[str, int]:
    ids = tokenizer.special_ids(file)
    return {f"{role}_token_id": i for role, i in ids.items() if role != "unk"}


def _safetensors(plan: weights.ConversionPlan, progress: Progress) -> Iterator[bytes | memoryview]:
    """The file in pieces: the length of the header, the header, then the arrays in turn."""
    arrays: list[weights.Array] = []
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    n_done = at = 0
    for names, tensor in plan.pairs:
        for name, array in weights.arrays(names, tensor):
            arrays.append(array)
            place = {"shape": array.shape, "data_offsets": (at, at + array.nbytes)}
            header[name] = {"dtype": DTYPES[array.dtype.name], **place}
            at += array.nbytes
        n_done += tensor.blocks.nbytes
        progress(n_done, plan.nbytes)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for array in arrays:
        yield np.ascontiguousarray(array).data


def _write(path: Path, pieces: Iterable[bytes | memoryview]) -> None:
    """Synced to disk when this returns: a folder counts as complete once it has its final name."""
    with path.open("wb") as out:
        for piece in pieces:
            out.write(piece)
        out.flush()
        os.fsync(out.fileno())
