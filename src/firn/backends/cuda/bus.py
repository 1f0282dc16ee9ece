"""Copies between the host and an NVIDIA GPU at the speed of the bus.

MLX reads and writes a GPU's arrays through managed memory, page fault by page fault: 2 GB/s on an H200,
whose bus moves 40 GB/s. An array that the host has read also returns to the GPU at that speed.

    out   the driver copies a record's arrays to pinned memory, on a stream of its own
    in    an I/O thread copies what it has read to pinned memory, and a kernel fetches it from there

Within the GPU, one kernel copies the cells of many layers to one array.

If the driver is not as expected, MLX's own copies are used.
"""

from __future__ import annotations

import ctypes
import logging
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from firn.cache.arrays.transfers import Lent, Transfers

log = logging.getLogger("firn.cache")

NON_BLOCKING = 1
PINNED_NBYTES = 1 << 30
"""Limit of pinned memory for what was read; beyond it the driver copies, which is slower."""
ROUND_NBYTES = 1 << 20
WORD_NBYTES, N_THREADS = 16, 1 << 16
COPY = """
    const long long step = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < n_words[0]; i += step) {
        to[i] = from[i];
    }
"""
FETCH = """
    const uint4* from = reinterpret_cast<const uint4*>(address[0]);
    uint4* to = reinterpret_cast<uint4*>(out);
"""
GATHER = """
    from += first[0] + blockIdx.y * head[0];
    uint4* to = reinterpret_cast<uint4*>(out) + (which * gridDim.y + blockIdx.y) * n_words[0];
"""
GATHER_ARRAY = "case {i}: from = reinterpret_cast<const uint4*>(a{i}); break;"
GATHER_PIECE = "case {i}: first = first{i}; n_words = n_words{i}; out = out{i}; break;"
GATHER_THREADS = 1 << 11
"""Threads for each head of each array of a piece."""
MAX_PIECES = 4
"""Pieces of a row that one kernel copies. Compiling a kernel for every count would take seconds."""
FILL_NBYTES = 512 << 20
"""Bytes of layers that are filled together."""
MAX_GATHERED = 256
"""Arrays that one kernel copies: each is a parameter, and a kernel has 4 KiB of parameters."""
LOCATE = """{{
    long long n = 1;
    bool is_whole = true;
    for (int d = a{i}_ndim - 1; d >= 0; --d) {{
        is_whole = is_whole && (a{i}_shape[d] <= 1 || a{i}_strides[d] == n);
        n *= a{i}_shape[d];
    }}
    at{i}[0] = is_whole ? reinterpret_cast<unsigned long long>(a{i}) : 0;
}}"""
"""The address of an array; 0 if its bytes are not contiguous."""


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
        self._gathers: dict[int, Any] = {}
        """Kernels by the number of arrays they copy."""
        self._locates: dict[int, Any] = {}
        """Kernels by the number of arrays they locate."""
        self.gathers = True
        """Whether `gather` may be used."""
        device = ctypes.c_int()
        self._call("cuInit", ctypes.c_uint(0))
        self._call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(0))
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)

    def compile(self) -> None:
        """Build the kernel that fetches from pinned memory."""
        self._fetch = mx.fast.cuda_kernel(
            name="firn_fetch",
            input_names=["address", "n_words"],
            output_names=["out"],
            source=FETCH + COPY,
        )

    def forget_kernel(self) -> None:
        self._fetch = None

    def stop_gathering(self, why: object) -> None:
        self.gathers = False
        log.warning("the cache cuts records layer by layer, which is slower: %s", why)

    def gather(
        self, arrays: Sequence[mx.array], row: int, bounds: Sequence[tuple[int, int]]
    ) -> list[mx.array]:
        """Columns [start, end) of one row of these arrays, which are of one shape and type: one new
        array for each of at most MAX_PIECES bounds."""
        n, k, first = len(arrays), len(bounds), arrays[0]
        _, n_heads, n_columns, width = first.shape
        words = width * first.itemsize // WORD_NBYTES
        begin, n_unused = row * n_heads * n_columns, MAX_PIECES - k
        # An array per number: MLX creates eight bytes without asking the driver for memory.
        numbers = [mx.array(n_columns * words, mx.int64)]
        numbers += [mx.array((begin + start) * words, mx.int64) for start, _ in bounds]
        numbers += numbers[:1] * n_unused
        numbers += [mx.array((end - start) * words, mx.int64) for start, end in bounds]
        numbers += numbers[:1] * n_unused
        if n not in self._gathers:
            self._gathers[n] = _gather_kernel(n)
        shapes = [(n, 1, n_heads, end - start, width) for start, end in bounds]
        outs = self._gathers[n](
            inputs=[*arrays, *numbers],
            grid=(GATHER_THREADS, n_heads, n * k),
            threadgroup=(256, 1, 1),
            output_shapes=[*shapes, *[(1,)] * n_unused],
            output_dtypes=[first.dtype] * MAX_PIECES,
        )
        return outs[:k]  # type: ignore[no-any-return]

    def locate(self, arrays: Sequence[mx.array]) -> list[mx.array]:
        """The addresses of these arrays, lazily. A kernel finds them: if Python asks for an
        address, MLX moves the array to managed memory, which takes milliseconds with the GIL held,
        and makes the array and whatever reuses its buffer later slow to use."""
        n = len(arrays)
        if n not in self._locates:
            self._locates[n] = mx.fast.cuda_kernel(
                name=f"firn_locate_{n}",
                input_names=[f"a{i}" for i in range(n)],
                output_names=[f"at{i}" for i in range(n)],
                source="\n".join(LOCATE.format(i=i) for i in range(n)),
                ensure_row_contiguous=False,
            )
        return self._locates[n](  # type: ignore[no-any-return]
            inputs=list(arrays),
            grid=(1, 1, 1),
            threadgroup=(1, 1, 1),
            output_shapes=[(1,)] * n,
            output_dtypes=[mx.uint64] * n,
        )

    def to_host(self, addresses: Sequence[mx.array], sizes: Sequence[int]) -> list[memoryview]:
        """The bytes at these addresses, which `locate` has found; valid until this thread's next call.

        The caller keeps the arrays alive. Python must not have asked for their addresses since.
        """
        stream, at = self._stream(), self._pinned(sum(sizes))
        views = []
        for address, nbytes in zip(addresses, sizes, strict=True):
            to, source = ctypes.c_void_p(at), _checked(address)
            self._call("cuMemcpyDtoHAsync_v2", to, source, ctypes.c_size_t(nbytes), stream)
            views.append(memoryview((ctypes.c_uint8 * nbytes).from_address(at)).cast("B"))
            at += nbytes
        self._call("cuStreamSynchronize", stream)
        return views

    def stage(self, buffers: Sequence[memoryview]) -> list[memoryview]:
        """A copy in pinned memory, which is freed with the copy; or the buffers as they are."""
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
        """A new array with these bytes, which must stay alive until it is evaluated."""
        at = host.ctypes.data
        if self._fetch is not None and any(a <= at < a + n for a, n in self._pinned_at):
            return self._fetched(at, host.nbytes, shape, dtype)
        array = mx.zeros(shape, dtype)
        (address,) = self.locate([array])
        mx.eval(array, address)
        to, stream = _checked(address), self._stream()
        source, size = ctypes.c_void_p(host.ctypes.data), ctypes.c_size_t(array.nbytes)
        self._call("cuMemcpyHtoDAsync_v2", to, source, size, stream)
        self._call("cuStreamSynchronize", stream)
        return array

    def _fetched(
        self, address: int, nbytes: int, shape: tuple[int, ...], dtype: mx.Dtype
    ) -> mx.array:
        n_words = -(-nbytes // WORD_NBYTES)
        (out,) = self._fetch(
            inputs=[mx.array(address, mx.uint64), mx.array(n_words, mx.int64)],
            grid=(N_THREADS, 1, 1),
            threadgroup=(256, 1, 1),
            output_shapes=[(n_words * WORD_NBYTES,)],
            output_dtypes=[mx.uint8],
        )
        return out[:nbytes].view(dtype).reshape(shape)  # type: ignore[no-any-return]

    def _take(self, nbytes: int) -> np.ndarray[Any, Any] | None:
        """Pinned memory; None if that would exceed PINNED_NBYTES."""
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
        """A pinned buffer. Each thread keeps its own, because allocating one is slow."""
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


def _gather_kernel(n_arrays: int) -> Any:
    arrays = "\n".join(GATHER_ARRAY.format(i=i) for i in range(n_arrays))
    pieces = "\n".join(GATHER_PIECE.format(i=i) for i in range(1, MAX_PIECES))
    choice = f"""
        const long long which = blockIdx.z % {n_arrays};
        const uint4* from = nullptr;
        switch (which) {{ {arrays} }}
        auto first = first0; auto n_words = n_words0; auto out = out0;
        switch (blockIdx.z / {n_arrays}) {{ {pieces} }}
    """
    numbers = [f"{name}{i}" for name in ("first", "n_words") for i in range(MAX_PIECES)]
    return mx.fast.cuda_kernel(
        name=f"firn_gather_{n_arrays}",
        input_names=[*(f"a{i}" for i in range(n_arrays)), "head", *numbers],
        output_names=[f"out{i}" for i in range(MAX_PIECES)],
        source=choice + GATHER + COPY,
    )


def _checked(address: mx.array) -> ctypes.c_uint64:
    found = int(address.item())  # type: ignore[arg-type]
    if not found:
        raise CudaError("an array is not contiguous")
    return ctypes.c_uint64(found)


class BusTransfers(Transfers):
    """Records move by the driver's copies and firn's kernels."""

    awaits_copies = False
    max_pieces = MAX_PIECES
    needs_trial = True

    def __init__(self, cuda: Cuda) -> None:
        super().__init__(fill_nbytes=FILL_NBYTES)
        self._cuda = cuda

    @property
    def gathers(self) -> bool:
        return self._cuda.gathers

    def lend(self, arrays: Sequence[mx.array]) -> Lent:
        """Without waiting: the writer waits. Here it would wait for the step in flight, too."""
        addresses = tuple(self._cuda.locate(arrays)) if arrays else ()
        mx.async_eval(addresses)
        return _OnDevice(self._cuda, tuple(arrays), addresses)

    def stage(self, buffers: Sequence[memoryview]) -> Sequence[memoryview]:
        try:
            return self._cuda.stage(buffers)
        except CudaError:  # no pinned memory: the driver copies, which is slower
            return buffers

    def array(
        self, data: np.ndarray[Any, Any], shape: tuple[int, ...], dtype: mx.Dtype
    ) -> mx.array:
        if not data.nbytes:
            return super().array(data, shape, dtype)
        return self._cuda.to_device(data, shape, dtype)

    def can_gather(self, arrays: Sequence[mx.array]) -> bool:
        first = arrays[0]
        is_whole = first.ndim == 4 and first.shape[-1] * first.itemsize % WORD_NBYTES == 0
        return is_whole and len(arrays) <= MAX_GATHERED

    def gather(
        self, arrays: Sequence[mx.array], row: int, bounds: Sequence[tuple[int, int]]
    ) -> list[mx.array]:
        return self._cuda.gather(arrays, row, bounds)

    def stop_gathering(self, why: object) -> None:
        self._cuda.stop_gathering(why)


class _OnDevice:
    """Keeps the arrays alive until they are read."""

    def __init__(
        self, cuda: Cuda, arrays: tuple[mx.array, ...], addresses: tuple[mx.array, ...]
    ) -> None:
        self._cuda, self._arrays, self._addresses = cuda, arrays, addresses

    def fetch(self) -> list[memoryview]:
        mx.eval(self._addresses)
        return self._cuda.to_host(self._addresses, [a.nbytes for a in self._arrays])


def find_transfers() -> Transfers:
    """By MLX, which is slow, if the driver is not as expected."""
    try:
        cuda = Cuda()
        _check(cuda)
    except (OSError, AttributeError, TypeError, CudaError) as e:
        log.warning(
            "the cache copies records to and from the GPU through MLX, which is slow: %s", e
        )
        return Transfers(fill_nbytes=FILL_NBYTES)
    return BusTransfers(cuda)


def _check(cuda: Cuda) -> None:
    """Raises CudaError if the driver's copies change bytes; if the kernel's do, disables it."""
    want = np.arange(50_001, dtype=np.uint16)

    def is_same(data: np.ndarray[Any, Any]) -> bool:
        array = mx.concatenate(
            [cuda.to_device(data, want.shape, mx.uint16), mx.zeros(1, mx.uint16)]
        )
        addresses = cuda.locate([array])
        mx.eval(array, addresses)
        (copy,) = cuda.to_host(addresses, [array.nbytes])
        return bytes(copy)[: want.nbytes] == want.tobytes()

    if not is_same(want.view(np.uint8)):
        raise CudaError("a copy came back changed")
    try:
        cuda.compile()
        (staged,) = cuda.stage([memoryview(want.tobytes())])
        if not is_same(np.frombuffer(staged, np.uint8)):
            raise CudaError("a kernel's copy came back changed")
    except (RuntimeError, ValueError, AttributeError, TypeError) as e:
        cuda.forget_kernel()
        log.warning(
            "the cache copies records to the GPU through the driver, which is slower: %s", e
        )
