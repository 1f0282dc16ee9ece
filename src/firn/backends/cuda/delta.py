"""The gated delta rule on CUDA: a kernel that keeps the state in registers.

MLX has such a kernel for Metal only; in plain operations, even in chunks (`recurrence.delta`), a layer
launches hundreds of kernels for a prompt and a dozen for a token. Here it is one launch.

    row     of the state, one for each value of a head: LANES threads of a warp, with a part of its
            channels each, in registers from the first token to the last
    tile    of tokens, whose keys, queries and values all rows of a block read from shared memory
    token   every thread sums up its part of S k, S q and k q; the sums of a row's threads are added,
            and then the row is updated

    y = (g S) q + u (k q)      so that a token has to wait for sums once

Everything is in float32. Tokens are taken one after the other, so a state does not depend on how the
prompt was cut, and a row not on its batch.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import mlx.core as mx

from firn.backends.cuda.source import DTYPE, compact
from firn.backends.recurrence.delta import completed, gated_delta
from firn.models.faults import first_line

log = logging.getLogger("firn.models")

LANES, N_THREADS = 8, 128
MAX_CHANNELS = 32
"""Of a thread: more do not fit into its registers."""
TOLERANCE = 1e-5
TILES = (16, 8)
"""Tokens of a tile, and where decays take a third of the room."""
N_TRIED = 2 * TILES[0] + 3
TRIED_HEADS = (2, 4)

HEADER = """
__device__ inline float one(const float* from) { return *from; }
__device__ inline float one(const __nv_bfloat16* from) { return __bfloat162float(*from); }
__device__ inline void put(float* to, float x) { *to = x; }
__device__ inline void put(__nv_bfloat16* to, float x) { *to = __float2bfloat16(x); }
template <int n_at_once, int n_lanes, int n>
__device__ inline void take(float (&to)[n], const float* from, int part) {
  #pragma unroll
  for (int i = 0; i < n / n_at_once; ++i) {
    const float* at = from + (i * n_lanes + part) * n_at_once;
    if (n_at_once == 4) {
      const uint4 x = *reinterpret_cast<const uint4*>(at);
      to[4 * i] = __uint_as_float(x.x);
      to[4 * i + 1] = __uint_as_float(x.y);
      to[4 * i + 2] = __uint_as_float(x.z);
      to[4 * i + 3] = __uint_as_float(x.w);
    } else {
      to[i] = *at;
    }
  }
}
"""
SOURCE = """
    constexpr int n_rows = 32 / LANES, n_block_rows = N_WARPS * n_rows, n_threads = 32 * N_WARPS;
    constexpr int n = WIDTH / LANES, n_at_once = n % 4 == 0 ? 4 : 1, n_values_of_tile = TILE * WIDTH;
    constexpr int n_decays = PER_CHANNEL ? n : 1, g_width = PER_CHANNEL ? WIDTH : 1;
    __shared__ __align__(16) float qs[n_values_of_tile];
    __shared__ __align__(16) float ks[n_values_of_tile];
    __shared__ __align__(16) float gs[TILE * g_width];
    __shared__ float vs[TILE * n_block_rows];
    __shared__ float betas[TILE];
    const int thread = threadIdx.x, part = thread % LANES, line = thread / LANES;
    const int n_tokens = k_shape[1], n_key_heads = k_shape[2];
    const int n_heads = v_shape[2], n_values = v_shape[3];
    const int head = blockIdx.y % n_heads, key_head = head / (n_heads / n_key_heads);
    const int64_t batch = blockIdx.y / n_heads;
    const int first_row = blockIdx.x * n_block_rows, own_row = first_row + line;
    const int row = min(own_row, n_values - 1);
    const int64_t at_row = ((batch * n_heads + head) * n_values + row) * WIDTH;
    float s[n];
    take<n_at_once, LANES>(s, state + at_row, part);
    for (int begin = 0; begin < n_tokens; begin += TILE) {
      const int n_here = min(TILE, n_tokens - begin);
      __syncthreads();
      #pragma unroll
      for (int i = 0; i < (n_values_of_tile + n_threads - 1) / n_threads; ++i) {
        const int e = i * n_threads + thread, channel = e % WIDTH;
        if (e < n_here * WIDTH) {
          const int64_t token = batch * n_tokens + begin + e / WIDTH;
          const int64_t from = (token * n_key_heads + key_head) * WIDTH + channel;
          qs[e] = one(q + from);
          ks[e] = one(k + from);
          if (PER_CHANNEL) {
            gs[e] = one(g + (token * n_heads + head) * WIDTH + channel);
          }
        }
      }
      for (int e = thread; e < n_here * n_block_rows; e += n_threads) {
        const int64_t token = batch * n_tokens + begin + e / n_block_rows;
        const int value = min(first_row + e % n_block_rows, n_values - 1);
        vs[e] = one(v + (token * n_heads + head) * n_values + value);
      }
      if (thread < n_here) {
        const int64_t from = (batch * n_tokens + begin + thread) * n_heads + head;
        betas[thread] = one(beta + from);
        if (!PER_CHANNEL) {
          gs[thread] = one(g + from);
        }
      }
      __syncthreads();
      for (int t = 0; t < n_here; ++t) {
        float now_q[n], now_k[n], now_g[n_decays];
        take<n_at_once, LANES>(now_q, qs + t * WIDTH, part);
        take<n_at_once, LANES>(now_k, ks + t * WIDTH, part);
        if (PER_CHANNEL) {
          take<PER_CHANNEL ? n_at_once : 1, LANES>(now_g, gs + t * g_width, part);
        } else {
          now_g[0] = gs[t];
        }
        float sk[2] = {}, sq[2] = {}, kq[2] = {};
        #pragma unroll
        for (int i = 0; i < n; ++i) {
          s[i] *= now_g[PER_CHANNEL ? i : 0];
          sk[i % 2] += s[i] * now_k[i];
          sq[i % 2] += s[i] * now_q[i];
          kq[i % 2] += now_k[i] * now_q[i];
        }
        float old = sk[0] + sk[1], out = sq[0] + sq[1], own = kq[0] + kq[1];
        #pragma unroll
        for (int far = LANES / 2; far > 0; far /= 2) {
          old += __shfl_xor_sync(0xffffffff, old, far);
          out += __shfl_xor_sync(0xffffffff, out, far);
          own += __shfl_xor_sync(0xffffffff, own, far);
        }
        const float u = betas[t] * (vs[t * n_block_rows + line] - old);
        #pragma unroll
        for (int i = 0; i < n; ++i) {
          s[i] += u * now_k[i];
        }
        if (part == 0 && own_row < n_values) {
          const int64_t token = batch * n_tokens + begin + t;
          put(y + (token * n_heads + head) * n_values + row, out + u * own);
        }
      }
    }
    if (own_row < n_values) {
      #pragma unroll
      for (int i = 0; i < n; ++i) {
        after[at_row + (i / n_at_once * LANES + part) * n_at_once + i % n_at_once] = s[i];
      }
    }
