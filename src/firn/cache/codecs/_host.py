"""Between device arrays and plain host bytes, bit for bit. Engine thread only.

Where the device computes in the host's memory (CPU, Metal) nothing is copied on the way out: an array
never changes once it is computed, and the bytes keep it alive. CUDA would move the array itself to the
host, where its next reader waits for it; there a packed copy goes in its place.

NumPy has no bfloat16, so its bits travel as 16-bit integers: two bytes a value, and bfloat16 again after
loading.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate
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
    """The bytes of all arrays, and what they are. The arrays must be evaluated."""
    present = [a for arrays in payload for a in arrays if a is not None]
    layers = tuple(
        tuple(None if a is None else TensorSpec(CODES[a.dtype], tuple(a.shape)) for a in arrays)
        for arrays in payload
    )
    return layers, (_packed if _on_cuda() else _shared)(present)


def _shared(arrays: Sequence[mx.array]) -> list[memoryview]:
    plain = [a.view(mx.uint16) if a.dtype == mx.bfloat16 else a for a in arrays]
    mx.eval(plain)
    return [_bytes(a) for a in plain]


def _packed(arrays: Sequence[mx.array]) -> list[memoryview]:
    """One buffer on the device, moved to the host as a whole."""
    if not arrays:
        return []
    whole = _bytes(mx.concatenate([mx.contiguous(a).reshape(-1).view(mx.uint8) for a in arrays]))
    ends = list(accumulate(a.nbytes for a in arrays))
    return [whole[end - a.nbytes : end] for a, end in zip(arrays, ends, strict=True)]


def _bytes(array: mx.array) -> memoryview:
    """C-contiguous, whatever the array is; a copy only if it is not."""
    return np.ascontiguousarray(np.asarray(array)).reshape(-1).view(np.uint8).data


@cache
def _on_cuda() -> bool:
    return mx.default_device() != mx.Device(mx.cpu) and not mx.metal.is_available()


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
