"""Attention of a few tokens per row under a mask, on CUDA.

MLX has fast kernels for one row's next token and for long prompts. With a mask of columns, as a
batch has, a step of one token is composed of a dozen operations, and one of several tokens is
planned and dispatched by cuDNN, which takes more time on the host than on the device. The kernel
here accepts any mask, is launched like MLX's own and needs no plan for a new shape.

    block   16 queries (tokens and heads that share a key head), one row, one part of the columns
    warp    every fourth 16 columns, except those that no query sees; loads the next meanwhile
    part    of the columns, if rows and heads are too few for the device; a second kernel joins them

Products are of bfloat16 with float32 sums, the softmax is in float32. The order of sums depends on
shapes alone: the same step gives the same bits. Arrays whose strides or alignment the kernel does
not support give NaN, which the checks at load detect; none of mlx-lm's caches has such arrays.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import mlx.core as mx

from firn.backends.cuda.source import DTYPE, MULTIPLY, compact
from firn.models.faults import first_line
from firn.models.patches import Patches

log = logging.getLogger("firn.models")

MAX_TOKENS = 32
"""The most tokens of a row. With more, cuDNN's time on the host does not matter."""
WIDTHS = (64, 96, 128)
"""Widths of a head; wider heads do not fit into a thread's registers."""
N_QUERIES, N_THREADS = 16, 128
N_BLOCKS = 264
"""Blocks that keep an H200 busy: two for each of its multiprocessors."""
MIN_PART = 512
"""The fewest columns that are worth a block of their own."""
TOLERANCE, TRIAL_SCALE = 2e-2, 0.1

HEADER = """
__device__ inline float rise(float from, float to) { return to == -INFINITY ? 0.0f : exp2f(from - to); }
__device__ inline unsigned packed(float x, float y) {
  __nv_bfloat162 both = __floats2bfloat162_rn(x, y);
  return *reinterpret_cast<unsigned*>(&both);
}
__device__ inline uint4 eight(const __nv_bfloat16* at) { return *reinterpret_cast<const uint4*>(at); }
__device__ inline void load_transposed(unsigned (&r)[4], const __nv_bfloat16* at) {
  unsigned address = static_cast<unsigned>(__cvta_generic_to_shared(at));
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
      : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address) : "memory");
}
"""

