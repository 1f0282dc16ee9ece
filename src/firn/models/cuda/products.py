"""Products of a few tokens with a weight matrix, on CUDA.

MLX multiplies a single token by a kernel of its own and calls cuBLAS for more. Each such call takes the
host some 15 to 40 us (a heuristic, descriptors, a capture), whatever it computes, and a step has
hundreds of them. The kernel here is launched like MLX's own.

    block    all tokens, and 32 or 64 columns of the result: 8 warps
    chunk    64 values of the inner dimension, 128 bytes of each row of weights and tokens, copied to
             shared memory some chunks ahead: the memory answers late. Its 16-byte parts are permuted
             by row, so that the rows of a part lie in different banks
    warp     a quarter of each chunk, and half of the columns. The tensor cores multiply 16 tokens by 8
             columns; the four quarters are added at the end

Sums are in float32, as in cuBLAS, and their order depends on shapes alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx
from mlx import nn

from firn.models.cuda.source import DTYPE, MULTIPLY, compact
from firn.models.faults import first_line

MAX_TOKENS = 128
"""For more tokens, a call of cuBLAS takes the device longer than the host."""
N_THREADS, N_INNER = 256, 64
"""Of a block and of a chunk; a matrix must be a multiple of the latter."""
MIN_COLUMNS, MAX_COLUMNS = 32, 64
"""Of a block. The more, the less often tokens are loaded, and the fewer blocks."""
N_BLOCKS = 128
"""As many keep an H200 busy."""
TOLERANCE = 2e-2
TRIALS = ((96, 1088), (N_BLOCKS * MAX_COLUMNS, 192))
"""Matrices (columns, inner dimension) that the kernel is tried with: of many chunks, and of few."""

SOURCE = """
    constexpr int n_rows = M_TILES * 16, n_columns = N_TILES * 16, n_lines = n_columns + n_rows;
    constexpr int n_slices = 4, n_threads = 256, n_loads = (n_lines + 31) / 32;
    extern __shared__ uint4 room[];
    const int lane = threadIdx.x & 31, slice = threadIdx.x >> 6, half = (threadIdx.x >> 5) & 1;
    const int n_inner = w_shape[1], n_out = w_shape[0], n_chunks = n_inner / 64;
    int n_tokens = 1;
    for (int i = 0; i + 1 < x_ndim; ++i) {
      n_tokens *= x_shape[i];
    }
    const int first = blockIdx.x * n_columns, part = threadIdx.x & 7;
    const __nv_bfloat16* from[n_loads];
    int n_bytes[n_loads];
    #pragma unroll
    for (int i = 0; i < n_loads; ++i) {
      const int line = (threadIdx.x >> 3) + i * 32, token = line - n_columns;
      n_bytes[i] = token < n_tokens ? 16 : 0;
      from[i] = (token < 0 ? w + (int64_t)(first + line) * n_inner
          : x + (int64_t)(token < n_tokens ? token : 0) * n_inner) + part * 8;
    }
    auto fetch = [&](int chunk) {
      if (chunk < n_chunks) {
        uint4* stage = room + chunk % N_STAGES * (n_lines * 8);
        #pragma unroll
        for (int i = 0; i < n_loads; ++i) {
          const int line = (threadIdx.x >> 3) + i * 32;
          if (n_lines % 32 == 0 || line < n_lines) {
            copy_async(stage + line * 8 + (part ^ (line & 7)), from[i] + chunk * 64, n_bytes[i]);
          }
        }
      }
      end_copies();
    };
    float sums[M_TILES][N_TILES][4] = {};
    #pragma unroll
    for (int i = 0; i < N_STAGES - 1; ++i) {
      fetch(i);
    }
    for (int chunk = 0; chunk < n_chunks; ++chunk) {
      await_copies<N_STAGES - 2>();
      __syncthreads();
      fetch(chunk + N_STAGES - 1);
      const uint4* stage = room + chunk % N_STAGES * (n_lines * 8);
      unsigned b[N_TILES][2];
      #pragma unroll
      for (int j = 0; j < N_TILES; j += 2) {
        const int line = (half * N_TILES + j + (lane >> 4)) * 8 + (lane & 7);
        const int at = line * 8 + ((2 * slice + (lane >> 3 & 1)) ^ (line & 7));
        load_four(b[j][0], b[j][1], b[j + 1][0], b[j + 1][1], stage + at);
      }
      #pragma unroll
      for (int i = 0; i < M_TILES; ++i) {
        const int line = n_columns + i * 16 + (lane & 15);
        unsigned a[4];
        load_four(a[0], a[1], a[2], a[3], stage + line * 8 + ((2 * slice + (lane >> 4)) ^ (line & 7)));
        #pragma unroll
        for (int j = 0; j < N_TILES; ++j) {
          multiply(sums[i][j], a[0], a[1], a[2], a[3], b[j][0], b[j][1]);
        }
      }
    }
    constexpr int m_pass = M_TILES < 4 ? M_TILES : 4, stride = n_columns + 8;
    float* parts = reinterpret_cast<float*>(room);
    #pragma unroll
    for (int pass = 0; pass < M_TILES; pass += m_pass) {
      __syncthreads();
      #pragma unroll
      for (int i = 0; i < m_pass; ++i) {
        #pragma unroll
        for (int j = 0; j < N_TILES; ++j) {
          #pragma unroll
          for (int k = 0; k < 2; ++k) {
            const int row = i * 16 + (lane >> 2) + k * 8;
            const int column = (half * N_TILES + j) * 8 + (lane & 3) * 2;
            *reinterpret_cast<float2*>(parts + (slice * m_pass * 16 + row) * stride + column)
                = float2{sums[pass + i][j][2 * k], sums[pass + i][j][2 * k + 1]};
          }
        }
      }
      __syncthreads();
      for (int e = threadIdx.x; e < m_pass * 16 * n_columns / 2; e += n_threads) {
        const int row = e / (n_columns / 2), column = e % (n_columns / 2) * 2;
        float2 sum = {0, 0};
        #pragma unroll
        for (int i = 0; i < n_slices; ++i) {
          const float* at = parts + (i * m_pass * 16 + row) * stride + column;
          const float2 more = *reinterpret_cast<const float2*>(at);
          sum.x += more.x;
          sum.y += more.y;
        }
        if (pass * 16 + row < n_tokens) {
          *reinterpret_cast<__nv_bfloat162*>(out + (int64_t)(pass * 16 + row) * n_out + first + column)
              = __floats2bfloat162_rn(sum.x, sum.y);
        }
      }
    }
