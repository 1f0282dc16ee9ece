"""Selective scans on CUDA: kernels that keep each channel's state in registers.

mlx-lm computes Mamba 1, Jamba and Recurrent Gemma one token after the other, each with a dozen launches.

    selective   h <- exp(delta rate) h + delta x b,  y = h c     LANES threads for each channel
    gated_sum   h <- a h + x                                     a thread for each channel

Everything is in float32, tokens one after the other. A block reads tiles of tokens into shared memory,
or each thread some tokens ahead, so that none waits for the device's memory at each token.
"""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

import mlx.core as mx

from firn.backends.cuda.source import DTYPE, compact
from firn.backends.recurrence import scans
from firn.models.faults import first_line

log = logging.getLogger("firn.models")

LANES, N_THREADS = 4, 128
N_CHANNELS = N_THREADS // LANES
"""Of a block."""
MAX_STATES = 64
"""Of a channel: more do not fit into the registers."""
TILE = 16
TOLERANCE = 1e-5
N_TRIED = 2 * TILE + 3

HEADER = """
__device__ inline float one(const float* from) { return *from; }
__device__ inline float one(const __nv_bfloat16* from) { return __bfloat162float(*from); }
__device__ inline void put(float* to, float x) { *to = x; }
__device__ inline void put(__nv_bfloat16* to, float x) { *to = __float2bfloat16(x); }
"""
SELECTIVE = """
    constexpr int n = N_STATES / LANES, n_threads = LANES * N_CHANNELS;
    __shared__ float xs[TILE * N_CHANNELS];
    __shared__ float ds[TILE * N_CHANNELS];
    __shared__ float bs[TILE * N_STATES];
    __shared__ float cs[TILE * N_STATES];
    const int thread = threadIdx.x, part = thread % LANES, line = thread / LANES;
    const int n_tokens = x_shape[1], n_channels = x_shape[2];
    const int first_channel = blockIdx.x * N_CHANNELS, own_channel = first_channel + line;
    const int channel = min(own_channel, n_channels - 1);
    const int64_t batch = blockIdx.y;
    const int64_t at_state = (batch * n_channels + channel) * N_STATES + part * n;
    float h[n], rates[n];
    #pragma unroll
    for (int i = 0; i < n; ++i) {
      h[i] = state[at_state + i];
      rates[i] = rate[channel * N_STATES + part * n + i];
    }
    for (int begin = 0; begin < n_tokens; begin += TILE) {
      const int n_here = min(TILE, n_tokens - begin);
      __syncthreads();
      for (int e = thread; e < n_here * N_CHANNELS; e += n_threads) {
        const int64_t token = batch * n_tokens + begin + e / N_CHANNELS;
        const int64_t from = token * n_channels + min(first_channel + e % N_CHANNELS, n_channels - 1);
        xs[e] = one(x + from);
        ds[e] = one(delta + from);
      }
      for (int e = thread; e < n_here * N_STATES; e += n_threads) {
        const int64_t from = (batch * n_tokens + begin) * N_STATES + e;
        bs[e] = one(b + from);
        cs[e] = one(c + from);
      }
      __syncthreads();
      for (int t = 0; t < n_here; ++t) {
        const float d = ds[t * N_CHANNELS + line], dx = d * xs[t * N_CHANNELS + line];
        float out = 0;
        #pragma unroll
        for (int i = 0; i < n; ++i) {
          const int at = t * N_STATES + part * n + i;
          h[i] = expf(d * rates[i]) * h[i] + dx * bs[at];
          out += h[i] * cs[at];
        }
        #pragma unroll
        for (int far = LANES / 2; far > 0; far /= 2) {
          out += __shfl_xor_sync(0xffffffff, out, far);
        }
        if (part == 0 && own_channel < n_channels) {
          put(y + (batch * n_tokens + begin + t) * n_channels + channel, out);
        }
      }
    }
    if (own_channel < n_channels) {
      #pragma unroll
      for (int i = 0; i < n; ++i) {
        after[at_state + i] = h[i];
      }
    }
"""
GATED_SUM = """
    const int n_tokens = x_shape[1], n_channels = x_shape[2];
    const int channel = blockIdx.x * N_THREADS + threadIdx.x;
    const int64_t batch = blockIdx.y;
    if (channel < n_channels) {
      float h = state[batch * n_channels + channel];
      const int64_t first = batch * n_tokens * n_channels + channel;
      for (int begin = 0; begin < n_tokens; begin += AHEAD) {
        float as[AHEAD], xs[AHEAD];
        #pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
          const int64_t at = first + (int64_t)min(begin + i, n_tokens - 1) * n_channels;
          as[i] = one(a + at);
          xs[i] = one(x + at);
        }
        #pragma unroll
        for (int i = 0; i < AHEAD; ++i) {
          if (begin + i < n_tokens) {
            h = as[i] * h + xs[i];
            put(y + first + (int64_t)(begin + i) * n_channels, h);
          }
        }
      }
      after[batch * n_channels + channel] = h;
    }
"""
AHEAD = 16
"""Tokens that a thread reads ahead."""


@cache
def _selective_kernel() -> Any:
    return mx.fast.cuda_kernel(
        name="firn_selective",
        input_names=["x", "delta", "b", "c", "rate", "state"],
        output_names=["y", "after"],
        source=compact(SELECTIVE),
        header=compact(HEADER),
    )


