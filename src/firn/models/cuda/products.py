"""Products of a few tokens with a weight matrix, on CUDA.

MLX multiplies a single token by a kernel of its own and calls cuBLAS for more. Each such call takes the
host some 15 to 40 us (a heuristic, descriptors, a capture), whatever it computes, and a step has
hundreds of them. The kernel here is launched like MLX's own.

    block    16 or 32 columns of the result: 8 warps, each with a part of the inner dimension
    warp     chunks of 64 values of the inner dimension, 128 bytes of each row: every lane loads 16 bytes
             twice, of weight rows and of token rows, and the tensor cores multiply 16 tokens by 8
             columns. The next chunks are loaded meanwhile: the memory answers late
    lanes    a lane's eight values fill the slots of two multiplications in the same order for weights
             and tokens: which slot holds which value does not matter to a sum

Sums are in float32, as in cuBLAS.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import mlx.core as mx
from mlx import nn

from firn.models.faults import first_line

MAX_TOKENS = 32
"""For more tokens, cuBLAS gains more on the device than this kernel saves on the host."""
N_WARPS = 8
N_COLUMNS, N_INNER = 32, 64
"""Of the widest block and of a chunk; a matrix must be a multiple of them."""
DTYPE = mx.bfloat16
"""Only this type: another would need a second kernel, compiled at each start."""
TOLERANCE = 2e-2

SOURCE = """
    constexpr int n_warps = N_WARPS, n_tiles = N_TILES, n_halves = 2;
    __shared__ float part[n_warps][M_TILES * 16][n_tiles * 8 + 1];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int slot = (lane & 3) * 8, line = lane >> 2;
    const int n_inner = w_shape[1], n_out = w_shape[0], n_chunks = n_inner / 64;
    int n_tokens = 1;
    for (int i = 0; i + 1 < x_ndim; ++i) {
      n_tokens *= x_shape[i];
    }
    const int first = blockIdx.x * (n_tiles * 8);
    const __nv_bfloat16* weights = w + (int64_t)(first + line) * n_inner + slot;
    const __nv_bfloat16* tokens = x + (int64_t)line * n_inner + slot;
    float sums[M_TILES][n_tiles][4] = {};
    uint4 b[N_AHEAD][n_halves][n_tiles], a[N_AHEAD][n_halves][M_TILES][2];
    auto fetch = [&](int k, int chunk) {
      const bool is_there = chunk < n_chunks;
      #pragma unroll
      for (int j = 0; j < n_tiles; ++j) {
        #pragma unroll
        for (int h = 0; h < n_halves; ++h) {
          const __nv_bfloat16* at = weights + (int64_t)j * 8 * n_inner + chunk * 64 + h * 32;
          b[k][h][j] = is_there ? __ldcs(reinterpret_cast<const uint4*>(at)) : uint4{0, 0, 0, 0};
        }
      }
      #pragma unroll
      for (int i = 0; i < 2 * M_TILES; ++i) {
        #pragma unroll
        for (int h = 0; h < n_halves; ++h) {
          const __nv_bfloat16* at = tokens + (int64_t)i * 8 * n_inner + chunk * 64 + h * 32;
          a[k][h][i / 2][i % 2] = is_there && i * 8 + line < n_tokens
              ? *reinterpret_cast<const uint4*>(at) : uint4{0, 0, 0, 0};
        }
      }
    };
    #pragma unroll
    for (int k = 0; k < N_AHEAD; ++k) {
      fetch(k, warp + k * n_warps);
    }
    for (int start = warp; start < n_chunks; start += n_warps * N_AHEAD) {
      #pragma unroll
      for (int k = 0; k < N_AHEAD; ++k) {
        #pragma unroll
        for (int h = 0; h < n_halves; ++h) {
          #pragma unroll
          for (int i = 0; i < M_TILES; ++i) {
            const uint4 x0 = a[k][h][i][0], x1 = a[k][h][i][1];
            #pragma unroll
            for (int j = 0; j < n_tiles; ++j) {
              const uint4 y = b[k][h][j];
              multiply(sums[i][j], x0.x, x1.x, x0.y, x1.y, y.x, y.y);
              multiply(sums[i][j], x0.z, x1.z, x0.w, x1.w, y.z, y.w);
            }
          }
        }
        fetch(k, start + (k + N_AHEAD) * n_warps);
      }
    }
    #pragma unroll
    for (int i = 0; i < M_TILES; ++i) {
      #pragma unroll
      for (int j = 0; j < n_tiles; ++j) {
        const int row = i * 16 + line, column = j * 8 + (lane & 3) * 2;
        part[warp][row][column] = sums[i][j][0];
        part[warp][row][column + 1] = sums[i][j][1];
        part[warp][row + 8][column] = sums[i][j][2];
        part[warp][row + 8][column + 1] = sums[i][j][3];
      }
    }
    __syncthreads();
    for (int e = threadIdx.x; e < n_tokens * n_tiles * 8; e += blockDim.x) {
      const int row = e / (n_tiles * 8), column = e % (n_tiles * 8);
      float sum = 0;
      #pragma unroll
      for (int i = 0; i < n_warps; ++i) {
        sum += part[i][row][column];
      }
      out[(int64_t)row * n_out + first + column] = static_cast<__nv_bfloat16>(sum);
    }
