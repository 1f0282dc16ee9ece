"""Products of a few tokens with a weight matrix, on CUDA.

MLX multiplies a single token with a kernel of its own and calls cuBLAS for more. Each such call
takes the host about 15 to 40 us (a heuristic, descriptors, a capture), whatever it computes, and a
step has hundreds of them. The kernel here is launched like MLX's own.

    block    64 tokens or fewer, and 32 columns of the result
    chunk    128 or 256 values of each row of weights and tokens, copied to shared memory a few
             chunks ahead to hide memory latency. Its 16-byte parts are permuted by row, so that the
             rows of a part are in different banks
    warp     a slice of each chunk: every fourth or eighth group of 16 values. The tensor cores
             multiply 16 tokens by 8 columns; the slices are added at the end

Sums are in float32, as in cuBLAS. Their order depends on the matrix alone, so a token's result does
not depend on the tokens that are multiplied with it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx
from mlx import nn

from firn.backends.cuda.source import DTYPE, MULTIPLY, compact
from firn.models.faults import first_line
from firn.models.patches import Patches

MAX_TOKENS = 128
"""With more tokens, a call of cuBLAS takes more time on the device than on the host."""
N_COLUMNS, N_ALIGNED = 32, 8
"""Columns of a block; values of the inner dimension that are copied together."""
N_BLOCKS = 132
"""Blocks that keep an H200 busy, one on each multiprocessor."""
TOLERANCE = 2e-2
TRIALS = ((96, 2632), ((N_BLOCKS + 1) * N_COLUMNS, 200))
"""Matrices (columns, inner dimension) that the kernel is tried with: of many chunks, and of few."""
N_TRIED = (9, 25, 57, MAX_TOKENS - 7)
"""Tokens of each trial."""

SOURCE = """
    constexpr int n_rows = M_TILES * 16, n_columns = 32, n_lines = n_columns + n_rows;
    constexpr int n_threads = 32 * N_SLICES, n_values = 16 * N_SLICES * N_TURNS, n_parts = n_values / 8;
    constexpr int n_at_once = n_threads / n_parts, n_loads = (n_lines + n_at_once - 1) / n_at_once;
    extern __shared__ uint4 room[];
    const int lane = threadIdx.x & 31, slice = threadIdx.x >> 5;
    const int n_inner = w_shape[1], n_out = w_shape[0], n_chunks = (n_inner + n_values - 1) / n_values;
    int n_tokens = 1;
    for (int i = 0; i + 1 < x_ndim; ++i) {
      n_tokens *= x_shape[i];
    }
    const int first_column = blockIdx.x * n_columns, first_token = blockIdx.y * n_rows;
    const int part = threadIdx.x % n_parts, own_line = threadIdx.x / n_parts;
    const __nv_bfloat16* from[n_loads];
    #pragma unroll
    for (int i = 0; i < n_loads; ++i) {
      const int line = own_line + i * n_at_once, token = first_token + line - n_columns;
      from[i] = line < n_columns ? w + (int64_t)(first_column + line) * n_inner
          : token < n_tokens ? x + (int64_t)token * n_inner : nullptr;
    }
    auto fetch = [&](int chunk) {
      if (chunk < n_chunks) {
        uint4* stage = room + chunk % N_STAGES * (n_lines * n_parts);
        const int at = chunk * n_values + part * 8;
        #pragma unroll
        for (int i = 0; i < n_loads; ++i) {
          const int line = own_line + i * n_at_once;
          if (n_lines % n_at_once == 0 || line < n_lines) {
            const bool is_there = from[i] != nullptr && at < n_inner;
            uint4* to = stage + line * n_parts + (part ^ (line & 7));
            copy_async(to, is_there ? from[i] + at : w, is_there ? 16 : 0);
          }
        }
      }
      end_copies();
    };
    float sums[M_TILES][4][4] = {};
    #pragma unroll
    for (int i = 0; i < N_STAGES - 1; ++i) {
      fetch(i);
    }
    for (int chunk = 0; chunk < n_chunks; ++chunk) {
      await_copies<N_STAGES - 2>();
      __syncthreads();
      fetch(chunk + N_STAGES - 1);
      const uint4* stage = room + chunk % N_STAGES * (n_lines * n_parts);
      #pragma unroll
      for (int turn = 0; turn < N_TURNS; ++turn) {
        const int k = 2 * (turn * N_SLICES + slice);
        unsigned b[4][2];
        #pragma unroll
        for (int j = 0; j < 4; j += 2) {
          const int line = (j + (lane >> 4)) * 8 + (lane & 7);
          const int at = line * n_parts + ((k + (lane >> 3 & 1)) ^ (line & 7));
          load_four(b[j][0], b[j][1], b[j + 1][0], b[j + 1][1], stage + at);
        }
        #pragma unroll
        for (int i = 0; i < M_TILES; ++i) {
          const int line = n_columns + i * 16 + (lane & 15);
          const int at = line * n_parts + ((k + (lane >> 4)) ^ (line & 7));
          unsigned a[4];
          load_four(a[0], a[1], a[2], a[3], stage + at);
          #pragma unroll
          for (int j = 0; j < 4; ++j) {
            multiply(sums[i][j], a[0], a[1], a[2], a[3], b[j][0], b[j][1]);
          }
        }
      }
    }
    constexpr int m_pass = M_TILES < 2 ? M_TILES : 2, stride = n_columns + 8;
    float* parts = reinterpret_cast<float*>(room);
    #pragma unroll
    for (int pass = 0; pass < M_TILES; pass += m_pass) {
      __syncthreads();
      #pragma unroll
      for (int i = 0; i < m_pass; ++i) {
        #pragma unroll
        for (int j = 0; j < 4; ++j) {
          #pragma unroll
          for (int k = 0; k < 2; ++k) {
            const int row = i * 16 + (lane >> 2) + k * 8, column = j * 8 + (lane & 3) * 2;
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
        for (int i = 0; i < N_SLICES; ++i) {
          const float* at = parts + (i * m_pass * 16 + row) * stride + column;
          const float2 more = *reinterpret_cast<const float2*>(at);
          sum.x += more.x;
          sum.y += more.y;
        }
        const int64_t token = first_token + pass * 16 + row;
        if (token < n_tokens) {
          *reinterpret_cast<__nv_bfloat162*>(out + token * n_out + first_column + column)
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
    """A variant of the kernel: a block multiplies up to 16 * m_tiles tokens with n_slices warps,
    each of which processes n_turns times 16 values of a chunk; n_stages - 1 chunks are copied
    ahead."""

    m_tiles: int
    n_stages: int
    n_slices: int
    n_turns: int

    @property
    def n_tokens(self) -> int:
        return 16 * self.m_tiles

    @property
    def n_threads(self) -> int:
        return 32 * self.n_slices

    @property
    def chunk(self) -> int:
        """Values of a row in a chunk."""
        return 16 * self.n_slices * self.n_turns

    @property
    def shared_nbytes(self) -> int:
        """Room for the chunks, reused after them for the slices' sums of up to 32 tokens."""
        chunks = self.n_stages * (self.n_tokens + N_COLUMNS) * self.chunk * DTYPE.size
        sums = self.n_slices * min(self.n_tokens, 32) * (N_COLUMNS + 8) * mx.float32.size
        return max(chunks, sums)

    @property
    def template(self) -> list[tuple[str, int]]:
        return [
            ("M_TILES", self.m_tiles),
            ("N_STAGES", self.n_stages),
            ("N_SLICES", self.n_slices),
            ("N_TURNS", self.n_turns),
        ]


ALONE = (Build(1, 4, 8, 2), Build(2, 3, 8, 2), Build(4, 4, 8, 1))
"""For matrices with at most one block per multiprocessor, which has the shared memory to itself."""
SHARED = (Build(1, 4, 4, 2), Build(2, 3, 4, 2), Build(4, 3, 4, 2))
"""For larger matrices: several small blocks share a multiprocessor, and wait in turns."""


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
    """Whether to compute x @ weight.T with this kernel."""
    n_out, n_inner = weight.shape
    return (
        n_inner < x.size <= MAX_TOKENS * n_inner
        and n_inner % N_ALIGNED == 0
        and n_out % N_COLUMNS == 0
        and weight.dtype == DTYPE
        and x.dtype == DTYPE
    )


def product(x: mx.array, weight: mx.array) -> mx.array:
    """x @ weight.T, where it `suits`."""
    n_out, n_inner = weight.shape
    n_tokens = x.size // n_inner
    builds = ALONE if n_out <= N_BLOCKS * N_COLUMNS else SHARED
    build = next((b for b in builds if n_tokens <= b.n_tokens), builds[-1])
    n_groups = -(-n_tokens // build.n_tokens)
    (out,) = _kernel(build.shared_nbytes)(
        inputs=[x, weight],
        template=build.template,
        grid=(n_out // N_COLUMNS * build.n_threads, n_groups, 1),
        threadgroup=(build.n_threads, 1, 1),
        output_shapes=[(*x.shape[:-1], n_out)],
        output_dtypes=[DTYPE],
    )
    result: mx.array = out
    return result


def fault() -> str | None:
    """Compile the kernel and try it on this device. Returns why it cannot be used; None if it can."""
    for n_out, n_inner in TRIALS:
        weight = mx.random.normal((n_out, n_inner), key=mx.random.key(1)).astype(DTYPE)
        for n_tokens in N_TRIED:
            x = mx.random.normal((1, n_tokens, n_inner), key=mx.random.key(n_tokens)).astype(DTYPE)
            want = x.astype(mx.float32) @ weight.astype(mx.float32).T
            try:
                error = mx.abs(product(x, weight).astype(mx.float32) - want).max()
                far = float(error / mx.abs(want).max())
            except (RuntimeError, ValueError) as e:
                return first_line(e)
            if not far < TOLERANCE:
                return f"a product of {n_tokens} tokens with {n_out} columns is off by {far:.3g}"
    return None


def install(patches: Patches) -> None:
    """Use the kernel in every linear layer without a bias, and in embeddings used as one."""
    patches.replace(nn.Linear, "__call__", _linear)
    patches.replace(nn.Embedding, "as_linear", _as_linear)


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
