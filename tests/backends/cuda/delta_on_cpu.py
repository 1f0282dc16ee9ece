"""Runs the source of the delta rule's kernel on a CPU: see on_cpu.py."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from firn.backends.cuda.delta import HEADER, LANES, N_THREADS, SOURCE, tile_of
from tests.backends.cuda.on_cpu import COMPILER, HOST, bfloat16, float32

FLOATS = NDArray[np.float32]

DEVICE = r"""
#include <algorithm>
using std::min;
#define __device__
#define __shared__ static
#define __align__(n) __attribute__((aligned(n)))
static Barrier block(128);
static void __syncthreads() { block.arrive_and_wait(); }
static float __uint_as_float(unsigned u) { float f; memcpy(&f, &u, 4); return f; }
static float __bfloat162float(__nv_bfloat16 x) { return wide(x.bits); }
static __nv_bfloat16 __float2bfloat16(float f) { return narrow(f); }
static float shuffled[8][32];
static float __shfl_xor_sync(unsigned, float x, int far) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  shuffled[warp][lane] = x;
  sync_warp();
  const float got = shuffled[warp][lane ^ far];
  sync_warp();
  return got;
}
"""
MAIN = r"""
static const VALUE *q_, *k_, *v_;
static const float *g_, *beta_, *state_;
static VALUE* y_;
static float* after_;
static int k_shape_[4], v_shape_[4];
static void thread() { kernel(q_, k_, k_shape_, v_, v_shape_, g_, beta_, state_, y_, after_); }
static int run(const void* q, const void* k, const void* v, const float* g, const float* beta,
               const float* state, void* y, float* after, const int* k_shape, const int* v_shape) {
  q_ = (const VALUE*)q; k_ = (const VALUE*)k; v_ = (const VALUE*)v;
  g_ = g; beta_ = beta; state_ = state; y_ = (VALUE*)y; after_ = after;
  memcpy(k_shape_, k_shape, sizeof k_shape_);
  memcpy(v_shape_, v_shape, sizeof v_shape_);
  body = thread;
  const int n_rows = N_WARPS * 32 / LANES, n_blocks = (v_shape[3] + n_rows - 1) / n_rows;
  for (int x = 0; x < n_blocks; ++x)
    for (int y = 0; y < v_shape[0] * v_shape[2]; ++y)
      if (!run_block(32 * N_WARPS, {x, y}, (x + y) % 2)) return 2;
  return 0;
}
"""
SIGNATURE = (
    "static void kernel(const VALUE* q, const VALUE* k, const int* k_shape, const VALUE* v, "
    "const int* v_shape, const float* g, const float* beta, const float* state, VALUE* y, float* after)"
)


@dataclass(frozen=True, slots=True)
class Build:
    width: int
    per_channel: bool
    is_half: bool
    """Keys and values in bfloat16."""


def _text(build: Build, name: str) -> str:
    constants = {
        "LANES": LANES,
        "N_WARPS": N_THREADS // 32,
        "WIDTH": build.width,
        "TILE": tile_of(build.per_channel),
        "PER_CHANNEL": int(build.per_channel),
    }
    value = "__nv_bfloat16" if build.is_half else "float"
    lines = [f"constexpr int {constant} = {n};" for constant, n in constants.items()]
    inside = "\n".join([f"using VALUE = {value};", *lines, SIGNATURE, "{", SOURCE, "}", MAIN])
    types = (
        "const void*, const void*, const void*, const float*, const float*, const float*, void*, "
    )
    types += "float*, const int*, const int*"
    named = ", ".join(f"{kind} a{i}" for i, kind in enumerate(types.split(", ")))
    names = ", ".join(f"a{i}" for i in range(10))
    call = f'extern "C" int {name}({named}) {{ return in_{name}::run({names}); }}'
    return f"namespace in_{name} {{\n{inside}\n}}\n{call}\n"


class DeltaOnCpu:
    """One build of the kernel."""

    def __init__(self, build: Build, run: Callable[..., int]) -> None:
        self._build = build
        self._run = run

    @classmethod
    def compiled(cls, builds: list[Build], folder: Path) -> dict[Build, DeltaOnCpu]:
        source, library = folder / "delta.cpp", folder / "delta.so"
        texts = [_text(build, f"run_{i}") for i, build in enumerate(builds)]
        source.write_text("\n".join([HOST, DEVICE, HEADER, *texts]))
        flags = ["-O1", "-shared", "-fPIC", str(source), "-o", str(library)]
        subprocess.run([*COMPILER, *flags], check=True, timeout=120)
        functions = ctypes.CDLL(str(library))
        return {b: cls(b, getattr(functions, f"run_{i}")) for i, b in enumerate(builds)}

    def __call__(
        self, q: FLOATS, k: FLOATS, v: FLOATS, g: FLOATS, beta: FLOATS, state: FLOATS
    ) -> tuple[FLOATS, FLOATS]:
        """q, k and v must be exact in the build's type."""
        values: list[Any] = [bfloat16(a) if self._build.is_half else a for a in (q, k, v)]
        y, after = np.full_like(values[2], 0x7FC0), np.full_like(state, np.nan)
        shapes = [np.array(a.shape, dtype=np.int32) for a in (k, v)]
        arrays = [np.ascontiguousarray(a) for a in (*values, g, beta, state)]
        arrays += [y, after, *shapes]
        fault = self._run(*(a.ctypes.data_as(ctypes.c_void_p) for a in arrays))
        assert not fault, "its threads wait for each other for ever"
        return (float32(y) if self._build.is_half else y), after
