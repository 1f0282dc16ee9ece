"""Products of a few tokens on CUDA: firn's kernel compared with MLX's own.

    PYTHONPATH=src python benchmarks/products.py [--shape 4b] [--tokens 1,2,8,16,32,64,128] [--steps 20]

Runs all matrix products of a model's layers, each on the result of another, as a step does. host:
time until they are dispatched; all: time of a step when several are dispatched back to back, so
that the host's time and the device's overlap. Medians in ms. error: the largest difference from a
float32 product, over the largest value.

Takes under a minute on an H200.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import mlx.core as mx
from report import cli, grid, numbers

from firn.backends.cuda import products
from models import SHAPES

Product = Callable[[mx.array, mx.array], mx.array]


N_TOGETHER = 6
"""Steps that are dispatched back to back."""


def timed(step: Callable[[mx.array], list[mx.array]], x: mx.array, n: int) -> tuple[float, float]:
    host, whole = [], []
    for _ in range(n + 1):
        out = [x]
        began = time.perf_counter()
        for _ in range(N_TOGETHER):
            start = time.perf_counter()
            out = step(out[0])
            mx.async_eval(out)
            host.append(time.perf_counter() - start)
        mx.eval(out)
        whole.append((time.perf_counter() - began) / N_TOGETHER)
    return 1000 * statistics.median(host[N_TOGETHER:]), 1000 * statistics.median(whole[1:])


def by_mlx(x: mx.array, weight: mx.array) -> mx.array:
    return x @ weight.T


def chained(product: Product, layers: list[list[mx.array]], x: mx.array) -> list[mx.array]:
    """The device may compute three of them together, and then two; the others wait for one another."""
    apart = []
    for query, key, value, out, gate, up, down in layers:
        apart += [product(x, key), product(x, value)]
        x = product(product(x, query), out)
        apart.append(product(x, up))
        x = product(product(x, gate), down)
    return [x, *apart]


def error(weight: mx.array, n: int) -> float:
    x = mx.random.normal((1, n, weight.shape[1])).astype(mx.bfloat16)
    want = x.astype(mx.float32) @ weight.astype(mx.float32).T
    off = mx.abs(products.product(x, weight).astype(mx.float32) - want).max()
    ratio: Any = (off / mx.abs(want).max()).item()
    return float(ratio)


def run(args: argparse.Namespace) -> None:
    config, _ = SHAPES[args.shape]
    size, wide = config["hidden_size"], config["intermediate_size"]
    heads, kv = (config["head_dim"] * config[f"num_{k}_heads"] for k in ("attention", "key_value"))
    shapes = [(heads, size), (kv, size), (kv, size), (size, heads)]
    shapes += [(wide, size), (wide, size), (size, wide)]
    weights = [
        [mx.random.normal(s, scale=s[1] ** -0.5).astype(mx.bfloat16) for s in shapes]
        for _ in range(config["num_hidden_layers"])
    ]
    mx.eval(weights)
    print("fault:", products.fault(), flush=True)
    rows = [["tokens", "MLX host", "all", "firn host", "all", "error"]]
    for n in numbers(args.tokens):
        x = mx.random.normal((1, n, size)).astype(mx.bfloat16)
        mx.eval(x)
        cells = [*timed(partial(chained, by_mlx, weights), x, args.steps)]
        off = 0.0
        is_tried = 1 < n <= products.MAX_TOKENS
        if is_tried:
            cells += timed(partial(chained, products.product, weights), x, args.steps)
            off = max(error(w, n) for w in weights[0])
        rows.append(
            [str(n), *(f"{ms:.1f}" for ms in cells), *(["", ""] * (not is_tried)), f"{off:.2g}"]
        )
        print(" ".join(rows[-1]), flush=True)
    print(grid(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="4b")
    parser.add_argument("--tokens", default="1,2,8,16,32,64,128")
    parser.add_argument("--steps", type=int, default=20)
    run(parser.parse_args())


if __name__ == "__main__":
    cli(main)
