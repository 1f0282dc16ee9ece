"""The gated delta rule on CUDA: a kernel that keeps the state in registers.

MLX has such a kernel for Metal only; in plain operations, even in chunks (`recurrence.delta`), a layer
launches hundreds of kernels for a prompt and a dozen for a token. Here it is one launch.

    row     of the state, one for each value of a head: LANES threads of a warp, with a part of its
            channels each, in registers from the first token to the last
    token   every thread sums up its part of S k, S q and k q; the sums of a row's threads are added,
            and then the row is updated. The next token's arrays are loaded meanwhile

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
from firn.backends.recurrence.delta import gated_delta
from firn.models.faults import first_line

log = logging.getLogger("firn.models")

LANES, N_THREADS = 8, 128
MAX_CHANNELS = 32
"""Of a thread: more do not fit into its registers."""
TOLERANCE = 1e-5
N_TRIED = 5
TRIED_HEADS = (2, 4)

HEADER = """
template <int n>
__device__ inline void read(float (&to)[n], const float* from, bool is_aligned) {
  if (n % 4 == 0 && is_aligned) {
    #pragma unroll
    for (int i = 0; i < n / 4; ++i) {
      const uint4 x = reinterpret_cast<const uint4*>(from)[i];
      to[4 * i] = __uint_as_float(x.x);
      to[4 * i + 1] = __uint_as_float(x.y);
      to[4 * i + 2] = __uint_as_float(x.z);
      to[4 * i + 3] = __uint_as_float(x.w);
    }
  } else {
    #pragma unroll
    for (int i = 0; i < n; ++i) {
      to[i] = from[i];
    }
  }
}
__device__ inline void spread(float* to, unsigned both) {
  to[0] = __uint_as_float(both << 16);
  to[1] = __uint_as_float(both & 0xffff0000u);
}
template <int n>
__device__ inline void read(float (&to)[n], const __nv_bfloat16* from, bool is_aligned) {
  if (n % 8 == 0 && is_aligned) {
    #pragma unroll
    for (int i = 0; i < n / 8; ++i) {
      const uint4 x = reinterpret_cast<const uint4*>(from)[i];
      spread(to + 8 * i, x.x);
      spread(to + 8 * i + 2, x.y);
      spread(to + 8 * i + 4, x.z);
      spread(to + 8 * i + 6, x.w);
    }
  } else {
    #pragma unroll
    for (int i = 0; i < n; ++i) {
      to[i] = __bfloat162float(from[i]);
    }
  }
}
__device__ inline float one(const float* from) { return *from; }
__device__ inline float one(const __nv_bfloat16* from) { return __bfloat162float(*from); }
__device__ inline void put(float* to, float x) { *to = x; }
__device__ inline void put(__nv_bfloat16* to, float x) { *to = __float2bfloat16(x); }
"""
SOURCE = """
    constexpr int n_rows = 32 / LANES, n = WIDTH / LANES, n_decays = PER_CHANNEL ? n : 1;
    const int lane = threadIdx.x & 31, part = lane % LANES;
    const int n_tokens = k_shape[1], n_key_heads = k_shape[2];
    const int n_heads = v_shape[2], n_values = v_shape[3];
    const int head = blockIdx.y % n_heads, key_head = head / (n_heads / n_key_heads);
    const int64_t batch = blockIdx.y / n_heads;
    const int own_row = (blockIdx.x * N_WARPS + (threadIdx.x >> 5)) * n_rows + lane / LANES;
    const bool is_writer = part == 0 && own_row < n_values;
    const int row = min(own_row, n_values - 1);
    const int k_step = n_key_heads * WIDTH, v_step = n_heads * n_values;
    const int g_step = PER_CHANNEL ? n_heads * WIDTH : n_heads;
    const int64_t at_key = (batch * n_tokens * n_key_heads + key_head) * WIDTH + part * n;
    const int64_t at_head = batch * n_tokens * n_heads + head;
    const int64_t at_row = ((batch * n_heads + head) * n_values + row) * WIDTH + part * n;
    auto q_at = q + at_key;
    auto k_at = k + at_key;
    auto v_at = v + at_head * n_values + row;
    auto y_at = y + at_head * n_values + row;
    auto g_at = g + (PER_CHANNEL ? at_head * WIDTH + part * n : at_head);
    auto beta_at = beta + at_head;
    const bool is_aligned = ((reinterpret_cast<size_t>(q) | reinterpret_cast<size_t>(k)
        | reinterpret_cast<size_t>(g) | reinterpret_cast<size_t>(state)) & 15) == 0;
    float s[n], next_q[n], next_k[n], next_g[n_decays], next_v, next_beta;
    read(s, state + at_row, is_aligned);
    auto load = [&]() {
      read(next_q, q_at, is_aligned);
      read(next_k, k_at, is_aligned);
      read(next_g, g_at, is_aligned);
      next_v = one(v_at);
      next_beta = one(beta_at);
    };
    load();
    for (int t = 0; t < n_tokens; ++t) {
      float now_q[n], now_k[n], now_g[n_decays];
      #pragma unroll
      for (int i = 0; i < n; ++i) {
        now_q[i] = next_q[i];
        now_k[i] = next_k[i];
      }
      #pragma unroll
      for (int i = 0; i < n_decays; ++i) {
        now_g[i] = next_g[i];
      }
      const float now_v = next_v, now_beta = next_beta;
      if (t + 1 < n_tokens) {
        q_at += k_step;
        k_at += k_step;
        v_at += v_step;
        g_at += g_step;
        beta_at += n_heads;
        load();
      }
      float sk = 0, sq = 0, kq = 0;
      #pragma unroll
      for (int i = 0; i < n; ++i) {
        s[i] *= now_g[PER_CHANNEL ? i : 0];
        sk += s[i] * now_k[i];
        sq += s[i] * now_q[i];
        kq += now_k[i] * now_q[i];
      }
      #pragma unroll
      for (int far = LANES / 2; far > 0; far /= 2) {
        sk += __shfl_xor_sync(0xffffffff, sk, far);
        sq += __shfl_xor_sync(0xffffffff, sq, far);
        kq += __shfl_xor_sync(0xffffffff, kq, far);
      }
      const float u = now_beta * (now_v - sk);
      #pragma unroll
      for (int i = 0; i < n; ++i) {
        s[i] += u * now_k[i];
      }
      if (is_writer) {
        put(y_at, sq + u * kq);
      }
      y_at += v_step;
    }
    if (own_row < n_values) {
      #pragma unroll
      for (int i = 0; i < n; ++i) {
        after[at_row + i] = s[i];
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
    if state is None:
        state = mx.zeros((n_batch, n_heads, n_values, width), dtype=mx.float32)
    if mask is not None:
        inside = mask[..., None]
        beta = mx.where(inside, beta, 0)
        g = mx.where(inside if g.ndim == 3 else inside[..., None], g, 1)
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
