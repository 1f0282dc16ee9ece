"""Runs the source of the products kernel on a CPU. Needs a C++ compiler.

A block's threads take turns, each until it has to wait for others; the tensor cores and the copies
are emulated. A thread that runs ahead of the others reads what they have not written yet, and
overwrites what they have not read, so a missing barrier shows, and always in the same way.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from firn.backends.cuda.products import SOURCE

COMPILER = ("g++", "-std=c++17", "-x", "c++", "-w")

HOST = r"""
#define _XOPEN_SOURCE 700  // macOS has the contexts only so
#include <cstdint>
#include <cstring>
#include <deque>
#include <vector>
#include <ucontext.h>
struct Index { int x, y; };
struct Copy { void* to; const void* from; int n_bytes; };
using Copies = std::vector<Copy>;
struct Thread {
  ucontext_t context;
  Index index, block;
  std::deque<Copies> groups;
  Copies newest;
  bool is_done;
};
static const int MAX_THREADS = 256, STACK_NBYTES = 64 << 10;
alignas(64) static char stacks[MAX_THREADS][STACK_NBYTES];
static Thread threads[MAX_THREADS];
static Thread* self;
static ucontext_t scheduler;
static bool moved;  // since the round began: some thread need not wait any more
static void (*body)();
static void begin() {
  body();
  self->is_done = moved = true;
}
static void take_turns(int n_threads, bool backwards) {
  for (moved = true; moved;) {
    moved = false;
    for (int i = 0; i < n_threads; ++i) {
      self = &threads[backwards ? n_threads - 1 - i : i];
      if (!self->is_done) swapcontext(&scheduler, &self->context);
    }
  }
}
static bool run_block(int n_threads, Index block, bool backwards) {
  for (int i = 0; i < n_threads; ++i) {
    Thread& thread = threads[i];
    thread.index = {i, 0};
    thread.block = block;
    thread.groups.clear();
    thread.newest.clear();
    thread.is_done = false;
    getcontext(&thread.context);
    thread.context.uc_stack.ss_sp = stacks[i];
    thread.context.uc_stack.ss_size = STACK_NBYTES;
    thread.context.uc_link = &scheduler;
    makecontext(&thread.context, begin, 0);
  }
  take_turns(n_threads, backwards);
  for (int i = 0; i < n_threads; ++i)
    if (!threads[i].is_done) return false;
  return true;
}
struct Barrier {
  int n_threads, n_waiting = 0, phase = 0;
  Barrier(int n) : n_threads(n) {}
  void arrive_and_wait() {
    const int mine = phase;
    if (++n_waiting == n_threads) {
      n_waiting = 0;
      ++phase;
      moved = true;
    }
    while (phase == mine) swapcontext(&self->context, &scheduler);
  }
};
#define threadIdx (self->index)
#define blockIdx (self->block)

struct alignas(16) uint4 { unsigned x, y, z, w; };
struct float2 { float x, y; };
struct __nv_bfloat16 { uint16_t bits; };
struct __nv_bfloat162 { __nv_bfloat16 x, y; };
static float wide(uint16_t bits) {
  uint32_t u = (uint32_t)bits << 16;
  float f;
  memcpy(&f, &u, 4);
  return f;
}
static __nv_bfloat16 narrow(float f) {
  uint32_t u;
  memcpy(&u, &f, 4);
  return {(uint16_t)((u + 0x7fff + ((u >> 16) & 1)) >> 16)};
}
static __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {narrow(x), narrow(y)}; }

static Barrier warps[8] = {32, 32, 32, 32, 32, 32, 32, 32};
static void sync_warp() { warps[threadIdx.x >> 5].arrive_and_wait(); }

static bool is_late;  // copies are made when they are awaited, or at once
static void make(const Copy& copy) { memset(copy.to, 0, 16); memcpy(copy.to, copy.from, copy.n_bytes); }
static void end_copies() { self->groups.push_back(self->newest); self->newest.clear(); }
template <int n> static void await_copies() {
  for (; (int)self->groups.size() > n; self->groups.pop_front())
    for (auto& copy : self->groups.front()) make(copy);
}

