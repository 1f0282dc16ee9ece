"""Softmax by powers against MLX's own attention, on the CPU: milliseconds a layer.

python benchmarks/attention.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import mlx.core as mx
from report import cli, grid

from firn.models.cpu_attention import _plain, attention

SHAPES = {
    "a chunk of 256 at 0": (256, 256),
    "a chunk of 256 at 8K": (256, 8448),
    "a turn of 110 at 1,700": (110, 1810),
    "a picture of 1,024 patches": (1024, 1024),
    "one token at 1,700": (1, 1700),
}
HEADS, WIDTH, N_ROUNDS = 4, 64, 9


def milliseconds(function: Callable[..., mx.array], q: mx.array, k: mx.array) -> float:
    began = time.perf_counter()
    mx.eval(function(q, k, k, scale=0.1))
    return 1e3 * (time.perf_counter() - began)


def main() -> None:
    rows = [["", "MLX ms", "firn ms", "ratio"]]
    for name, (n_tokens, n_keys) in SHAPES.items():
        q = mx.random.normal((1, HEADS, n_tokens, WIDTH))
        k = mx.random.normal((1, HEADS, n_keys, WIDTH))
        mx.eval(q, k)
        pairs = [
            (milliseconds(_plain, q, k), milliseconds(attention, q, k)) for _ in range(N_ROUNDS)
        ]
        theirs, ours = (statistics.median(times) for times in zip(*pairs, strict=True))
        rows.append([name, f"{theirs:.2f}", f"{ours:.2f}", f"{ours / theirs:.2f}"])
    print(grid(rows))


if __name__ == "__main__":
    mx.set_default_device(mx.Device(mx.cpu))
    cli(main)
