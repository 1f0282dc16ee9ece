"""What the CUDA kernels share: their number type, and the tensor cores' multiplication."""

from __future__ import annotations

import mlx.core as mx

DTYPE = mx.bfloat16
"""The only supported type: another would need a second kernel, compiled at each start."""
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


def compact(source: str) -> str:
    """The source without indentation: MLX hashes all of it each time the kernel is dispatched."""
    return "\n".join(line.strip() for line in source.splitlines())