"""


@cache
def _kernel() -> Any:
    return mx.fast.cuda_kernel(
        name="firn_delta",
        input_names=["q", "k", "v", "g", "beta", "state"],
        output_names=["y", "after"],
        source=compact(SOURCE),
        header=compact(HEADER),
    )


def fits(width: int) -> bool:
    """Whether there is a kernel for keys of this width."""
    return width % LANES == 0 and width // LANES <= MAX_CHANNELS


def tile_of(per_channel: bool) -> int:
    """Tokens of a tile: all that is shared must fit into 48 KiB at the greatest width."""
    return TILES[per_channel]


def by_kernel(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array | None = None,
    mask: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """As `recurrence.delta.gated_delta`; keys must have a width that `fits`."""
    n_batch, _, _, width = q.shape
    n_heads, n_values = v.shape[-2:]
    g, beta, state = completed(q, v, g, beta, state, mask)
    dtype = DTYPE if q.dtype == k.dtype == v.dtype == DTYPE else mx.float32
    n_warps = N_THREADS // 32
    n_blocks = -(-n_values // (n_warps * (32 // LANES)))
    y, after = _kernel()(
        inputs=[
            *(a.astype(dtype) for a in (q, k, v)),
            *(a.astype(mx.float32) for a in (g, beta, state)),
        ],
        template=[
            ("LANES", LANES),
            ("N_WARPS", n_warps),
            ("TILE", tile_of(g.ndim == 4)),
            ("WIDTH", width),
            ("PER_CHANNEL", int(g.ndim == 4)),
        ],
        grid=(n_blocks * N_THREADS, n_batch * n_heads, 1),
        threadgroup=(N_THREADS, 1, 1),
        output_shapes=[v.shape, state.shape],
        output_dtypes=[dtype, mx.float32],
    )
    return y.astype(q.dtype), after.astype(state.dtype)


@dataclass(eq=False)
class KernelDelta:
    """The kernel, or `otherwise` where it does not fit or did not work when it was first needed."""

    otherwise: Any
    _works: dict[tuple[int, int, bool], bool] = field(default_factory=dict)

    @property
    def identity(self) -> str:
        return f"delta-kernel-{LANES} {self.otherwise.identity}"

    def suits(self, q: mx.array, v: mx.array, g: mx.array) -> bool:
        return self._kernel_works(q, v, g) or bool(self.otherwise.suits(q, v, g))

    def __call__(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        g: mx.array,
        beta: mx.array,
        state: mx.array | None = None,
        mask: mx.array | None = None,
    ) -> tuple[mx.array, mx.array]:
        form = by_kernel if self._kernel_works(q, v, g) else self.otherwise
        result: tuple[mx.array, mx.array] = form(q, k, v, g, beta, state, mask)
        return result

    def _kernel_works(self, q: mx.array, v: mx.array, g: mx.array) -> bool:
        key = (q.shape[-1], v.shape[-1], g.ndim == 4)
        if key not in self._works:
            why = fault(*key) if fits(key[0]) else f"keys of width {key[0]}"
            self._works[key] = why is None
            if why is not None:
                log.warning("the gated delta rule is computed without a kernel: %s", why)
        return self._works[key]


def fault(width: int, n_values: int, per_channel: bool) -> str | None:
    """Compile the kernel for these widths and try it. Returns why it cannot be used; None if it can."""
    n_key_heads, n_heads = TRIED_HEADS
    keys = iter(mx.random.split(mx.random.key(width), 6))

    def some(*shape: int) -> mx.array:
        return mx.random.normal(shape, key=next(keys))

    q, k = (some(2, N_TRIED, n_key_heads, width) for _ in range(2))
    k = k / mx.linalg.norm(k, axis=-1, keepdims=True)
    v, state = some(2, N_TRIED, n_heads, n_values), some(2, n_heads, n_values, width)
    g = mx.sigmoid(some(2, N_TRIED, n_heads, *([width] if per_channel else [])))
    beta = mx.sigmoid(v[..., 0])
    try:
        for dtype, tolerance in ((mx.float32, TOLERANCE), (DTYPE, 2.0**-7)):
            given = [*(a.astype(dtype) for a in (q, k, v)), g, beta, state]
            cpu = mx.cpu  # in true float32
            with mx.stream(cpu):
                want = gated_delta(*given, chunk=1)
            for got, expected in zip(by_kernel(*given), want, strict=True):
                far = mx.abs(got.astype(mx.float32) - expected).max() / mx.abs(expected).max()
                if not float(far) < tolerance:
                    return f"it is off by {float(far):.3g}"
    except (RuntimeError, ValueError) as e:
        return first_line(e)
    return None