SOURCE = """
    constexpr int n_warps = 4, width = D + 8, n_regs = D / 2;
    __shared__ __align__(16) __nv_bfloat16 room[n_warps * 16 * width];
    __shared__ float tops[n_warps][16], sums[n_warps][16];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, line = lane >> 2, quad = lane & 3;
    const int n_heads = q_shape[1], n_tokens = q_shape[2], n_kv = k_shape[1], n_columns = k_shape[2];
    const int group = n_heads / n_kv, n_rows = group * n_tokens;
    const int b = blockIdx.y / n_kv, kv = blockIdx.y % n_kv;
    const int per = ((n_columns + gridDim.z - 1) / gridDim.z + 15) / 16 * 16;
    const bool fits = q_strides[3] == 1 && k_strides[3] == 1 && v_strides[3] == 1
        && ((q_strides[0] | q_strides[1] | q_strides[2] | k_strides[0] | k_strides[1] | k_strides[2]
            | v_strides[0] | v_strides[1] | v_strides[2]) & 7) == 0
        && ((reinterpret_cast<size_t>(q) | reinterpret_cast<size_t>(k)
            | reinterpret_cast<size_t>(v)) & 15) == 0;
    const int begin = blockIdx.z * per, end = fits ? min(begin + per, n_columns) : begin;
    const float factor = scale[0] * 1.44269504f;
    int row[2], token[2], head[2];
    const bool* seen[2];
    uint4 qs[2][D / 32];
    #pragma unroll
    for (int i = 0; i < 2; ++i) {
      row[i] = blockIdx.x * 16 + line + 8 * i;
      token[i] = min(row[i] / group, n_tokens - 1);
      head[i] = kv * group + row[i] % group;
      seen[i] = mask + (mask_shape[0] > 1 ? b * mask_strides[0] : 0)
          + (mask_shape[1] > 1 ? head[i] * mask_strides[1] : 0)
          + (mask_shape[2] > 1 ? token[i] * mask_strides[2] : 0);
      #pragma unroll
      for (int c = 0; c < D / 32; ++c) {
        qs[i][c] = !fits ? uint4{} : eight(q + b * q_strides[0] + head[i] * q_strides[1]
            + token[i] * q_strides[2] + c * 32 + quad * 8);
      }
    }
    const __nv_bfloat16* ks = k + b * k_strides[0] + kv * k_strides[1] + quad * 8;
    const __nv_bfloat16* vs = v + b * v_strides[0] + kv * v_strides[1] + lane % (D / 8) * 8;
    const int64_t k_step = k_strides[2], v_step = v_strides[2];
    const int mask_step = mask_strides[3];
    __nv_bfloat16* mine = room + warp * 16 * width;
    float o[D / 8][4] = {}, top[2] = {-INFINITY, -INFINITY}, sum[2] = {0, 0};
    uint4 kk[2][D / 32], vv[D / 16];
    bool is_seen[2][4], is_seen_next[2][4];
    auto next = [&](int at) {
      for (; at < end; at += n_warps * 16) {
        bool any = false;
        #pragma unroll
        for (int j = 0; j < 2; ++j) {
          #pragma unroll
          for (int e = 0; e < 4; ++e) {
            const int column = at + j * 8 + quad * 2 + (e & 1), i = e >> 1;
            is_seen_next[j][e] = column < end && row[i] < n_rows && seen[i][column * mask_step];
            any |= is_seen_next[j][e];
          }
        }
        if (__any_sync(0xffffffff, any)) {
          break;
        }
      }
      return at;
    };
    auto load_keys = [&](int at) {
      #pragma unroll
      for (int j = 0; j < 2; ++j) {
        const __nv_bfloat16* from = ks + min(at + j * 8 + line, end - 1) * k_step;
        #pragma unroll
        for (int c = 0; c < D / 32; ++c) {
          kk[j][c] = eight(from + c * 32);
        }
      }
    };
    auto load_values = [&](int at) {
      #pragma unroll
      for (int i = 0; i < D / 16; ++i) {
        vv[i] = eight(vs + min(at + (i * 32 + lane) / (D / 8), end - 1) * v_step
            + ((i * 32 + lane) % (D / 8) - lane % (D / 8)) * 8);
      }
    };
    int after = next(begin + warp * 16);
    if (after < end) {
      load_keys(after);
      load_values(after);
    }
    while (after < end) {
      float s[2][4] = {};
      #pragma unroll
      for (int e = 0; e < 8; ++e) {
        is_seen[e / 4][e % 4] = is_seen_next[e / 4][e % 4];
      }
      after = next(after + n_warps * 16);
      #pragma unroll
      for (int c = 0; c < D / 32; ++c) {
        const uint4 x = qs[0][c], y = qs[1][c];
        #pragma unroll
        for (int j = 0; j < 2; ++j) {
          multiply(s[j], x.x, y.x, x.y, y.y, kk[j][c].x, kk[j][c].y);
          multiply(s[j], x.z, y.z, x.w, y.w, kk[j][c].z, kk[j][c].w);
        }
      }
      if (after < end) {
        load_keys(after);
      }
      #pragma unroll
      for (int i = 0; i < 2; ++i) {
        float most = -INFINITY;
        #pragma unroll
        for (int j = 0; j < 2; ++j) {
          #pragma unroll
          for (int e = 2 * i; e < 2 * i + 2; ++e) {
            s[j][e] = is_seen[j][e] ? s[j][e] * factor : -INFINITY;
            most = fmaxf(most, s[j][e]);
          }
        }
        most = fmaxf(most, __shfl_xor_sync(0xffffffff, most, 1));
        most = fmaxf(top[i], fmaxf(most, __shfl_xor_sync(0xffffffff, most, 2)));
        const float fade = rise(top[i], most);
        top[i] = most;
        sum[i] *= fade;
        #pragma unroll
        for (int j = 0; j < 2; ++j) {
          #pragma unroll
          for (int e = 2 * i; e < 2 * i + 2; ++e) {
            s[j][e] = rise(s[j][e], most);
            sum[i] += s[j][e];
          }
        }
        #pragma unroll
        for (int j = 0; j < D / 8; ++j) {
          o[j][2 * i] *= fade;
          o[j][2 * i + 1] *= fade;
        }
      }
      #pragma unroll
      for (int i = 0; i < D / 16; ++i) {
        const int n = i * 32 + lane;
        *reinterpret_cast<uint4*>(mine + n / (D / 8) * width + n % (D / 8) * 8) = vv[i];
      }
      __syncwarp();
      if (after < end) {
        load_values(after);
      }
      const unsigned p0 = packed(s[0][0], s[0][1]), p1 = packed(s[0][2], s[0][3]);
      const unsigned p2 = packed(s[1][0], s[1][1]), p3 = packed(s[1][2], s[1][3]);
      #pragma unroll
      for (int j = 0; j < D / 16; ++j) {
        unsigned r[4];
        load_transposed(r, mine + (lane & 15) * width + j * 16 + (lane >> 4) * 8);
        multiply(o[2 * j], p0, p1, p2, p3, r[0], r[1]);
        multiply(o[2 * j + 1], p0, p1, p2, p3, r[2], r[3]);
      }
      __syncwarp();
    }
    #pragma unroll
    for (int i = 0; i < 2; ++i) {
      sum[i] += __shfl_xor_sync(0xffffffff, sum[i], 1);
      sum[i] += __shfl_xor_sync(0xffffffff, sum[i], 2);
      if (quad == 0) {
        tops[warp][line + 8 * i] = top[i];
        sums[warp][line + 8 * i] = sum[i];
      }
    }
    __syncthreads();
    #pragma unroll
    for (int i = 0; i < 2; ++i) {
      float most = -INFINITY;
      #pragma unroll
      for (int w = 0; w < n_warps; ++w) {
        most = fmaxf(most, tops[w][line + 8 * i]);
      }
      sum[i] = 0;
      #pragma unroll
      for (int w = 0; w < n_warps; ++w) {
        sum[i] += sums[w][line + 8 * i] * rise(tops[w][line + 8 * i], most);
      }
      const float fade = rise(top[i], most);
      top[i] = most;
      #pragma unroll
      for (int j = 0; j < D / 8; ++j) {
        o[j][2 * i] *= fade;
        o[j][2 * i + 1] *= fade;
      }
    }
    float* values = reinterpret_cast<float*>(room);
    for (int half = n_warps / 2; half > 0; half /= 2) {
      if (warp >= half && warp < 2 * half) {
        #pragma unroll
        for (int j = 0; j < n_regs; ++j) {
          values[((warp - half) * n_regs + j) * 32 + lane] = o[j / 4][j % 4];
        }
      }
      __syncthreads();
      if (warp < half) {
        #pragma unroll
        for (int j = 0; j < n_regs; ++j) {
          o[j / 4][j % 4] += values[(warp * n_regs + j) * 32 + lane];
        }
      }
      __syncthreads();
    }
    if (warp > 0) {
      return;
    }
    #pragma unroll
    for (int i = 0; i < 2; ++i) {
      if (row[i] >= n_rows) {
        continue;
      }
      const int64_t to = ((int64_t)b * n_tokens + token[i]) * n_heads + head[i];
      sum[i] = fits ? sum[i] : NAN;
      if (gridDim.z == 1) {
        #pragma unroll
        for (int j = 0; j < D / 8; ++j) {
          *reinterpret_cast<unsigned*>(out + to * D + j * 8 + quad * 2) =
              sum[i] == 0 ? 0u : packed(o[j][2 * i] / sum[i], o[j][2 * i + 1] / sum[i]);
        }
        continue;
      }
      const int64_t place = blockIdx.z * ((int64_t)q_shape[0] * n_tokens * n_heads) + to;
      #pragma unroll
      for (int j = 0; j < D / 8; ++j) {
        *reinterpret_cast<float2*>(part + place * D + j * 8 + quad * 2) =
            make_float2(o[j][2 * i], o[j][2 * i + 1]);
      }
      if (quad == 0) {
        *reinterpret_cast<float2*>(stats + place * 2) = make_float2(top[i], sum[i]);
      }
    }
"""
JOIN = """
    const int64_t n_parts = part_shape[0], n_rows = part_shape[1], row = blockIdx.x;
    float most = -INFINITY, value = 0, sum = 0;
    for (int64_t i = 0; i < n_parts; ++i) {
      most = fmaxf(most, stats[(i * n_rows + row) * 2]);
    }
    for (int64_t i = 0; i < n_parts; ++i) {
      const float share = rise(stats[(i * n_rows + row) * 2], most);
      sum += stats[(i * n_rows + row) * 2 + 1] * share;
      value += part[(i * n_rows + row) * D + threadIdx.x] * share;
    }
    out[row * D + threadIdx.x] = __float2bfloat16(sum == 0 ? 0.0f : value / sum);
"""


