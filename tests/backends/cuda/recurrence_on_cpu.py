"""Runs the sources of the kernels for recurrences on a CPU: see on_cpu.py."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from firn.backends.cuda import scans
from firn.backends.cuda.recurrence import HEADER, LANES, N_THREADS, SOURCE, Rule, tile_of
from tests.backends.cuda.on_cpu import COMPILER, HOST, bfloat16, float32

FLOATS = NDArray[np.float32]

DEVICE = r"""
#include <algorithm>
#include <cmath>
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
static const VALUE *q_, *k_, *v_, *a_, *b_;
static const float *g_, *beta_, *state_;
static VALUE* y_;
static float* after_;
static int k_shape_[4], v_shape_[4];
static void thread() {
  kernel(q_, k_, k_shape_, v_, v_shape_, g_, beta_, state_, a_, b_, y_, after_);
}
static int run(void** given, const int* k_shape, const int* v_shape) {
  q_ = (const VALUE*)given[0]; k_ = (const VALUE*)given[1]; v_ = (const VALUE*)given[2];
  g_ = (const float*)given[3]; beta_ = (const float*)given[4]; state_ = (const float*)given[5];
  a_ = (const VALUE*)given[6]; b_ = (const VALUE*)given[7];
  y_ = (VALUE*)given[8]; after_ = (float*)given[9];
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
    "const int* v_shape, const float* g, const float* beta, const float* state, const VALUE* a, "
    "const VALUE* b, VALUE* y, float* after)"
)
SCAN_MAIN = r"""
static void** given_;
static int x_shape_[3];
static void thread() { CALL; }
static int run(void** given, const int* x_shape, const int*) {
  given_ = given;
  memcpy(x_shape_, x_shape, sizeof x_shape_);
  body = thread;
  for (int x = 0; x < (x_shape[2] + N_OF_BLOCK - 1) / N_OF_BLOCK; ++x)
    for (int y = 0; y < x_shape[0]; ++y)
      if (!run_block(128, {x, y}, (x + y) % 2)) return 2;
  return 0;
}
"""


class OnCpu(Protocol):
    """A build of some kernel."""

    def text(self) -> str:
        """Everything inside a namespace of its own, with a function `run`."""

    @property
    def is_half(self) -> bool:
        """Values in bfloat16."""


def _constants(build: OnCpu, constants: dict[str, int]) -> str:
    value = "__nv_bfloat16" if build.is_half else "float"
    lines = [f"constexpr int {constant} = {n};" for constant, n in constants.items()]
    return "\n".join([f"using VALUE = {value};", *lines])


@dataclass(frozen=True, slots=True)
class Build:
    width: int
    per_channel: bool
    is_half: bool
    rule: Rule = Rule.DELTA
    has_beta: bool = True

    def text(self) -> str:
        constants = {
            "RULE": int(self.rule),
            "HAS_BETA": int(self.has_beta),
            "LANES": LANES,
            "N_WARPS": N_THREADS // 32,
            "WIDTH": self.width,
            "TILE": tile_of(per_channel=self.per_channel),
            "PER_CHANNEL": int(self.per_channel),
        }
        return "\n".join([_constants(self, constants), SIGNATURE, "{", SOURCE, "}", MAIN])


@dataclass(frozen=True, slots=True)
class SelectiveBuild:
    n_states: int
    is_half: bool

    def text(self) -> str:
        constants = {"LANES": scans.LANES, "N_CHANNELS": scans.N_CHANNELS, "TILE": scans.TILE}
        constants |= {"N_STATES": self.n_states, "N_OF_BLOCK": scans.N_CHANNELS}
        signature = (
            "static void kernel(const VALUE* x, const int* x_shape, const VALUE* delta, "
            "const VALUE* b, const VALUE* c, const float* rate, const float* state, VALUE* y, "
            "float* after)"
        )
        given = (
            "(VALUE*)given_[0], x_shape_, (VALUE*)given_[1], (VALUE*)given_[2], (VALUE*)given_[3], "
        )
        given += "(float*)given_[4], (float*)given_[5], (VALUE*)given_[6], (float*)given_[7]"
        main = SCAN_MAIN.replace("CALL", f"kernel({given})")
        parts = [_constants(self, constants), signature, "{", scans.SELECTIVE, "}", main]
        return "\n".join(parts)


