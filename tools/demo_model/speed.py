"""Tokens per second of a model folder on this machine's default device, by weight type.

python -m tools.demo_model.speed FOLDER [--tokens 2048]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import mlx.core as mx
from mlx_lm import load
from mlx_lm.models.cache import make_prompt_cache

CHUNK = 512
N_DECODE = 64


def measure(folder: Path, dtype: mx.Dtype, n_tokens: int) -> tuple[float, float]:
    """Tokens per second of prefill and decoding; the first pass, which compiles, does not count."""
    model, _ = load(str(folder))
    model.set_dtype(dtype)
    tokens = mx.random.randint(300, 2000, (1, n_tokens))
    for n in (CHUNK + 1, n_tokens):
        cache = make_prompt_cache(model)
        began = time.perf_counter()
        for start in range(0, n, CHUNK):
            model(tokens[:, start : min(start + CHUNK, n)], cache=cache)
            mx.eval([c.state for c in cache])
        read = time.perf_counter()
        for i in range(N_DECODE):
            mx.eval(model(tokens[:, i : i + 1], cache=cache))
        wrote = time.perf_counter()
    return n_tokens / (read - began), N_DECODE / (wrote - read)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--tokens", type=int, default=2048)
    args = parser.parse_args()
    for folder in args.folders:
        for dtype in (mx.bfloat16, mx.float16, mx.float32):
            prefill, decode = measure(folder, dtype, args.tokens)
            kind = str(dtype).removeprefix("mlx.core.")
            print(f"{folder.name:18s} {kind:9s} prefill {prefill:6.0f}/s decode {decode:6.0f}/s")


if __name__ == "__main__":
    main()
