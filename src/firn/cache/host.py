"""Between payloads on the device and plain host bytes, bit for bit.

Where the device computes in the host's memory (CPU, Metal) nothing is copied on the way out: an array
never changes once it is computed, and the bytes keep it alive. On CUDA a packed copy is fetched by the
thread that writes it; the engine's part is to have it made.

NumPy has no bfloat16, so its bits travel as 16-bit integers: two bytes a value, and bfloat16 again after
loading.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import mlx.core as mx
import numpy as np

from firn.cache import cuda
from firn.cache.container import Layers, TensorSpec
from firn.cache.payload import Payload, Places, places_of

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
class Lent:
    """A payload that is about to be written. It must die on the engine thread, as its arrays do."""

    layers: Layers
    _stacks: tuple[mx.array, ...]
    """As they are; or one packed copy of all of them."""
    _places: Places

    def fetch(self) -> list[memoryview]:
        """Its bytes, a buffer for each tensor of `layers`. On any thread; valid until its next fetch."""
        bus = cuda.device()
        stacks = [_bytes(s) for s in self._stacks] if bus is None else self._unpacked(bus)
        return [
            _entry(stacks[at[0]], at[1], spec.nbytes)
            for slots, specs in zip(self._places, self.layers, strict=True)
            for at, spec in zip(slots, specs, strict=True)
            if at is not None and spec is not None
        ]

    def _unpacked(self, bus: cuda.Cuda) -> list[memoryview]:
        if not self._stacks:
            return []
        whole = bus.to_host(self._stacks[0])
        sizes: dict[int, int] = {}
        for slots, specs in zip(self._places, self.layers, strict=True):
            for at, spec in zip(slots, specs, strict=True):
                if at is not None and spec is not None:
                    sizes[at[0]] = sizes.get(at[0], 0) + spec.nbytes
        ends = list(accumulate(sizes.values()))
        return [whole[end - n : end] for n, end in zip(sizes.values(), ends, strict=True)]


def lend(payload: Payload) -> Lent:
    """Engine thread. The payload must be evaluated."""
    layers = tuple(
        tuple(
            None
            if at is None
            else TensorSpec(CODES[payload.stacks[at[0]].dtype], payload.stacks[at[0]].shape[1:])
            for at in slots
        )
        for slots in payload.places
    )
    pack = _plain if cuda.device() is None else _packed
    return Lent(layers, pack(payload.stacks), payload.places)


def _plain(stacks: Sequence[mx.array]) -> tuple[mx.array, ...]:
    plain = tuple(a.view(mx.uint16) if a.dtype == mx.bfloat16 else a for a in stacks)
    mx.eval(plain)
    return plain


def _packed(stacks: Sequence[mx.array]) -> tuple[mx.array, ...]:
    """One copy on the device: what the host has looked at is slow to come back."""
    if not stacks:
        return ()
    flat = [s.reshape(-1).view(mx.uint8) for s in stacks]
    packed = mx.concatenate(
        [*flat, mx.zeros((1,), mx.uint8)]
    )  # of one array alone it would be no copy
    mx.eval(packed)
    return (packed,)


def _bytes(array: mx.array) -> memoryview:
    """C-contiguous, whatever the array is; a copy only if it is not."""
    return np.ascontiguousarray(np.asarray(array)).reshape(-1).view(np.uint8).data


def _entry(stack: memoryview, i: int, nbytes: int) -> memoryview:
    return stack[i * nbytes : (i + 1) * nbytes]


# --- the way back --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Gathered:
    """A payload's bytes, a buffer for each stack."""

    stacks: tuple[tuple[TensorSpec, np.ndarray[Any, Any]], ...]
    places: Places


def gather(layers: Layers, buffers: Sequence[memoryview]) -> Gathered:
    """On any thread. Tensors that lie side by side, as in a file, are not copied."""
    places = places_of(layers)
    rest = iter(buffers)
    members: dict[int, list[memoryview]] = {}
    specs: dict[int, TensorSpec] = {}
    for slots, own in zip(places, layers, strict=True):
        for at, spec in zip(slots, own, strict=True):
            if at is not None and spec is not None:
                members.setdefault(at[0], []).append(next(rest))
                specs[at[0]] = spec
    stacks = [
        (TensorSpec(specs[i].dtype, (len(some), *specs[i].shape)), _side_by_side(some))
        for i, some in members.items()
    ]
    return Gathered(tuple(stacks), places)


def _side_by_side(buffers: Sequence[memoryview]) -> np.ndarray[Any, Any]:
    arrays = [np.frombuffer(b, dtype=np.uint8) for b in buffers]
    owner: Any = buffers[0].obj
    base = np.frombuffer(owner, dtype=np.uint8)
    start = at = arrays[0].ctypes.data
    for array in arrays:
        if array.ctypes.data != at:
            return np.concatenate(arrays)
        at += array.nbytes
    first = start - base.ctypes.data
    if not 0 <= first <= first + at - start <= base.nbytes:
        return np.concatenate(arrays)
    return base[first : first + at - start]


def from_host(gathered: Gathered) -> Payload:
    """The arrays again, evaluated. Engine thread."""
    stacks = [_array(spec, data) for spec, data in gathered.stacks]
    mx.eval(stacks)
    return Payload(tuple(stacks), gathered.places)


def _array(spec: TensorSpec, data: np.ndarray[Any, Any]) -> mx.array:
    bus = cuda.device()
    if bus is not None and data.nbytes:
        return bus.to_device(data, spec.shape, _DTYPES[spec.dtype])
    array = mx.array(data.view(_NUMPY[spec.dtype]).reshape(spec.shape))
    return array.view(mx.bfloat16) if spec.dtype == "BF16" else array
