"""Copies between the host and an NVIDIA GPU at the speed of the bus.

MLX reads and writes a GPU's arrays through managed memory, page fault by page fault: 2 GB/s on an H200,
where the bus moves 40. And an array that the host has read comes back to the GPU at the same speed.

    out   the driver copies a packed array to pinned memory, on a stream of its own
    in    an I/O thread copies what it has read to pinned memory, and a kernel fetches it from there

Where the driver is not as expected here, `device()` is None, and MLX's own copies are used.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from functools import cache
from typing import Any

import mlx.core as mx
import numpy as np

log = logging.getLogger("firn.cache")

NON_BLOCKING = 1
PINNED_NBYTES = 1 << 30
"""The most pinned memory for what was read; beyond it the driver copies, which is slower."""
ROUND_NBYTES = 1 << 20
WORD_NBYTES, N_THREADS = 16, 1 << 16
FETCH = """
    const uint4* from = reinterpret_cast<const uint4*>(where[0]);
    uint4* to = reinterpret_cast<uint4*>(out);
    const unsigned long long step = (unsigned long long)gridDim.x * blockDim.x;
    unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x;
    for (; i < where[1]; i += step) {
        to[i] = from[i];
    }
"""


class _Tensor(ctypes.Structure):
    """The beginning of DLPack's DLManagedTensor."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("dtype", ctypes.c_uint32),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    )


class CudaError(RuntimeError):
    pass


