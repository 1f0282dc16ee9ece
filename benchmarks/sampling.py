"""What picking a step's tokens costs, by how rows are sampled: milliseconds and operations.

    .venv/bin/python benchmarks/sampling.py

Random logits of Qwen3's vocabulary; medians of 15 rounds. An operation is a node of MLX's graph, so the
same on any device, and about a kernel on a GPU; views do not count.

Takes about ten seconds on two cores.
"""

from __future__ import annotations

import io
import re
import statistics
import time
from dataclasses import replace

import mlx.core as mx
import numpy as np
from report import cli, grid

from firn.core.values import Sampling
from firn.models.decode.sampling import Picker, Picks, pick

VOCAB = 151_936
VIEWS = ("Broadcast", "ExpandDims", "Flatten", "Reshape", "Slice", "Squeeze", "Unflatten")
N_ROUNDS = 15
ROWS = (1, 8)
SETTINGS = {
    "greedy": Sampling(temperature=0.0),
    "temperature": Sampling(temperature=0.7),
    "top-k 20, top-p 0.95": Sampling(temperature=0.7, top_k=20, top_p=0.95),
    "top-k 64": Sampling(temperature=0.7, top_k=64),
    "top-p 0.95": Sampling(temperature=0.7, top_p=0.95),
    "min-p 0.05": Sampling(temperature=0.7, min_p=0.05),
}


def pick_once(logits: mx.array, sampling: Sampling) -> Picks:
    pickers = [
        Picker(
            replace(sampling, seed=i),
            choice=0,
            vocab_size=VOCAB,
            prompt=np.array([1]),
            top_logprobs=None,
        )
        for i in range(len(logits))
    ]
    return pick(logits, pickers)


def n_operations(picks: Picks) -> int:
    dot = io.StringIO()
    mx.export_to_dot(dot, picks.tokens)
    return sum(not kind.startswith(VIEWS) for kind in re.findall(r'label ="(\w+)"', dot.getvalue()))


def milliseconds(logits: mx.array, sampling: Sampling) -> float:
    times = []
    for _ in range(N_ROUNDS):
        began = time.perf_counter()
        mx.eval(pick_once(logits, sampling).arrays)
        times.append(1000 * (time.perf_counter() - began))
    return statistics.median(times)


def main() -> None:
    lines = []
    for name, sampling in SETTINGS.items():
        line = [name]
        for n in ROWS:
            logits = 3.0 * mx.random.normal((n, VOCAB), key=mx.random.key(n))
            mx.eval(logits)
            line.append(f"{milliseconds(logits, sampling):.2f}")
        lines.append([*line, str(n_operations(pick_once(logits, sampling)))])
    print(grid([["", *(f"{n} row{'s' * (n > 1)} ms" for n in ROWS), "operations"], *lines]))


if __name__ == "__main__":
    cli(main)
