"""The tensors of a dense llama GGUF file as those of an MLX folder: names, order of rows, packing. Pure.

Nothing is rounded. GGUF's Q4_1 is MLX's affine quantisation to 4 bits in groups of 32 (a scale and
a bias for 32 values), its Q8_0 the same with 8 bits; only the order of the bits differs. Scales,
biases and norms are float32, which makes MLX compute in float32: docs/decisions.md explains why.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from firn.models.load.gguf.file import GgufFile, GgufTensor, UnreadableGguf

Array = npt.NDArray[np.generic]
GROUP = 32
BITS = {"Q4_1": 4, "Q8_0": 8}


@dataclass(frozen=True, slots=True)
class LlamaShape:
    """The dimensions of a dense llama model, from the metadata."""

    n_layers: int
    width: int
    n_inner: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    n_vocab: int


@dataclass(frozen=True, slots=True)
class TensorNames:
    """A tensor's names in GGUF and MLX. n_heads: if not 0, its rows are reordered head by head."""

    gguf: str
    mlx: str
    shape: tuple[int, ...]
    n_heads: int = 0


def tensor_names(shape: LlamaShape, *, tied: bool) -> Iterator[TensorNames]:
    """The names of all tensors of the model. tied: the output layer is the embedding."""
    h, f, vocab = shape.width, shape.n_inner, shape.n_vocab
    q, kv = shape.n_heads * shape.head_dim, shape.n_kv_heads * shape.head_dim
    yield TensorNames("token_embd", "model.embed_tokens", (vocab, h))
    yield TensorNames("output_norm", "model.norm", (h,))
    if not tied:
        yield TensorNames("output", "lm_head", (vocab, h))
    for i in range(shape.n_layers):
        gguf, mlx = f"blk.{i}.", f"model.layers.{i}."
        yield TensorNames(gguf + "attn_norm", mlx + "input_layernorm", (h,))
        yield TensorNames(gguf + "attn_q", mlx + "self_attn.q_proj", (q, h), shape.n_heads)
        yield TensorNames(gguf + "attn_k", mlx + "self_attn.k_proj", (kv, h), shape.n_kv_heads)
        yield TensorNames(gguf + "attn_v", mlx + "self_attn.v_proj", (kv, h))
        yield TensorNames(gguf + "attn_output", mlx + "self_attn.o_proj", (h, q))
        yield TensorNames(gguf + "ffn_norm", mlx + "post_attention_layernorm", (h,))
        yield TensorNames(gguf + "ffn_gate", mlx + "mlp.gate_proj", (f, h))
        yield TensorNames(gguf + "ffn_up", mlx + "mlp.up_proj", (f, h))
        yield TensorNames(gguf + "ffn_down", mlx + "mlp.down_proj", (h, f))


@dataclass(frozen=True, slots=True)
class ConversionPlan:
    """Which tensor goes where, all checked; nothing is unpacked yet."""

    pairs: tuple[tuple[TensorNames, GgufTensor], ...]

    @property
    def nbytes(self) -> int:
        return sum(tensor.blocks.nbytes for _, tensor in self.pairs)

    def quantization(self) -> dict[str, object]:
        """As in config.json; empty if nothing is quantised."""
        bits = {names.mlx: BITS[tensor.kind] for names, tensor in self.pairs if tensor.kind in BITS}
        if not bits:
            return {}
        common = min(bits.values())
        layer = {n: {"group_size": GROUP, "bits": b} for n, b in bits.items() if b != common}
        return {"group_size": GROUP, "bits": common, "mode": "affine", **layer}


def plan(file: GgufFile, shape: LlamaShape, *, tied: bool) -> ConversionPlan:
    """Raises UnreadableGguf if a tensor is missing, misshapen, unknown or a quantised norm."""
    left = dict(file.tensors)
    pairs = []
    for names in tensor_names(shape, tied=tied):
        tensor = left.pop(f"{names.gguf}.weight", None)
        if tensor is None:
            raise UnreadableGguf(f"the tensor {names.gguf}.weight is missing")
        if tensor.shape != names.shape:
            raise UnreadableGguf(f"{tensor.name} has the shape {tensor.shape}, not {names.shape}")
        if len(names.shape) == 1 and tensor.kind in BITS:
            raise UnreadableGguf(f"{tensor.name} is quantised: norms must not be")
        pairs.append((names, tensor))
    if left:
        raise UnreadableGguf(f"firn does not know what the tensor {min(left)} is for")
    return ConversionPlan(tuple(pairs))


def arrays(names: TensorNames, tensor: GgufTensor) -> Iterator[tuple[str, Array]]:
    """The tensor as MLX's: one array, or packed values with their scales and biases."""
    if tensor.kind == "F32":
        rows = tensor.blocks.view("<f4").reshape(tensor.shape)
        yield f"{names.mlx}.weight", _reordered(rows, n_heads=names.n_heads)
        return
    packed, scales, biases = _q4_1(tensor) if tensor.kind == "Q4_1" else _q8_0(tensor)
    for part, flat in (("weight", packed), ("scales", scales), ("biases", biases)):
        rows = flat.reshape(tensor.shape[0], -1)
        yield f"{names.mlx}.{part}", _reordered(rows, n_heads=names.n_heads)


def _reordered(rows: Array, *, n_heads: int) -> Array:
    """The rows of q and k in MLX's order; other tensors have no heads and stay as they are.

    Rotary positions rotate pairs of values of a head. llama.cpp pairs neighbours (0, 1), (2, 3);
    the model was trained with halves (0, d/2), (1, d/2+1), which MLX pairs, too. So llama.cpp's
    converter interleaves the halves of each head's rows, (2, d/2) -> (d/2, 2). This undoes it.
    """
    if not n_heads:
        return rows
    n_rows, n_columns = rows.shape
    halves = rows.reshape(n_heads, n_rows // n_heads // 2, 2, n_columns)
    return halves.swapaxes(1, 2).reshape(n_rows, n_columns)


def _q4_1(tensor: GgufTensor) -> tuple[Array, Array, Array]:
    """A block: scale, bias, 16 bytes whose low halves are values 0-15 and high halves 16-31."""
    blocks = tensor.blocks
    values = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)
    packed = values[:, 0::2] | (values[:, 1::2] << 4)  # MLX: neighbours share a byte
    return packed.view("<u4"), _floats(blocks, 0), _floats(blocks, 2)


def _q8_0(tensor: GgufTensor) -> tuple[Array, Array, Array]:
    """A block: scale, 32 signed bytes. MLX's are unsigned: 128 more, which the bias subtracts."""
    scales = _floats(tensor.blocks, 0)
    return (tensor.blocks[:, 2:] ^ 128).view("<u4"), scales, -128 * scales


def _floats(blocks: npt.NDArray[np.uint8], at: int) -> npt.NDArray[np.float32]:
    """The 16-bit float at this byte of every block."""
    return np.ascontiguousarray(blocks[:, at : at + 2]).view("<f2").reshape(-1).astype(np.float32)
