"""Linear recurrences on CUDA: a kernel that keeps the state in registers.

mlx-lm has such kernels for Metal only; in plain operations, even in chunks (`backends.recurrence`), a
layer launches hundreds of kernels for a prompt and a dozen for a token. Here it is one launch.

    row     of the state, one for each value of a head: LANES threads of a warp, with a part of its
            channels each, in registers from the first token to the last
    tile    of tokens, whose keys, queries and values all rows of a block read from shared memory
    token   every thread sums up its part of what the rule reads of the state; the sums of a row's
            threads are added, and then the row is updated

    DELTA    the gated delta rule    y = (g S) q + u (k q)             u = beta (v - (g S) k)
    LINEAR   linear attention        y = (g S) q + u (k q)             u = beta v
    WKV      RWKV 7                  y = (g S) q + v (k q) + c (b q)   c = S a

With y as a sum like these a token has to wait for the threads' sums once.

Everything is in float32. Tokens are taken one after the other, so a state does not depend on how the
prompt was cut, and a row not on its batch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cache, partial
from typing import Any, NamedTuple

import mlx.core as mx

from firn.backends.cuda.source import DTYPE, compact
from firn.backends.recurrence.delta import completed, gated_delta
from firn.backends.recurrence.forms import ChunkedDelta, ChunkedLinear, ChunkedWkv
from firn.backends.recurrence.linear import linear_attention
from firn.backends.recurrence.wkv import kept, wkv7
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
"""Key heads, heads."""


DELTA_IDENTITY = "delta-kernel-8 delta-64-16-0-9223372036854775807"
"""Of the delta rule where the kernel works. What records of exact reuse have been stored under: it named
the chunks, too, which have no say there."""


class Rule(IntEnum):
    DELTA = 0
    LINEAR = 1
    WKV = 2


HEADER = """
constexpr int DELTA = 0, LINEAR = 1, WKV = 2;
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
    constexpr bool is_delta = RULE == DELTA, is_wkv = RULE == WKV;
    constexpr int n_own = is_wkv ? n : 1, own_width = is_wkv ? WIDTH : 1;
    __shared__ __align__(16) float qs[n_values_of_tile];
    __shared__ __align__(16) float ks[n_values_of_tile];
    __shared__ __align__(16) float gs[TILE * g_width];
    __shared__ __align__(16) float as[TILE * own_width];
    __shared__ __align__(16) float bs[TILE * own_width];
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
          if (is_wkv) {
            as[e] = one(a + from);
            bs[e] = one(b + from);
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
        betas[thread] = HAS_BETA ? one(beta + from) : 1.0f;
        if (!PER_CHANNEL) {
          gs[thread] = one(g + from);
        }
      }
      __syncthreads();
      for (int t = 0; t < n_here; ++t) {
        float now_q[n], now_k[n], now_g[n_decays], now_a[n_own], now_b[n_own];
        take<n_at_once, LANES>(now_q, qs + t * WIDTH, part);
        take<n_at_once, LANES>(now_k, ks + t * WIDTH, part);
        if (PER_CHANNEL) {
          take<PER_CHANNEL ? n_at_once : 1, LANES>(now_g, gs + t * g_width, part);
        } else {
          now_g[0] = gs[t];
        }
        if (is_wkv) {
          take<is_wkv ? n_at_once : 1, LANES>(now_a, as + t * own_width, part);
          take<is_wkv ? n_at_once : 1, LANES>(now_b, bs + t * own_width, part);
        }
        float sk[2] = {}, sq[2] = {}, kq[2] = {}, bq[2] = {};
        #pragma unroll
        for (int i = 0; i < n; ++i) {
          if (is_wkv) {
            sk[i % 2] += s[i] * now_a[is_wkv ? i : 0];
            bq[i % 2] += now_b[is_wkv ? i : 0] * now_q[i];
          }
          s[i] *= now_g[PER_CHANNEL ? i : 0];
          if (is_delta) {
            sk[i % 2] += s[i] * now_k[i];
          }
          sq[i % 2] += s[i] * now_q[i];
          kq[i % 2] += now_k[i] * now_q[i];
        }
        float old = sk[0] + sk[1], out = sq[0] + sq[1], own = kq[0] + kq[1];
        float again = bq[0] + bq[1];
        #pragma unroll
        for (int far = LANES / 2; far > 0; far /= 2) {
          if (RULE != LINEAR) {
            old += __shfl_xor_sync(0xffffffff, old, far);
          }
          if (is_wkv) {
            again += __shfl_xor_sync(0xffffffff, again, far);
          }
          out += __shfl_xor_sync(0xffffffff, out, far);
          own += __shfl_xor_sync(0xffffffff, own, far);
        }
        const float value = vs[t * n_block_rows + line];
        const float u = betas[t] * (is_delta ? value - old : value);
        #pragma unroll
        for (int i = 0; i < n; ++i) {
          s[i] += u * now_k[i];
          if (is_wkv) {
            s[i] += old * now_b[is_wkv ? i : 0];
          }
        }
        if (part == 0 && own_row < n_values) {
          const int64_t token = batch * n_tokens + begin + t;
          put(y + (token * n_heads + head) * n_values + row,
              is_wkv ? out + u * own + old * again : out + u * own);
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
        name="firn_recurrence",
        input_names=["q", "k", "v", "g", "beta", "state", "a", "b"],
        output_names=["y", "after"],
        source=compact(SOURCE),
        header=compact(HEADER),
    )


def fits(width: int) -> bool:
    """Whether there is a kernel for keys of this width."""
    return width % LANES == 0 and width // LANES <= MAX_CHANNELS


def tile_of(*, per_channel: bool) -> int:
    """Tokens of a tile: all that is shared must fit into 48 KiB at the greatest width."""
    return TILES[per_channel]


def _launch(
    rule: Rule,
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array | None,
    state: mx.array,
    extra: tuple[mx.array, mx.array] | None = None,
) -> tuple[mx.array, mx.array]:
    """extra: a and b of RWKV 7."""
    n_heads, n_values = v.shape[-2:]
    values = [q, k, v, *(extra or ())]
    dtype = DTYPE if all(a.dtype == DTYPE for a in values) else mx.float32
    q_, k_, v_, *extra_ = (a.astype(dtype) for a in values)
    g, now = g.astype(mx.float32), state.astype(mx.float32)
    beta_ = g if beta is None else beta.astype(mx.float32)
    n_warps = N_THREADS // 32
    n_blocks = -(-n_values // (n_warps * (32 // LANES)))
    y, after = _kernel()(
        inputs=[q_, k_, v_, g, beta_, now, *(extra_ or (k_, k_))],
        template=[
            ("RULE", int(rule)),
            ("HAS_BETA", int(beta is not None)),
            ("LANES", LANES),
            ("N_WARPS", n_warps),
            ("TILE", tile_of(per_channel=g.ndim == 4)),
            ("WIDTH", q.shape[-1]),
            ("PER_CHANNEL", int(g.ndim == 4)),
        ],
        grid=(n_blocks * N_THREADS, len(q) * n_heads, 1),
        threadgroup=(N_THREADS, 1, 1),
        output_shapes=[v.shape, state.shape],
        output_dtypes=[dtype, mx.float32],
    )
    return y.astype(q.dtype), after.astype(state.dtype)


def delta_by_kernel(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    beta: mx.array,
    state: mx.array | None = None,
    mask: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """As `recurrence.delta.gated_delta`; here and below, keys must have a width that `fits`."""
    g, beta, state = completed(q, v, g, beta, state, mask)
    return _launch(Rule.DELTA, q, k, v, g, beta, state)


def linear_by_kernel(
    q: mx.array,
    k: mx.array,
    v: mx.array,
    g: mx.array,
    state: mx.array,
    mask: mx.array | None = None,
    beta: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """As `recurrence.linear.linear_attention`."""
    if mask is not None:
        inside = mask[..., None]
        g = mx.where(inside, g, 1)
        beta = mx.where(inside, mx.ones(1) if beta is None else beta, mx.zeros(g.shape))
    return _launch(Rule.LINEAR, q, k, v, g, beta, state)


def wkv_by_kernel(
    r: mx.array,
    w: mx.array,
    k: mx.array,
    v: mx.array,
    a: mx.array,
    b: mx.array,
    state: mx.array,
    mask: mx.array | None = None,
) -> tuple[mx.array, mx.array]:
    """As `recurrence.wkv.wkv7`."""
    w, k, b = kept(w, k, b, mask)
    return _launch(Rule.WKV, r, k, v, w, None, state, (a, b))


class KernelBuild(NamedTuple):
    """One of the kernel. Their types of values need no trial of their own."""

    rule: Rule
    width: int
    n_values: int
    per_channel: bool

    @classmethod
    def of(cls, rule: Rule, k: mx.array, v: mx.array, g: mx.array) -> KernelBuild:
        return cls(rule, k.shape[-1], v.shape[-1], g.ndim == 4)


@dataclass(eq=False)
class KernelBuilds:
    """Which builds of the kernel work on this machine; each is tried when it is first needed."""

    _works: dict[KernelBuild, bool] = field(default_factory=dict)

    def work(self, build: KernelBuild) -> bool:
        if build not in self._works:
            self.assume(
                build, fault(build) if fits(build.width) else f"keys of width {build.width}"
            )
        return self._works[build]

    def assume(self, build: KernelBuild, fault: str | None) -> None:
        """fault: why it does not work; None if it does."""
        self._works[build] = fault is None
        if fault is not None:
            log.warning("%s is computed without a kernel: %s", build.rule.name.lower(), fault)

    def without(self, rule: Rule) -> list[KernelBuild]:
        """Those of this rule that have been needed and do not work."""
        return sorted(b for b, works in self._works.items() if b.rule == rule and not works)


@dataclass(eq=False)
class KernelDelta:
    """The kernel, or `otherwise` where it does not fit or did not work when it was first needed."""

    builds: KernelBuilds
    otherwise: ChunkedDelta

    @property
    def identity(self) -> str:
        """Asked for when the model has computed a token: only then it is known what works."""
        missing = self.builds.without(Rule.DELTA)
        if not missing:
            return DELTA_IDENTITY
        each = ",".join(f"{b.width}x{b.n_values}{'c' * b.per_channel}" for b in missing)
        return f"{DELTA_IDENTITY} but {each}:{self.otherwise.identity}"

    def suits(self, q: mx.array, v: mx.array, g: mx.array) -> bool:
        return self._works(q, v, g) or self.otherwise.suits(q, v, g)

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
        form = delta_by_kernel if self._works(q, v, g) else self.otherwise
        return form(q, k, v, g, beta, state, mask)

    def _works(self, q: mx.array, v: mx.array, g: mx.array) -> bool:
        return self.builds.work(KernelBuild.of(Rule.DELTA, q, v, g))


@dataclass(eq=False)
class KernelLinear:
    builds: KernelBuilds
    otherwise: ChunkedLinear

    def suits(self, k: mx.array, v: mx.array) -> bool:
        return True

    def __call__(
        self,
        q: mx.array,
        k: mx.array,
        v: mx.array,
        g: mx.array,
        state: mx.array,
        mask: mx.array | None = None,
        beta: mx.array | None = None,
    ) -> tuple[mx.array, mx.array]:
        works = self.builds.work(KernelBuild.of(Rule.LINEAR, k, v, g))
        return (linear_by_kernel if works else self.otherwise)(q, k, v, g, state, mask, beta)


@dataclass(eq=False)
class KernelWkv:
    builds: KernelBuilds
    otherwise: ChunkedWkv

    def suits(self, k: mx.array, v: mx.array) -> bool:
        return True

    def __call__(
        self,
        r: mx.array,
        w: mx.array,
        k: mx.array,
        v: mx.array,
        a: mx.array,
        b: mx.array,
        state: mx.array,
        mask: mx.array | None = None,
    ) -> tuple[mx.array, mx.array]:
        works = self.builds.work(KernelBuild.of(Rule.WKV, k, v, w))
        return (wkv_by_kernel if works else self.otherwise)(r, w, k, v, a, b, state, mask)


def fault(build: KernelBuild) -> str | None:
    """Compile this build and try it. Returns why it cannot be used; None if it can."""
    kernel, reference, given, n_values = _trial(build)
    try:
        for dtype, tolerance in ((mx.float32, TOLERANCE), (DTYPE, 2.0**-7)):
            rounded = [*(a.astype(dtype) for a in given[:n_values]), *given[n_values:]]
            cpu = mx.cpu  # in true float32
            with mx.stream(cpu):
                want = reference(*rounded)
            for got, expected in zip(kernel(*rounded), want, strict=True):
                far = mx.abs(got.astype(mx.float32) - expected).max() / mx.abs(expected).max()
                if not float(far) < tolerance:
                    return f"it is off by {float(far):.3g}"
    except (RuntimeError, ValueError) as e:
        return first_line(e)
    return None


Form = Callable[..., tuple[mx.array, mx.array]]


def _trial(build: KernelBuild) -> tuple[Form, Form, list[mx.array], int]:
    """The kernel, what it should compute, arguments, and how many of these models have in bfloat16."""
    n_key_heads, n_heads = TRIED_HEADS
    width, n_values = build.width, build.n_values
    keys = iter(mx.random.split(mx.random.key(width), 8))

    def some(*shape: int) -> mx.array:
        return mx.random.normal(shape, key=next(keys))

    if build.rule == Rule.WKV:
        n_key_heads = n_heads
    q, k, a = (some(2, N_TRIED, n_key_heads, width) for _ in range(3))
    k, a = (each / mx.linalg.norm(each, axis=-1, keepdims=True) for each in (k, a))
    v, state = some(2, N_TRIED, n_heads, n_values), some(2, n_heads, n_values, width)
    g = mx.sigmoid(some(2, N_TRIED, n_heads, *([width] if build.per_channel else [])))
    if build.rule == Rule.WKV:
        given = [q, k, v, a, -0.5 * a, g, state]
        return _in_order(wkv_by_kernel), _in_order(partial(wkv7, chunk=1)), given, 5
    if build.rule == Rule.LINEAR:
        return linear_by_kernel, partial(linear_attention, chunk=1), [q, k, v, g, state], 3
    given = [q, k, v, g, mx.sigmoid(v[..., 0]), state]
    return delta_by_kernel, partial(gated_delta, chunk=1), given, 3


def _in_order(wkv: Form) -> Form:
    """Takes what has values' type first."""
    return lambda r, k, v, a, b, w, state: wkv(r, w, k, v, a, b, state)