@dataclass(frozen=True, slots=True)
class SumBuild:
    is_half: bool

    def text(self) -> str:
        constants = {"N_THREADS": scans.N_THREADS, "AHEAD": scans.AHEAD}
        constants["N_OF_BLOCK"] = scans.N_THREADS
        signature = (
            "static void kernel(const VALUE* x, const int* x_shape, const VALUE* a, "
            "const float* state, VALUE* y, float* after)"
        )
        given = "(VALUE*)given_[0], x_shape_, (VALUE*)given_[1], (float*)given_[2], "
        given += "(VALUE*)given_[3], (float*)given_[4]"
        main = SCAN_MAIN.replace("CALL", f"kernel({given})")
        parts = [_constants(self, constants), signature, "{", scans.GATED_SUM, "}", main]
        return "\n".join(parts)


class KernelOnCpu:
    """One build of a kernel."""

    def __init__(self, build: OnCpu, run: Callable[..., int]) -> None:
        self._build = build
        self._run = run

    @classmethod
    def compiled(cls, builds: Sequence[OnCpu], folder: Path) -> dict[OnCpu, KernelOnCpu]:
        source, library = folder / "kernels.cpp", folder / "kernels.so"
        texts = [
            f"namespace in_{i} {{\n{build.text()}\n}}\n"
            f'extern "C" int run_{i}(void** a, const int* b, const int* c) '
            f"{{ return in_{i}::run(a, b, c); }}"
            for i, build in enumerate(builds)
        ]
        source.write_text("\n".join([HOST, DEVICE, HEADER, *texts]))
        flags = ["-O1", "-shared", "-fPIC", str(source), "-o", str(library)]
        subprocess.run([*COMPILER, *flags], check=True, timeout=240)
        functions = ctypes.CDLL(str(library))
        return {b: cls(b, getattr(functions, f"run_{i}")) for i, b in enumerate(builds)}

    def delta(
        self, q: FLOATS, k: FLOATS, v: FLOATS, g: FLOATS, beta: FLOATS, state: FLOATS
    ) -> tuple[FLOATS, FLOATS]:
        """Of both rules with keys; values must be exact in the build's type."""
        q, k, v = (self._values(a) for a in (q, k, v))
        return self._called([q, k, v, g, beta, state, k, k], v, state, k, v)

    def wkv(
        self,
        r: FLOATS,
        w: FLOATS,
        k: FLOATS,
        v: FLOATS,
        a: FLOATS,
        b: FLOATS,
        state: FLOATS,
    ) -> tuple[FLOATS, FLOATS]:
        r, k, v, a, b = (self._values(each) for each in (r, k, v, a, b))
        return self._called([r, k, v, w, w, state, a, b], v, state, k, v)

    def selective(
        self, x: FLOATS, delta: FLOATS, b: FLOATS, c: FLOATS, rate: FLOATS, state: FLOATS
    ) -> tuple[FLOATS, FLOATS]:
        x, delta, b, c = (self._values(each) for each in (x, delta, b, c))
        return self._called([x, delta, b, c, rate, state], x, state, x, x)

    def gated_sum(self, x: FLOATS, a: FLOATS, state: FLOATS) -> tuple[FLOATS, FLOATS]:
        x, a = self._values(x), self._values(a)
        return self._called([x, a, state], x, state, x, x)

    def _values(self, a: FLOATS) -> Any:
        return np.ascontiguousarray(bfloat16(a) if self._build.is_half else a)

    def _called(self, given: list[Any], y_as: Any, state: FLOATS, *shaped: Any) -> Any:
        y, after = np.full_like(y_as, 0x7FC0), np.full_like(state, np.nan)
        arrays = [*(np.ascontiguousarray(a) for a in given), y, after]
        shapes = [np.array(a.shape, dtype=np.int32) for a in shaped]
        pointers = (ctypes.c_void_p * len(arrays))(*(a.ctypes.data for a in arrays))
        fault = self._run(pointers, *(s.ctypes.data_as(ctypes.c_void_p) for s in shapes))
        assert not fault, "its threads wait for each other for ever"
        return (float32(y) if self._build.is_half else y), after
