"""Products of a few tokens with a weight matrix, on CUDA.

MLX multiplies a single token by a kernel of its own and calls cuBLAS for more. Each such call takes the
host some 15 to 40 us (a heuristic, descriptors, a capture), whatever it computes, and a step has
hundreds of them. The kernel here is launched like MLX's own.

    block    16 columns of the result: 8 warps, each with a part of the inner dimension
    warp     32 values of the inner dimension at a time; every lane loads 16 bytes of a weight row and of
             token rows, and the tensor cores multiply 16 tokens by 8 columns. The weights of four such
             chunks are loaded at once: the memory answers late
    lanes    a lane's eight values fill the slots of two multiplications in the same order for weights
             and tokens: which slot holds which value does not matter to a sum

Sums are in float32, as in cuBLAS.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import mlx.core as mx
from mlx import nn

from firn.models.faults import first_line

MAX_TOKENS = 32
"""For more tokens, cuBLAS gains more on the device than this kernel saves on the host."""
TILE_TOKENS = 16
"""Of one multiplication; a block makes one or two with the weights that it loads."""
N_COLUMNS, N_INNER, N_THREADS = 16, 32, 256
"""Of a block; a matrix must be a multiple of the first two."""
DTYPE = mx.bfloat16
"""Only this type: another would need a second kernel, compiled at each start."""
TOLERANCE = 2e-2

SOURCE = """
    constexpr int n_warps = 8, n_tiles = 2, n_ahead = 4;
    __shared__ float part[n_warps][M_TILES * 16][n_tiles * 8 + 1];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int slot = (lane & 3) * 8, line = lane >> 2;
    const int n_inner = w_shape[1], n_out = w_shape[0], n_chunks = n_inner / 32;
    int n_tokens = 1;
    for (int i = 0; i + 1 < x_ndim; ++i) {
      n_tokens *= x_shape[i];
    }
    const int first = blockIdx.x * (n_tiles * 8);
    const __nv_bfloat16* weights = w + (int64_t)(first + line) * n_inner + slot;
    const __nv_bfloat16* tokens = x + (int64_t)line * n_inner + slot;
    float sums[M_TILES][n_tiles][4] = {};
    for (int start = warp; start < n_chunks; start += n_warps * n_ahead) {
      uint4 b[n_ahead][n_tiles];
      #pragma unroll
      for (int k = 0; k < n_ahead; ++k) {
        const int chunk = start + k * n_warps;
        #pragma unroll
        for (int j = 0; j < n_tiles; ++j) {
          const __nv_bfloat16* at = weights + (int64_t)j * 8 * n_inner + chunk * 32;
          b[k][j] = chunk < n_chunks ? __ldcs(reinterpret_cast<const uint4*>(at)) : uint4{0, 0, 0, 0};
        }
      }
      #pragma unroll
      for (int k = 0; k < n_ahead; ++k) {
        const int chunk = start + k * n_warps;
        if (chunk >= n_chunks) {
          break;
        }
        #pragma unroll
        for (int i = 0; i < M_TILES; ++i) {
          const __nv_bfloat16* at = tokens + (int64_t)i * 16 * n_inner + chunk * 32;
          uint4 a = {0, 0, 0, 0}, c = {0, 0, 0, 0};
          if (i * 16 + line < n_tokens) {
            a = *reinterpret_cast<const uint4*>(at);
          }
          if (i * 16 + line + 8 < n_tokens) {
            c = *reinterpret_cast<const uint4*>(at + (int64_t)8 * n_inner);
          }
          #pragma unroll
          for (int j = 0; j < n_tiles; ++j) {
            multiply(sums[i][j], a.x, c.x, a.y, c.y, b[k][j].x, b[k][j].y);
            multiply(sums[i][j], a.z, c.z, a.w, c.w, b[k][j].z, b[k][j].w);
          }
        }
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
    (out,) = _kernel()(
        inputs=[x, weight],
        template=[("M_TILES", 1 if x.size <= TILE_TOKENS * n_inner else 2)],
        grid=(n_out // N_COLUMNS * N_THREADS, 1, 1),
        threadgroup=(N_THREADS, 1, 1),
        output_shapes=[(*x.shape[:-1], n_out)],
        output_dtypes=[DTYPE],
    )
    result: mx.array = out
    return result


def fault() -> str | None:
    """Compile the kernel and try it on this device. Returns why it cannot be used; None if it can."""
    weight = mx.random.normal((48, 1056), key=mx.random.key(1)).astype(DTYPE)
    for n_tokens in (2, 9, 17, MAX_TOKENS):
        x = mx.random.normal((1, n_tokens, 1056), key=mx.random.key(n_tokens)).astype(DTYPE)
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