"""
COPIES = """
__device__ inline unsigned shared_at(const void* at) {
  return static_cast<unsigned>(__cvta_generic_to_shared(at));
}
__device__ inline void copy_async(void* to, const void* from, int n_bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
      :: "r"(shared_at(to)), "l"(from), "r"(n_bytes) : "memory");
}
__device__ inline void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int n>
__device__ inline void await_copies() { asm volatile("cp.async.wait_group %0;" :: "n"(n) : "memory"); }
__device__ inline void load_four(
    unsigned& a, unsigned& b, unsigned& c, unsigned& d, const void* at) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
      : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(shared_at(at)) : "memory");
}
"""


@dataclass(frozen=True, slots=True)
class Build:
    """Of the kernel: a block multiplies up to 16 * m_tiles tokens by 16 * n_tiles columns, and copies
    n_stages - 1 chunks ahead."""

    m_tiles: int
    n_tiles: int
    n_stages: int

    @property
    def n_columns(self) -> int:
        return 16 * self.n_tiles

    @property
    def shared_nbytes(self) -> int:
        """Of the chunks, and after them of the sums of 64 tokens' quarters."""
        chunks = self.n_stages * (16 * self.m_tiles + self.n_columns) * N_INNER * DTYPE.size
        sums = 4 * 16 * min(self.m_tiles, 4) * (self.n_columns + 8) * mx.float32.size
        return max(chunks, sums)

    @property
    def template(self) -> list[tuple[str, int]]:
        return [
            ("M_TILES", self.m_tiles),
            ("N_TILES", self.n_tiles),
            ("N_STAGES", self.n_stages),
        ]