class Cuda:
    """Copies by the driver. Any thread may call; each has a stream and a pinned buffer of its own."""

    def __init__(self) -> None:
        """Raises OSError, AttributeError or CudaError where there is no such driver."""
        self._cu = ctypes.CDLL("libcuda.so.1")
        self._context = ctypes.c_void_p()
        self._own = threading.local()
        self._free: deque[tuple[int, int]] = deque()
        """Unused pinned memory: (address, bytes)."""
        self._pinned_at: list[tuple[int, int]] = []
        self._allocating = threading.Lock()
        self._fetch: Any = None
        device = ctypes.c_int()
        self._call("cuInit", ctypes.c_uint(0))
        self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(0))
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)
        self._capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
        self._capsule_pointer.restype = ctypes.c_void_p
        self._capsule_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)

    def compile(self) -> None:
        """Make the kernel that fetches from pinned memory."""
        self._fetch = mx.fast.cuda_kernel(
            name="firn_fetch", input_names=["where"], output_names=["out"], source=FETCH
        )

    def forget_kernel(self) -> None:
        self._fetch = None

    def to_host(self, array: mx.array) -> memoryview:
        """The bytes of an evaluated, contiguous array; valid until this thread's next call."""
        stream, nbytes = self._stream(), array.nbytes
        buffer = self._pinned(nbytes)
        address, _keep = self._address(array)
        to, size = ctypes.c_void_p(buffer), ctypes.c_size_t(nbytes)
        self._call("cuMemcpyDtoHAsync_v2", to, address, size, stream)
        self._call("cuStreamSynchronize", stream)
        return memoryview((ctypes.c_uint8 * nbytes).from_address(buffer)).cast("B")

    def stage(self, buffers: Sequence[memoryview]) -> list[memoryview]:
        """The same bytes in pinned memory, which is freed with them; or the buffers as they are."""
        sizes = [-(-len(b) // WORD_NBYTES) * WORD_NBYTES for b in buffers]
        pinned = self._take(sum(sizes)) if self._fetch is not None else None
        if pinned is None:
            return list(buffers)
        copies, at = [], 0
        for buffer, size in zip(buffers, sizes, strict=True):
            piece = pinned[at : at + len(buffer)]
            np.copyto(piece, np.frombuffer(buffer, np.uint8))
            copies.append(piece.data)
            at += size
        return copies

    def to_device(
        self, host: np.ndarray[Any, Any], shape: tuple[int, ...], dtype: mx.Dtype
    ) -> mx.array:
        """A new array with these bytes, which are needed until it is evaluated."""
        at = host.ctypes.data
        if self._fetch is not None and any(a <= at < a + n for a, n in self._pinned_at):
            return self._fetched(at, host.nbytes, shape, dtype)
        array = mx.zeros(shape, dtype)
        mx.eval(array)
        stream = self._stream()
        address, _keep = self._address(array)
        source, size = ctypes.c_void_p(host.ctypes.data), ctypes.c_size_t(array.nbytes)
        self._call("cuMemcpyHtoDAsync_v2", address, source, size, stream)
        self._call("cuStreamSynchronize", stream)
        return array

    def _fetched(
        self, address: int, nbytes: int, shape: tuple[int, ...], dtype: mx.Dtype
    ) -> mx.array:
        n_words = -(-nbytes // WORD_NBYTES)
        (out,) = self._fetch(
            inputs=[mx.array([address, n_words], mx.uint64)],
            grid=(N_THREADS, 1, 1),
            threadgroup=(256, 1, 1),
            output_shapes=[(n_words * WORD_NBYTES,)],
            output_dtypes=[mx.uint8],
        )
        return out[:nbytes].view(dtype).reshape(shape)  # type: ignore[no-any-return]

    def _take(self, nbytes: int) -> np.ndarray[Any, Any] | None:
        """Pinned memory; None when as much is in use as may be."""
        nbytes = -(-nbytes // ROUND_NBYTES) * ROUND_NBYTES
        for _ in range(len(self._free)):
            try:
                address, size = self._free.popleft()
            except IndexError:
                break
            if nbytes <= size <= 2 * nbytes:
                return self._lend(address, size)
            self._free.append((address, size))
        with self._allocating:
            if sum(n for _, n in self._pinned_at) + nbytes > PINNED_NBYTES:
                return None
            self._stream()
            pointer = ctypes.c_void_p()
            size_ = ctypes.c_size_t(nbytes)
            self._call("cuMemHostAlloc", ctypes.byref(pointer), size_, ctypes.c_uint(0))
            self._pinned_at = [*self._pinned_at, (int(pointer.value or 0), nbytes)]
        return self._lend(int(pointer.value or 0), nbytes)

    def _lend(self, address: int, nbytes: int) -> np.ndarray[Any, Any]:
        memory: Any = (ctypes.c_uint8 * nbytes).from_address(address)
        array: np.ndarray[Any, Any] = np.frombuffer(memory, np.uint8)
        weakref.finalize(array, self._free.append, (address, nbytes))
        return array

    def _address(self, array: mx.array) -> tuple[ctypes.c_uint64, object]:
        """The array's address, and an object that keeps it valid."""
        capsule = array.__dlpack__()
        pointer = self._capsule_pointer(capsule, b"dltensor")
        tensor = ctypes.cast(pointer, ctypes.POINTER(_Tensor)).contents
        return ctypes.c_uint64(tensor.data + tensor.byte_offset), capsule

    def _stream(self) -> ctypes.c_void_p:
        """This thread's stream. The thread uses MLX's context from then on."""
        if not hasattr(self._own, "stream"):
            self._call("cuCtxSetCurrent", self._context)
            stream = ctypes.c_void_p()
            self._call("cuStreamCreate", ctypes.byref(stream), ctypes.c_uint(NON_BLOCKING))
            self._own.stream = stream
            self._own.buffer, self._own.nbytes = ctypes.c_void_p(), 0
        own: ctypes.c_void_p = self._own.stream
        return own

    def _pinned(self, nbytes: int) -> int:
        """A pinned buffer. Each thread keeps its own, because allocating one takes long."""
        own = self._own
        if own.nbytes < nbytes:
            if own.buffer:
                self._call("cuMemFreeHost", own.buffer)
            own.buffer, own.nbytes = ctypes.c_void_p(), 0
            size = ctypes.c_size_t(nbytes)
            self._call("cuMemHostAlloc", ctypes.byref(own.buffer), size, ctypes.c_uint(0))
            own.nbytes = nbytes
        return int(own.buffer.value or 0)

    def _call(self, name: str, *args: object) -> None:
        status = getattr(self._cu, name)(*args)
        if status != 0:
            raise CudaError(f"{name}: CUDA error {status}")


@cache
def device() -> Cuda | None:
    """None: arrays lie in the host's memory, or the driver is not as expected."""
    if mx.default_device() == mx.Device(mx.cpu) or mx.metal.is_available():
        return None
    try:
        cuda = Cuda()
        _check(cuda)
    except (OSError, AttributeError, TypeError, CudaError) as e:
        log.warning(
            "the cache copies records to and from the GPU through MLX, which is slow: %s", e
        )
        return None
    return cuda


def _check(cuda: Cuda) -> None:
    """Raises CudaError unless bytes come back unchanged."""
    want = np.arange(50_001, dtype=np.uint16)

    def is_same(data: np.ndarray[Any, Any]) -> bool:
        array = mx.concatenate(
            [cuda.to_device(data, want.shape, mx.uint16), mx.zeros(1, mx.uint16)]
        )
        mx.eval(array)
        return bytes(cuda.to_host(array))[: want.nbytes] == want.tobytes()

    if not is_same(want.view(np.uint8)):
        raise CudaError("a copy came back changed")
    try:
        cuda.compile()
        (staged,) = cuda.stage([memoryview(want.tobytes())])
        if not is_same(np.frombuffer(staged, np.uint8)):
            raise CudaError("a kernel's copy came back changed")
    except (RuntimeError, ValueError, AttributeError, TypeError) as e:
        cuda.forget_kernel()
        log.warning("the cache copies records to the GPU by the driver, which is slower: %s", e)
