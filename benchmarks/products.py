"""Products of a few tokens on CUDA: firn's kernel beside what MLX does by itself.

    PYTHONPATH=src python benchmarks/products.py [--shape 4b] [--tokens 1,2,8,16,32] [--steps 20]

All matrix products of a model's layers, one after the other, as a step has them. host: until they are
dispatched; all: until they are computed. Medians in ms. error: the largest difference to a product of
float32, over the largest value.

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

from firn.models.cuda import products
from models import SHAPES


def timed(work: Callable[[], list[mx.array]], n_steps: int) -> tuple[float, float]:
    host, whole = [], []
    for _ in range(n_steps + 2):
        began = time.perf_counter()
        out = work()
        mx.async_eval(out)
        host.append(time.perf_counter() - began)
        mx.eval(out)
        whole.append(time.perf_counter() - began)
    return 1000 * statistics.median(host[2:]), 1000 * statistics.median(whole[2:])


def by_mlx(pairs: list[tuple[mx.array, mx.array]]) -> list[mx.array]:
    return [x @ weight.T for x, weight in pairs]


def by_firn(pairs: list[tuple[mx.array, mx.array]]) -> list[mx.array]:
    return [products.product(x, weight) for x, weight in pairs]


def error(x: mx.array, weight: mx.array) -> float:
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
        [mx.random.normal(s).astype(mx.bfloat16) for s in shapes]
        for _ in range(config["num_hidden_layers"])
    ]
    mx.eval(weights)
    print("fault:", products.fault(), flush=True)
    rows = [["tokens", "MLX host", "all", "firn host", "all", "error"]]
    for n in numbers(args.tokens):
        inputs = {k: mx.random.normal((1, n, k)).astype(mx.bfloat16) for k in {size, wide, heads}}
        mx.eval(list(inputs.values()))
        each = [(inputs[w.shape[1]], w) for layer in weights for w in layer]
        cells = [*timed(partial(by_mlx, each), args.steps)]
        off = 0.0
        if n > 1:
            cells += timed(partial(by_firn, each), args.steps)
            off = max(error(x, w) for x, w in each[:7])
        rows.append([str(n), *(f"{ms:.1f}" for ms in cells), *(["", ""] * (n == 1)), f"{off:.2g}"])
        print(" ".join(rows[-1]), flush=True)
    print(grid(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="4b")
    parser.add_argument("--tokens", default="1,2,8,16,32")
    parser.add_argument("--steps", type=int, default=20)
    run(parser.parse_args())


if __name__ == "__main__":
    cli(main)