NARROW = {
    16: Build(1, 2, 8),
    32: Build(2, 2, 6),
    64: Build(4, 2, 5),
    MAX_TOKENS: Build(8, 2, 4),
}
WIDE = NARROW | {64: Build(4, 4, 5), MAX_TOKENS: Build(8, 4, 4)}
"""By the most tokens that each is for."""


@cache
def _kernel(shared_nbytes: int) -> Any:
    return mx.fast.cuda_kernel(
        name="firn_few_tokens",
        input_names=["x", "w"],
        output_names=["out"],
        source=compact(SOURCE),
        header=compact(MULTIPLY + COPIES),
        shared_memory=shared_nbytes,
    )


def suits(x: mx.array, weight: mx.array) -> bool:
    """Whether x @ weight.T is for this kernel."""
    n_out, n_inner = weight.shape
    return (
        n_inner < x.size <= MAX_TOKENS * n_inner
        and n_inner % N_INNER == 0
        and n_out % MIN_COLUMNS == 0
        and weight.dtype == DTYPE
        and x.dtype == DTYPE
    )


def product(x: mx.array, weight: mx.array) -> mx.array:
    """x @ weight.T, where it `suits`."""
    n_out, n_inner = weight.shape
    is_wide = n_out % MAX_COLUMNS == 0 and n_out >= N_BLOCKS * MAX_COLUMNS
    builds = WIDE if is_wide else NARROW
    build = next(b for most, b in builds.items() if x.size <= most * n_inner)
    (out,) = _kernel(build.shared_nbytes)(
        inputs=[x, weight],
        template=build.template,
        grid=(n_out // build.n_columns * N_THREADS, 1, 1),
        threadgroup=(N_THREADS, 1, 1),
        output_shapes=[(*x.shape[:-1], n_out)],
        output_dtypes=[DTYPE],
    )
    result: mx.array = out
    return result


def fault() -> str | None:
    """Compile the kernel and try it on this device. Returns why it cannot be used; None if it can."""
    for n_out, n_inner in TRIALS:
        weight = mx.random.normal((n_out, n_inner), key=mx.random.key(1)).astype(DTYPE)
        for most in NARROW:
            n_tokens = most - 7
            x = mx.random.normal((1, n_tokens, n_inner), key=mx.random.key(most)).astype(DTYPE)
            want = x.astype(mx.float32) @ weight.astype(mx.float32).T
            try:
                error = mx.abs(product(x, weight).astype(mx.float32) - want).max()
                far = float(error / mx.abs(want).max())
            except (RuntimeError, ValueError) as e:
                return first_line(e)
            if not far < TOLERANCE:
                return f"a product of {n_tokens} tokens with {n_out} columns is off by {far:.3g}"
    return None


def install() -> None:
    """For every linear layer without a bias, and for embeddings used as one."""
    nn.Linear.__call__ = _linear
    nn.Embedding.as_linear = _as_linear


_plain_linear = nn.Linear.__call__
_plain_as_linear = nn.Embedding.as_linear


def _linear(layer: Any, x: mx.array) -> mx.array:
    weight = layer["weight"]
    if "bias" not in layer and suits(x, weight):
        return product(x, weight)
    out: mx.array = _plain_linear(layer, x)
    return out


def _as_linear(layer: Any, x: mx.array) -> mx.array:
    weight = layer["weight"]
    out: mx.array = product(x, weight) if suits(x, weight) else _plain_as_linear(layer, x)
    return out
