"""Copies between the host and an NVIDIA GPU at the speed of the bus.

MLX reads and writes arrays of the GPU through managed memory, page fault by page fault: 2 GB/s on an
H200, where the bus moves 40, and what the host has looked at comes back to the GPU in the same way. The
driver's own copies leave the array where it is. They go over a stream of their own, so that nobody's
computing waits for them.

Where the driver is not what is expected here, `device()` is None, and MLX's own way serves.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from functools import cache

import mlx.core as mx
import numpy as np

log = logging.getLogger("firn.cache")

NON_BLOCKING = 1


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
    """The driver's copies. Any thread may call; each has a stream and a pinned buffer of its own."""

    def __init__(self) -> None:
        """Raises OSError, AttributeError or CudaError where there is no such driver."""
        self._cu = ctypes.CDLL("libcuda.so.1")
        self._context = ctypes.c_void_p()
        self._own = threading.local()
        device = ctypes.c_int()
        self._call("cuInit", ctypes.c_uint(0))
        self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(0))
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)
        self._capsule_pointer = ctypes.pythonapi.PyCapsule_GetPointer
        self._capsule_pointer.restype = ctypes.c_void_p
        self._capsule_pointer.argtypes = (ctypes.py_object, ctypes.c_char_p)

    def to_host(self, array: mx.array) -> memoryview:
        """The bytes of an evaluated, contiguous array; valid until this thread's next call."""
        stream, nbytes = self._stream(), array.nbytes
        buffer = self._pinned(nbytes)
        address, _keep = self._address(array)
        to, size = ctypes.c_void_p(buffer), ctypes.c_size_t(nbytes)
        self._call("cuMemcpyDtoHAsync_v2", to, address, size, stream)
        self._call("cuStreamSynchronize", stream)
        return memoryview((ctypes.c_uint8 * nbytes).from_address(buffer)).cast("B")

    def to_device(self, host: np.ndarray, shape: tuple[int, ...], dtype: mx.Dtype) -> mx.array:
        """A new array with these bytes."""
        array = mx.zeros(shape, dtype)
        mx.eval(array)
        stream = self._stream()
        address, _keep = self._address(array)
        source, size = ctypes.c_void_p(host.ctypes.data), ctypes.c_size_t(array.nbytes)
        self._call("cuMemcpyHtoDAsync_v2", address, source, size, stream)
        self._call("cuStreamSynchronize", stream)
        return array

    def _address(self, array: mx.array) -> tuple[ctypes.c_uint64, object]:
        """And what must be kept until it is used."""
        capsule = array.__dlpack__()
        pointer = self._capsule_pointer(capsule, b"dltensor")
        tensor = ctypes.cast(pointer, ctypes.POINTER(_Tensor)).contents
        return ctypes.c_uint64(tensor.data + tensor.byte_offset), capsule

    def _stream(self) -> ctypes.c_void_p:
        """Of this thread, which computes in MLX's context from then on."""
        if not hasattr(self._own, "stream"):
            self._call("cuCtxSetCurrent", self._context)
            stream = ctypes.c_void_p()
            self._call("cuStreamCreate", ctypes.byref(stream), ctypes.c_uint(NON_BLOCKING))
            self._own.stream = stream
            self._own.buffer, self._own.nbytes = ctypes.c_void_p(), 0
        found: ctypes.c_void_p = self._own.stream
        return found

    def _pinned(self, nbytes: int) -> int:
        """Memory that the GPU writes to by itself; a thread keeps its own, for it takes long to get."""
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
    """None: arrays lie in the host's memory here, or the driver is not what is expected."""
    if mx.default_device() == mx.Device(mx.cpu) or mx.metal.is_available():
        return None
    try:
        cuda = Cuda()
        _check(cuda)
    except (OSError, AttributeError, TypeError, CudaError) as e:
        log.warning("records go to the GPU and back through MLX, which is slow: %s", e)
        return None
    return cuda


def _check(cuda: Cuda) -> None:
    """Raises CudaError unless bytes come back as they went."""
    want = np.arange(1 << 16, dtype=np.uint16)
    array = cuda.to_device(want.view(np.uint8), want.shape, mx.uint16)
    if bytes(cuda.to_host(mx.concatenate([array]))) != want.tobytes():
        raise CudaError("a copy came back changed")