@cache
def _kernel() -> Any:
    return mx.fast.cuda_kernel(
        name="firn_attention",
        input_names=["q", "k", "v", "mask", "scale"],
        output_names=["out", "part", "stats"],
        source=compact(SOURCE),
        header=compact(MULTIPLY + HEADER),
        ensure_row_contiguous=False,
    )


@cache
def _joining() -> Any:
    return mx.fast.cuda_kernel(
        name="firn_attention_join",
        input_names=["part", "stats"],
        output_names=["out"],
        source=compact(JOIN),
        header=compact(HEADER),
    )


@cache
def _number(value: float) -> mx.array:
    return mx.array([value], dtype=mx.float32)


def suits(q: mx.array, k: mx.array, v: mx.array, mask: mx.array) -> bool:
    """Whether to compute this attention with the kernel."""
    n_tokens, width = q.shape[2:]
    return (
        mask.dtype == mx.bool_
        and mask.ndim in (2, 4)
        and mask.shape[-1] == k.shape[2]
        and n_tokens <= MAX_TOKENS
        and width in WIDTHS
        and width == k.shape[3] == v.shape[3]
        and q.dtype == k.dtype == v.dtype == DTYPE
        and _is_right(width)
    )


def attention(q: mx.array, k: mx.array, v: mx.array, *, scale: float, mask: mx.array) -> mx.array:
    """softmax(scale * q @ k.T) @ v over the columns that the mask shows, where it `suits`.

    Arrays are (rows, heads, tokens, width).
    """
    n_rows, n_heads, n_tokens, width = q.shape
    n_kv, n_columns = k.shape[1:3]
    if mask.ndim == 2:
        mask = mask[None, None]
    n_tiles = -(-(n_heads // n_kv * n_tokens) // N_QUERIES)
    n_parts = max(1, min(n_columns // MIN_PART, N_BLOCKS // (n_tiles * n_rows * n_kv)))
    n_outputs = n_rows * n_tokens * n_heads
    in_parts = (n_parts, n_outputs) if n_parts > 1 else (1, 1)
    shape = (n_rows, n_tokens, n_heads, width)
    out, part, stats = _kernel()(
        inputs=[q, k, v, mask, _number(scale)],
        grid=(n_tiles * N_THREADS, n_rows * n_kv, n_parts),
        threadgroup=(N_THREADS, 1, 1),
        template=[("D", width)],
        output_shapes=[shape if n_parts == 1 else (1,), (*in_parts, width), (*in_parts, 2)],
        output_dtypes=[DTYPE, mx.float32, mx.float32],
    )
    if n_parts > 1:
        (out,) = _joining()(
            inputs=[part, stats],
            grid=(n_outputs * width, 1, 1),
            threadgroup=(width, 1, 1),
            template=[("D", width)],
            output_shapes=[shape],
            output_dtypes=[DTYPE],
        )
    # In memory tokens come before heads, as models need it next.
    result: mx.array = out.transpose(0, 2, 1, 3)
    return result


@cache
def _is_right(width: int) -> bool:
    """Compile the kernels for heads of this width and try them on this device, once per process."""
    fault = _fault(width)
    if fault is not None:
        log.warning("attention of a few tokens is left to MLX: %s", fault)
    return fault is None


def _fault(width: int) -> str | None:
    """Why the kernel cannot be used; None if it can."""
    for n_rows, n_tokens, n_columns in ((3, 1, 70), (1, 9, 2 * MIN_PART + 7)):
        q, k, v, mask = _trial(n_rows, n_tokens, n_columns, width)
        try:
            got = attention(q, k, v, scale=TRIAL_SCALE, mask=mask).astype(mx.float32)
            want = in_float32(q, k, v, mask, scale=TRIAL_SCALE)
            far = float(mx.abs(got - want).max() / mx.abs(want).max())
        except (RuntimeError, ValueError) as e:
            return first_line(e)
        if not far < TOLERANCE:
            return f"{n_tokens} tokens, heads of {width} values: off by {far:.3g}"
    return None


def _trial(n_rows: int, n_tokens: int, n_columns: int, width: int) -> list[mx.array]:
    """Queries stored with tokens before heads, keys and values in a longer buffer, and a mask in
    which each row begins at a column of its own."""
    shapes = [(n_rows, n_tokens, 8, width)] + 2 * [(n_rows, 2, n_columns + 9, width)]
    q, k, v = (
        mx.random.normal(s, key=mx.random.key(i)).astype(DTYPE) for i, s in enumerate(shapes)
    )
    columns, first = mx.arange(n_columns), 17 * mx.arange(n_rows)[:, None, None, None]
    newest = mx.arange(n_columns - n_tokens, n_columns)[:, None]
    mask = (columns <= newest) & (columns >= first)
    return [q.transpose(0, 2, 1, 3), k[:, :, :n_columns], v[:, :, :n_columns], mask]


def in_float32(q: mx.array, k: mx.array, v: mx.array, mask: mx.array, *, scale: float) -> mx.array:
    """What `attention` computes, operation by operation, for comparison."""
    q, k, v = (x.astype(mx.float32) for x in (q, k, v))
    k, v = (mx.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    scores = mx.where(mask, scale * q @ k.swapaxes(-1, -2), -mx.inf)
    return mx.softmax(scores, axis=-1) @ v


plain_attention = mx.fast.scaled_dot_product_attention
"""MLX's own."""


@dataclass(slots=True)
class Calls:
    """Calls with a few tokens and a mask: how many there were, and how many the kernel computed."""

    n_masked: int = 0
    n_taken: int = 0


_calls = Calls()


def install(patches: Patches) -> None:
    """Replace MLX's attention, for every model that calls it."""
    patches.replace(mx.fast, "scaled_dot_product_attention", _attention)


def _attention(q: mx.array, k: mx.array, v: mx.array, *, scale: float, **more: Any) -> mx.array:
    mask = more.get("mask")
    if isinstance(mask, mx.array) and q.shape[2] <= MAX_TOKENS:
        _calls.n_masked += 1
        if suits(q, k, v, mask) and all(x is None for name, x in more.items() if name != "mask"):
            _calls.n_taken += 1
            return attention(q, k, v, scale=scale, mask=mask)
    out: mx.array = plain_attention(q, k, v, scale=scale, **more)
    return out


def takes_all(run: Callable[[], object]) -> bool:
    """Whether the kernel computes all masked attention of a few tokens in this run of a model."""
    before = replace(_calls)
    run()
    n_masked = _calls.n_masked - before.n_masked
    return 0 < n_masked == _calls.n_taken - before.n_taken
