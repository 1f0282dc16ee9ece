"""Payloads to host bytes and back, bit for bit.

Nothing is copied on the engine thread on the way out: an array never changes once it is computed, and
the bytes keep it alive. Where the device uses the host's memory (CPU, Metal) the writer reads the array
itself; on CUDA it has the driver fetch it.

NumPy has no bfloat16, so its bits travel as 16-bit integers and become bfloat16 again after loading.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

from firn.cache.arrays import cuda
from firn.cache.arrays.payload import Payload
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
    _stacks: tuple[mx.array, ...]
    _addresses: tuple[mx.array, ...] = ()
    """Addresses of the stacks, on CUDA."""

    def fetch(self) -> list[memoryview]:
        """The bytes of each tensor. Any thread; valid until that thread's next fetch."""
        bus = cuda.device()
        if bus is None or not self._addresses:
            return [_bytes(stack) for stack in self._stacks]
        # The engine thread has dispatched them, after the stacks: this only waits.
        mx.eval(self._addresses)
        return bus.to_host(self._addresses, [spec.nbytes for spec in self.tensors])


def to_host(payload: Payload) -> PayloadBytes:
    """Engine thread. Computes the payload if necessary; on CUDA without waiting for it."""
    tensors = tuple(TensorSpec(CODES[s.dtype], tuple(s.shape)) for s in payload.stacks)
    bus = cuda.device()
    if bus is not None and payload.stacks:
        addresses = tuple(bus.locate(payload.stacks))
        mx.async_eval(addresses)  # the writer waits: here it would wait for the step in flight, too
        return PayloadBytes(tensors, payload.places, payload.stacks, addresses)
    plain = tuple(a.view(mx.uint16) if a.dtype == mx.bfloat16 else a for a in payload.stacks)
    mx.eval(plain)
    return PayloadBytes(tensors, payload.places, plain)


def try_fetching(payload: Payload) -> None:
    """On CUDA: compile the kernel that locates the arrays of payloads like this one. If that fails,
    so will writing, and it is reported then."""
    if cuda.device() is not None:
        with suppress(RuntimeError, ValueError, TypeError):
            to_host(payload).fetch()


def _bytes(array: mx.array) -> memoryview:
    """C-contiguous bytes; a copy only if the array is not contiguous."""
    return np.ascontiguousarray(np.asarray(array)).reshape(-1).view(np.uint8).data


def staged(buffers: Sequence[memoryview]) -> Sequence[memoryview]:
    """The buffers, moved to where the device reads them fastest if there is room. Any thread."""
    bus = cuda.device()
    if bus is None:
        return buffers
    try:
        return bus.stage(buffers)
    except cuda.CudaError:  # no pinned memory: the driver copies, which is slower
        return buffers


def from_host(
    tensors: Sequence[TensorSpec], places: Places, buffers: Sequence[memoryview]
) -> Payload:
    """The payload, evaluated. Engine thread."""
    stacks = [_array(spec, b) for spec, b in zip(tensors, buffers, strict=True)]
    mx.eval(stacks)
    return Payload(tuple(stacks), places)


def _array(spec: TensorSpec, buffer: memoryview) -> mx.array:
    data: Any = np.frombuffer(buffer, dtype=_NUMPY[spec.dtype])
    bus = cuda.device()
    if bus is not None and data.nbytes:
        return bus.to_device(data, spec.shape, _DTYPES[spec.dtype])
    array = mx.array(data.reshape(spec.shape))
    return array.view(mx.bfloat16) if spec.dtype == "BF16" else array