@cache
def _sum_kernel() -> Any:
    return mx.fast.cuda_kernel(
        name="firn_gated_sum",
        input_names=["x", "a", "state"],
        output_names=["y", "after"],
        source=compact(GATED_SUM),
        header=compact(HEADER),
    )


def fits(n_states: int) -> bool:
    """Whether there is a kernel for channels with so many states."""
    return n_states % LANES == 0 and n_states <= MAX_STATES


def selective_by_kernel(
    x: mx.array,
    delta: mx.array,
    b: mx.array,
    c: mx.array,
    a: mx.array,
    state: mx.array | None,
) -> tuple[mx.array, mx.array]:
    """As `recurrence.scans.selective`; states must be so many that it `fits`."""
    n_batch, _, n_channels = x.shape
    dtype = DTYPE if all(each.dtype == DTYPE for each in (x, delta, b, c)) else mx.float32
    shape = (n_batch, n_channels, a.shape[-1])
    kept = mx.result_type(x, a) if state is None else state.dtype
    now = mx.zeros(shape) if state is None else state.astype(mx.float32)
    y, after = _selective_kernel()(
        inputs=[*(each.astype(dtype) for each in (x, delta, b, c)), a.astype(mx.float32), now],
        template=[
            ("LANES", LANES),
            ("N_CHANNELS", N_CHANNELS),
            ("N_STATES", a.shape[-1]),
            ("TILE", TILE),
        ],
        grid=(-(-n_channels // N_CHANNELS) * N_THREADS, n_batch, 1),
        threadgroup=(N_THREADS, 1, 1),
        output_shapes=[x.shape, shape],
        output_dtypes=[dtype, mx.float32],
    )
    return y.astype(x.dtype), after.astype(kept)


def sum_by_kernel(x: mx.array, a: mx.array, state: mx.array | None) -> tuple[mx.array, mx.array]:
    """As mlx_lm.models.recurrent_gemma.rnn_scan: sums after each token and the last, in x's type."""
    n_batch, _, n_channels = x.shape
    dtype = DTYPE if x.dtype == a.dtype == DTYPE else mx.float32
    now = mx.zeros((n_batch, n_channels)) if state is None else state.astype(mx.float32)
    y, after = _sum_kernel()(
        inputs=[x.astype(dtype), a.astype(dtype), now],
        template=[("N_THREADS", N_THREADS), ("AHEAD", AHEAD)],
        grid=(-(-n_channels // N_THREADS) * N_THREADS, n_batch, 1),
        threadgroup=(N_THREADS, 1, 1),
        output_shapes=[x.shape, now.shape],
        output_dtypes=[dtype, mx.float32],
    )
    return y.astype(x.dtype), after.astype(x.dtype if state is None else state.dtype)


def selective(
    x: mx.array,
    delta: mx.array,
    b: mx.array,
    c: mx.array,
    a: mx.array,
    state: mx.array | None,
) -> tuple[mx.array, mx.array | None]:
    """By the kernel where it fits and works, else in MLX's operations."""
    n_states = a.shape[-1]
    works = fits(n_states) and _works(f"selective scans of {n_states} states", n_states)
    return (selective_by_kernel if works else scans.selective)(x, delta, b, c, a, state)


def gated_sum(x: mx.array, a: mx.array, state: mx.array | None) -> tuple[mx.array, mx.array]:
    """By the kernel if it works, else in MLX's operations."""
    return (sum_by_kernel if _works("gated sums", 0) else scans.gated_sum)(x, a, state)


@cache
def _works(what: str, n_states: int) -> bool:
    why = sum_fault() if not n_states else selective_fault(n_states)
    if why is not None:
        log.warning("%s are computed without a kernel: %s", what, why)
    return why is None


def selective_fault(n_states: int) -> str | None:
    """Compile the kernel and try it. Returns why it cannot be used; None if it can."""
    some, n_channels = _arrays(n_states), N_CHANNELS + 5
    given = [some(2, N_TRIED, n_channels), mx.sigmoid(some(2, N_TRIED, n_channels))]
    given += [some(2, N_TRIED, n_states) for _ in range(2)]
    given += [-mx.exp(some(n_channels, n_states)), some(2, n_channels, n_states)]
    return _fault(selective_by_kernel, scans.selective, given)


def sum_fault() -> str | None:
    some, shape = _arrays(1), (2, N_TRIED, N_THREADS + 5)
    given = [some(*shape), mx.sigmoid(some(*shape)), some(2, shape[-1])]
    return _fault(sum_by_kernel, scans.gated_sum, given)


def _arrays(seed: int) -> Any:
    keys = iter(mx.random.split(mx.random.key(seed), 8))
    return lambda *shape: mx.random.normal(shape, key=next(keys))


def _fault(kernel: Any, reference: Any, given: list[mx.array]) -> str | None:
    cpu = mx.cpu
    try:
        with mx.stream(cpu):
            want = reference(*given)
        for got, expected in zip(kernel(*given), want, strict=True):
            far = float(mx.abs(got - expected).max() / mx.abs(expected).max())
            if not far < TOLERANCE:
                return f"they are off by {far:.3g}"
    except (RuntimeError, ValueError) as e:
        return first_line(e)
    return None
