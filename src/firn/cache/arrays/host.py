"""Payloads to host bytes and back, bit for bit.

How bytes move is the device's affair (`transfers`). NumPy has no bfloat16, so its bits travel as 16-bit
integers and become bfloat16 again after loading.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from firn.cache.arrays.payload import Payload
from firn.cache.arrays.transfers import Lent, transfers
from firn.cache.storage.container import TensorSpec
from firn.cache.storage.places import Places

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


_DTYPES = {code: dtype for dtype, code in CODES.items()}


@dataclass(frozen=True, slots=True)
class PayloadBytes:
    """The bytes of a payload, for a writer. Must be freed on the engine thread, like any array."""

    tensors: tuple[TensorSpec, ...]
    places: Places
    _lent: Lent

    def fetch(self) -> list[memoryview]:
        """The bytes of each tensor. Any thread; valid until that thread's next fetch."""
        return self._lent.fetch()


def to_host(payload: Payload) -> PayloadBytes:
    """Engine thread. Computes the payload if necessary, or has it computed while the writer waits."""
    tensors = tuple(TensorSpec(CODES[s.dtype], tuple(s.shape)) for s in payload.stacks)
    return PayloadBytes(tensors, payload.places, transfers().lend(payload.stacks))


def try_fetching(payload: Payload) -> None:
    """Compile the kernels that copy payloads like this one, if there are any. If that fails, so will
    writing, and it is reported then."""
    if transfers().needs_trial:
        with suppress(RuntimeError, ValueError, TypeError):
            to_host(payload).fetch()


def staged(buffers: Sequence[memoryview]) -> Sequence[memoryview]:
    """The buffers, moved to where the device reads them fastest if there is room. Any thread."""
    return transfers().stage(buffers)


def from_host(
    tensors: Sequence[TensorSpec], places: Places, buffers: Sequence[memoryview]
) -> Payload:
    """The payload, evaluated. Engine thread."""
    stacks = [_array(spec, b) for spec, b in zip(tensors, buffers, strict=True)]
    mx.eval(stacks)
    return Payload(tuple(stacks), places)


def _array(spec: TensorSpec, buffer: memoryview) -> mx.array:
    data: Any = np.frombuffer(buffer, dtype=_NUMPY[spec.dtype])
    return transfers().array(data, spec.shape, _DTYPES[spec.dtype])
