"""firn's softmax, sigmoid and rotary positions on the CPU against MLX's own, in milliseconds.

    .venv/bin/python benchmarks/cpu_math.py

The two take turns on shapes of prefill, of decoding and of a picture; medians of 15 rounds.

Takes about twenty seconds on two cores.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable
from functools import partial

import mlx.core as mx
from report import cli, grid

from firn.backends.cpu import rope as cpu_rope
from firn.backends.cpu import softmax

ATTENTION = {
    "a chunk of 256 at 0": (1, 256, 256, "causal"),
    "a chunk of 256 at 8K": (1, 256, 8448, "causal"),
    "a turn of 110 at 1,700": (1, 110, 1810, "causal"),
    "a picture of 1,024 patches": (1, 1024, 1024, None),
    "one token at 1,700": (1, 1, 1700, None),
    "16 rows at 300": (16, 1, 300, None),
}
HEADS, WIDTH = 4, 64
SWIGLU = {"swiglu of a chunk of 256": (256, 512), "swiglu of a token": (1, 512)}
ROPE = {"rope of a token": (1, 4), "rope of 16 rows": (16, 4)}
"""Rows, and the number of layers that share a position; each layer has queries and keys."""
N_ROUNDS = 15

Work = Callable[[], mx.array | list[mx.array]]


def attention(function: Callable[..., mx.array], shape: tuple[int, int, int, str | None]) -> Work:
    batch, n_tokens, n_keys, mask = shape
    q = mx.random.normal((batch, HEADS, n_tokens, WIDTH))
    k = mx.random.normal((batch, HEADS, n_keys, WIDTH))
    mx.eval(q, k)
    return partial(function, q, k, k, scale=0.1, mask=mask)


def swiglu(sigmoid: Callable[[mx.array], mx.array], shape: tuple[int, int]) -> Work:
    """Compiled, as in mlx-lm's models."""
    gate, x = mx.random.normal(shape), mx.random.normal(shape)
    mx.eval(gate, x)

    def gated(gate: mx.array, x: mx.array) -> mx.array:
        return gate * sigmoid(gate) * x

    return partial(mx.compile(gated, shapeless=True), gate, x)


def rope(function: Callable[..., mx.array], shape: tuple[int, int]) -> Work:
    """One step after the other, each at the next position."""
    batch, n_layers = shape
    x = mx.random.normal((batch, HEADS, 1, WIDTH))
    mx.eval(x)
    position = itertools.count(300)
    turn = partial(function, x, WIDTH, traditional=False, base=1e4, scale=1.0)

    def step() -> list[mx.array]:
        at = next(position)
        layers = [mx.array([at] * batch) if batch > 1 else at for _ in range(n_layers)]
        return [turn(offset=layer) for layer in layers for _ in ("queries", "keys")]

    return step


def milliseconds(work: Work) -> float:
    began = time.perf_counter()
    mx.eval(work())
    return 1e3 * (time.perf_counter() - began)


def compare(name: str, theirs: Work, ours: Work) -> list[str]:
    milliseconds(theirs), milliseconds(ours)
    pairs = [(milliseconds(theirs), milliseconds(ours)) for _ in range(N_ROUNDS)]
    a, b = (statistics.median(times) for times in zip(*pairs, strict=True))
    return [name, f"{a:.2f}", f"{b:.2f}", f"{b / a:.2f}"]


def main() -> None:
    rows = [["", "MLX ms", "firn ms", "ratio"]]
    for name, shape in ATTENTION.items():
        theirs = attention(softmax._plain_attention, shape)
        rows.append(compare(name, theirs, attention(softmax.attention, shape)))
    for name, size in SWIGLU.items():
        theirs = swiglu(softmax._plain_sigmoid, size)
        rows.append(compare(name, theirs, swiglu(softmax.sigmoid, size)))
    for name, size in ROPE.items():
        theirs = rope(cpu_rope._plain_rope, size)
        rows.append(compare(f"{name}, {size[1]} layers", theirs, rope(cpu_rope.rope, size)))
    print(grid(rows))


if __name__ == "__main__":
    mx.set_default_device(mx.Device(mx.cpu))
    cli(main)
