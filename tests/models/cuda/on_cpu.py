"""Runs the text of the products kernel on a CPU: each of a block's threads is one of the machine's, and
what the tensor cores and the copies do is written out. Needs a compiler for C++20."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from firn.models.cuda.products import SOURCE

COMPILER = ("g++", "-std=c++20", "-x", "c++", "-w", "-pthread")

DEVICE = r"""
#include <barrier>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <thread>
#include <vector>
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

struct Index { int x, y; };
static thread_local Index threadIdx, blockIdx;
alignas(16) static uint4 room[N_BYTES / 16];
using Barrier = std::barrier<>;
static Barrier block(32 * N_SLICES);
static Barrier warps[8] = {Barrier(32), Barrier(32), Barrier(32), Barrier(32),
                           Barrier(32), Barrier(32), Barrier(32), Barrier(32)};
static void __syncthreads() { block.arrive_and_wait(); }
static void sync_warp() { warps[threadIdx.x >> 5].arrive_and_wait(); }

using Copies = std::vector<std::function<void()>>;
static bool is_outside;
static bool is_late;  // copies are made when they are awaited, or at once
static thread_local std::deque<Copies> groups;
static thread_local Copies newest;
static void copy_async(uint4* to, const void* from, int n_bytes) {
  if (to < room || to + 1 > room + N_BYTES / 16) {
    is_outside = true;
    return;
  }
  auto copy = [=] { memset(to, 0, 16); memcpy(to, from, n_bytes); };
  if (is_late) newest.push_back(copy); else copy();
}
static void end_copies() { groups.push_back(newest); newest.clear(); }
template <int n> static void await_copies() {
  for (; (int)groups.size() > n; groups.pop_front())
    for (auto& copy : groups.front()) copy();
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
MAIN = r"""
extern "C" int run(const __nv_bfloat16* x, int n_tokens, const __nv_bfloat16* w, int n_out, int n_inner,
                    __nv_bfloat16* out, int late) {
  const int x_shape[3] = {1, n_tokens, n_inner}, w_shape[2] = {n_out, n_inner};
  is_late = late;
  const int n_columns = n_out / 32, n_groups = (n_tokens + 16 * M_TILES - 1) / (16 * M_TILES);
  for (int b = 0; b < n_columns * n_groups; ++b) {
    memset(room, 0xff, sizeof room);
    std::vector<std::thread> threads;
    for (int i = 0; i < 32 * N_SLICES; ++i)
      threads.emplace_back([=] {
        threadIdx.x = i;
        blockIdx = {b % n_columns, b / n_columns};
        kernel(x, x_shape, 3, w, w_shape, out);
      });
    for (auto& thread : threads) thread.join();
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
    """Cut, not rounded."""
    return (np.ascontiguousarray(values).view(np.uint32) >> 16).astype(np.uint16)


def float32(bits: Bits) -> NDArray[np.float32]:
    return (bits.astype(np.uint32) << 16).view(np.float32)


@cache
def has_compiler() -> bool:
    """Whether there is one, with the library of C++20."""
    if shutil.which(COMPILER[0]) is None:
        return False
    trial = [*COMPILER, "-fsyntax-only", "-"]
    return subprocess.run(trial, input=b"#include <barrier>", check=False).returncode == 0


class KernelOnCpu:
    """One build of the kernel."""

    def __init__(
        self, folder: Path, template: Sequence[tuple[str, int]], *, shared_nbytes: int
    ) -> None:
        constants = [f"constexpr int {name} = {value};" for name, value in template]
        body = SOURCE.replace("extern __shared__ uint4 room[];", "")
        text = "\n".join([*constants, DEVICE, SIGNATURE, "{", body, "}", MAIN])
        source, library = folder / "kernel.cpp", folder / "kernel.so"
        source.write_text(f"#define N_BYTES {shared_nbytes}\n{text}")
        flags = ["-O1", "-shared", "-fPIC", str(source), "-o", str(library)]
        subprocess.run([*COMPILER, *flags], check=True, timeout=120)
        self._run = ctypes.CDLL(str(library)).run

    def product(self, x: Bits, weight: Bits, *, late: bool) -> NDArray[np.float32]:
        """late: copies are made only when they are awaited."""
        (n_tokens, n_inner), n_out = x.shape, weight.shape[0]
        out = np.full((n_tokens + 1, n_out), 0x7FC0, dtype=np.uint16)
        at = [array.ctypes.data_as(ctypes.c_void_p) for array in (x, weight, out)]
        is_outside = self._run(at[0], n_tokens, at[1], n_out, n_inner, at[2], int(late))
        assert not is_outside, "it copied past its shared memory"
        assert (out[n_tokens] == 0x7FC0).all(), "it wrote past the last token"
        return float32(out[:n_tokens])
