"""Between device arrays and plain host bytes, bit for bit. Engine thread only.

NumPy has no bfloat16, so its bits travel as 16-bit integers: two bytes a value, and bfloat16 again after
loading.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from firn.cache.codecs import Arrays
from firn.cache.container import Layers, TensorSpec

CODES: dict[mx.Dtype, str] = {
    mx.bool_: "BOOL",
    mx.uint8: "U8",
    mx.int8: "I8",
    mx.uint16: "U16",
    mx.int16: "I16",
    mx.float16: "F16",
    mx.bfloat16: "BF16",
    mx.uint32: "U32",
    mx.int32: "I32",
    mx.float32: "F32",
    mx.uint64: "U64",
    mx.int64: "I64",
    mx.complex64: "C64",
}
_NUMPY = {
    "BOOL": np.bool_,
    "U8": np.uint8,
    "I8": np.int8,
    "U16": np.uint16,
    "I16": np.int16,
    "F16": np.float16,
    "BF16": np.uint16,
    "U32": np.uint32,
    "I32": np.int32,
    "F32": np.float32,
    "U64": np.uint64,
    "I64": np.int64,
    "C64": np.complex64,
}


def to_host(payload: Sequence[Arrays]) -> tuple[Layers, list[memoryview]]:
    """Copies of all arrays as bytes, and what they are. The arrays must be evaluated."""
    layers: list[tuple[TensorSpec | None, ...]] = []
    buffers: list[memoryview] = []
    for arrays in payload:
        specs: list[TensorSpec | None] = []
        for a in arrays:
            if a is None:
                specs.append(None)
                continue
            specs.append(TensorSpec(CODES[a.dtype], tuple(a.shape)))
            plain = a.view(mx.uint16) if a.dtype == mx.bfloat16 else a
            buffers.append(np.array(plain, copy=True).data)
        layers.append(tuple(specs))
    return tuple(layers), buffers


def from_host(layers: Layers, buffers: Sequence[memoryview]) -> list[Arrays]:
    """The arrays again, evaluated."""
    rest = iter(buffers)
    payload: list[Arrays] = []
    for specs in layers:
        payload.append(tuple(None if s is None else _array(s, next(rest)) for s in specs))
    mx.eval([a for arrays in payload for a in arrays if a is not None])
    return payload


def _array(spec: TensorSpec, buffer: memoryview) -> mx.array:
    flat: Any = np.frombuffer(buffer, dtype=_NUMPY[spec.dtype])
    array = mx.array(flat.reshape(spec.shape))
    return array.view(mx.bfloat16) if spec.dtype == "BF16" else array