static const char* addresses[8][32];
static void load_four(unsigned& a, unsigned& b, unsigned& c, unsigned& d, const void* at) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  addresses[warp][lane] = (const char*)at;
  sync_warp();
  unsigned* to[4] = {&a, &b, &c, &d};
  for (int i = 0; i < 4; ++i) memcpy(to[i], addresses[warp][i * 8 + lane / 4] + lane % 4 * 4, 4);
  sync_warp();
}
static unsigned registers[8][32][6];
static float value(int warp, int lane, int i, int half) {
  return wide(registers[warp][lane][i] >> (16 * half));
}
static void multiply(
    float (&s)[4], unsigned a0, unsigned a1, unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  const unsigned mine[6] = {a0, a1, a2, a3, b0, b1};
  memcpy(registers[warp][lane], mine, sizeof mine);
  sync_warp();
  for (int e = 0; e < 4; ++e) {
    const int row = lane / 4 + e / 2 * 8, column = lane % 4 * 2 + e % 2;
    for (int k = 0; k < 16; ++k) {
      const float a = value(warp, row % 8 * 4 + k % 8 / 2, row / 8 + k / 8 * 2, k % 2);
      const float b = value(warp, column * 4 + k % 8 / 2, 4 + k / 8, k % 2);
      s[e] += a * b;
    }
  }
  sync_warp();
}
"""
DEVICE = r"""
alignas(16) static uint4 room[N_BYTES / 16];
static Barrier block(32 * N_SLICES);
static void __syncthreads() { block.arrive_and_wait(); }
static bool is_outside;
static void copy_async(uint4* to, const void* from, int n_bytes) {
  const Copy copy = {to, from, n_bytes};
  if (to < room || to + 1 > room + N_BYTES / 16) is_outside = true;
  else if (is_late) self->newest.push_back(copy);
  else make(copy);
}
"""
MAIN = r"""
static const __nv_bfloat16 *x_, *w_;
static __nv_bfloat16* out_;
static int x_shape[3], w_shape[2];
static void thread() { kernel(x_, x_shape, 3, w_, w_shape, out_); }
static int run(const __nv_bfloat16* x, int n_tokens, const __nv_bfloat16* w, int n_out, int n_inner,
               __nv_bfloat16* out, int late) {
  x_ = x; w_ = w; out_ = out;
  x_shape[0] = 1; x_shape[1] = n_tokens; x_shape[2] = n_inner;
  w_shape[0] = n_out; w_shape[1] = n_inner;
  is_late = late;
  body = thread;
  const int n_columns = n_out / 32, n_groups = (n_tokens + 16 * M_TILES - 1) / (16 * M_TILES);
  for (int b = 0; b < n_columns * n_groups; ++b) {
    memset(room, 0xff, sizeof room);
    if (!run_block(32 * N_SLICES, {b % n_columns, b / n_columns}, b % 2)) return 2;
  }
  return is_outside;
}
"""
SIGNATURE = (
    "static void kernel(const __nv_bfloat16* x, const int* x_shape, int x_ndim, "
    "const __nv_bfloat16* w, const int* w_shape, __nv_bfloat16* out)"
)

Bits = NDArray[np.uint16]


def bfloat16(values: NDArray[np.float32]) -> Bits:
    """Truncated, not rounded."""
    return (np.ascontiguousarray(values).view(np.uint32) >> 16).astype(np.uint16)


def float32(bits: Bits) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


@cache
def has_compiler() -> bool:
    """Whether there is one, with the contexts that threads need to take turns."""
    if shutil.which(COMPILER[0]) is None:
        return False
    trial = [*COMPILER, "-fsyntax-only", "-"]
    return subprocess.run(trial, input=HOST.encode(), check=False).returncode == 0


class Built(Protocol):
    """A build of the kernel: constants for its source, and how much memory its threads share."""

    @property
    def template(self) -> Sequence[tuple[str, int]]: ...

    @property
    def shared_nbytes(self) -> int: ...


def _text(build: Built, name: str) -> str:
    """The kernel with these constants, in a namespace of its own, as a function of this name."""
    constants = [f"constexpr int {constant} = {value};" for constant, value in build.template]
    body = SOURCE.replace("extern __shared__ uint4 room[];", "")
    inside = "\n".join([*constants, DEVICE, SIGNATURE, "{", body, "}", MAIN])
    sizes = f"#undef N_BYTES\n#define N_BYTES {build.shared_nbytes}\n"
    arguments = "const __nv_bfloat16* x, int a, const __nv_bfloat16* w, int b, int c, "
    arguments += "__nv_bfloat16* out, int late"
    call = (
        f'extern "C" int {name}({arguments}) {{ return in_{name}::run(x, a, w, b, c, out, late); }}'
    )
    return f"{sizes}namespace in_{name} {{\n{inside}\n}}\n{call}\n"


class KernelOnCpu:
    """One build of the kernel."""

    def __init__(self, run: Callable[..., int]) -> None:
        self._run = run

    @classmethod
    def compiled(cls, builds: Sequence[Built], folder: Path) -> list[KernelOnCpu]:
        """All of them in one run of the compiler, which spends most of its time on the headers."""
        source, library = folder / "kernel.cpp", folder / "kernel.so"
        texts = [_text(build, f"run_{i}") for i, build in enumerate(builds)]
        source.write_text("\n".join([HOST, *texts]))
        flags = ["-O1", "-shared", "-fPIC", str(source), "-o", str(library)]
        subprocess.run([*COMPILER, *flags], check=True, timeout=120)
        functions = ctypes.CDLL(str(library))
        return [cls(getattr(functions, f"run_{i}")) for i in range(len(builds))]

    def product(self, x: Bits, weight: Bits, *, late: bool) -> NDArray[np.float32]:
        """late: copies are made only when they are awaited."""
        (n_tokens, n_inner), n_out = x.shape, weight.shape[0]
        out = np.full((n_tokens + 1, n_out), 0x7FC0, dtype=np.uint16)
        at = [array.ctypes.data_as(ctypes.c_void_p) for array in (x, weight, out)]
        fault = self._run(at[0], n_tokens, at[1], n_out, n_inner, at[2], int(late))
        assert fault != 1, "it copied past its shared memory"
        assert fault != 2, "its threads wait for each other for ever"
        assert (out[n_tokens] == 0x7FC0).all(), "it wrote past the last token"
        return float32(out[:n_tokens])