"""
MULTIPLY = """
__device__ inline void multiply(
    float (&s)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
      "{%0,%1,%2,%3};"
      : "+f"(s[0]), "+f"(s[1]), "+f"(s[2]), "+f"(s[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
"""


@cache
def _kernel() -> Any:
    return mx.fast.cuda_kernel(
        name="firn_few_tokens",
        input_names=["x", "w"],
        output_names=["out"],
        source=SOURCE,
        header=MULTIPLY,
    )


@dataclass(frozen=True, slots=True)
class _Build:
    """Of the kernel. A block multiplies up to 16 * m_tiles tokens by 8 * n_tiles columns; its warps load
    n_ahead chunks ahead. All three take registers, and so from the warps that an SM can hold at once."""

    m_tiles: int
    n_tiles: int
    n_ahead: int

    @property
    def n_columns(self) -> int:
        return 8 * self.n_tiles

    @property
    def template(self) -> list[tuple[str, int]]:
        return [
            ("M_TILES", self.m_tiles),
            ("N_TILES", self.n_tiles),
            ("N_WARPS", N_WARPS),
            ("N_AHEAD", self.n_ahead),
        ]


BUILDS = {16: _Build(1, n_tiles=2, n_ahead=2), MAX_TOKENS: _Build(2, n_tiles=4, n_ahead=1)}
"""By the most tokens that each is for."""


def suits(x: mx.array, weight: mx.array) -> bool:
    """Whether x @ weight.T is for this kernel."""
    n_out, n_inner = weight.shape
    return (
        n_inner < x.size <= MAX_TOKENS * n_inner
        and n_inner % N_INNER == 0
        and n_out % N_COLUMNS == 0
        and weight.dtype == DTYPE
        and x.dtype == DTYPE
    )


def product(x: mx.array, weight: mx.array) -> mx.array:
    """x @ weight.T, where it `suits`."""
    n_out, n_inner = weight.shape
    build = next(b for most, b in BUILDS.items() if x.size <= most * n_inner)
    n_threads = 32 * N_WARPS
    (out,) = _kernel()(
        inputs=[x, weight],
        template=build.template,
        grid=(n_out // build.n_columns * n_threads, 1, 1),
        threadgroup=(n_threads, 1, 1),
        output_shapes=[(*x.shape[:-1], n_out)],
        output_dtypes=[DTYPE],
    )
    result: mx.array = out
    return result


def fault() -> str | None:
    """Compile the kernel and try it on this device. Returns why it cannot be used; None if it can."""
    weight = mx.random.normal((96, 1088), key=mx.random.key(1)).astype(DTYPE)
    for n_tokens in (2, 9, 17, MAX_TOKENS):
        x = mx.random.normal((1, n_tokens, 1088), key=mx.random.key(n_tokens)).astype(DTYPE)
        want = x.astype(mx.float32) @ weight.astype(mx.float32).T
        try:
            error = mx.abs(product(x, weight).astype(mx.float32) - want).max()
            far = float(error / mx.abs(want).max())
        except (RuntimeError, ValueError) as e:
            return first_line(e)
        if not far < TOLERANCE:
            return f"a product of {n_tokens} tokens is off by {far:.3g}"
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
