"""Attention of a few tokens under a mask on CUDA: firn's kernel compared with MLX's own.

    PYTHONPATH=src python benchmarks/attention.py [--shape 4b] [--rows 1,8,32] [--tokens 1,8]
        [--columns 700,16384] [--steps 10]

Runs the attention of all layers of a model, one after the other, as a step does. MLX gets the mask
that it handles best: booleans for one token, numbers for more. host: time until it is dispatched;
all: time of a step when several are dispatched back to back. Medians in ms. error: the largest
difference from float32, over the largest value.

Takes about a minute on an H200.
"""

from __future__ import annotations

import argparse
from typing import Any

import mlx.core as mx
from products import timed
from report import cli, grid, numbers

from firn.backends.cuda.attention import attention as by_kernel
from firn.backends.cuda.attention import in_float32, plain_attention
from models import SHAPES

N_BUFFERS = 6
"""Layers with keys and values of their own: enough that they are fetched from memory each time."""
ROOM = 256
SCALE = 0.1
MAX_CELLS = 1 << 20
"""The most rows x tokens x columns for which the error is computed."""


def measure(
    config: dict[str, Any], *, n_rows: int, n_tokens: int, n_columns: int, n_steps: int
) -> list[str]:
    heads, kv, width = (
        config[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim")
    )
    n_layers = config["num_hidden_layers"]
    shape = (n_rows, kv, n_columns + ROOM, width)
    buffers = [mx.random.normal(shape).astype(mx.bfloat16) for _ in range(N_BUFFERS)]
    q = mx.random.normal((n_rows, n_tokens, heads, width)).astype(mx.bfloat16)
    q = q.transpose(0, 2, 1, 3)
    columns, first = mx.arange(n_columns), mx.arange(n_rows)[:, None, None, None]
    seen = (columns >= first) & (columns <= mx.arange(n_columns - n_tokens, n_columns)[:, None])
    bias = mx.where(seen, 0.0, -mx.inf).astype(mx.bfloat16)
    mx.eval(buffers, q, seen, bias)

    def layer(i: int) -> tuple[mx.array, mx.array]:
        k, v = buffers[i % N_BUFFERS], buffers[(i + 1) % N_BUFFERS]
        return k[:, :, :n_columns], v[:, :, :n_columns]

    def by_mlx(q: mx.array) -> list[mx.array]:
        mask = seen if n_tokens == 1 else bias
        return [plain_attention(q, *layer(i), scale=SCALE, mask=mask) for i in range(n_layers)]

    def by_firn(q: mx.array) -> list[mx.array]:
        return [by_kernel(q, *layer(i), scale=SCALE, mask=seen) for i in range(n_layers)]

    ms = [*timed(by_mlx, q, n_steps), *timed(by_firn, q, n_steps)]
    off = ""
    if n_rows * n_tokens * n_columns <= MAX_CELLS:
        want = in_float32(q, *layer(0), seen, scale=SCALE)
        got = by_kernel(q, *layer(0), scale=SCALE, mask=seen).astype(mx.float32)
        off = f"{(mx.abs(got - want).max() / mx.abs(want).max()).item():.2g}"
    return [str(n_rows), str(n_tokens), str(n_columns), *(f"{x:.2f}" for x in ms), off]


def run(args: argparse.Namespace) -> None:
    config, _ = SHAPES[args.shape]
    table = [["rows", "tokens", "columns", "MLX host", "all", "firn host", "all", "error"]]
    for n_columns in numbers(args.columns):
        for n_tokens in numbers(args.tokens):
            for n_rows in numbers(args.rows):
                table.append(
                    measure(
                        config,
                        n_rows=n_rows,
                        n_tokens=n_tokens,
                        n_columns=n_columns,
                        n_steps=args.steps,
                    )
                )
                print(" ".join(table[-1]), flush=True)
    print(grid(table))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="4b")
    parser.add_argument("--rows", default="1,8,32")
    parser.add_argument("--tokens", default="1,8")
    parser.add_argument("--columns", default="700,16384")
    parser.add_argument("--steps", type=int, default=10)
    run(parser.parse_args())


if __name__ == "__main__":
    cli(main)
