"""`ssd.py --decode`: what background writes cost decoding.

The same rows decode on the real engine with the SSD tier and without it, in alternating rounds, each
on a new engine with an empty folder. The prompts' blocks are written while the rows decode.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from engines import BenchEngine
from report import grid

from models import CONFIGS

MEMORY_NBYTES = 1 << 30
CONFIG = CONFIGS["dense"]


def speed(engine: BenchEngine, *, n_rows: int, n_prompt: int, n_reply: int) -> float:
    """Tokens per second from the moment that all rows decode until the first of them is done."""
    rng = np.random.default_rng(5)
    prompts = [rng.integers(3, CONFIG["vocab_size"], n_prompt).tolist() for _ in range(n_rows)]
    answers = [engine.ask(ids, n_reply) for ids in prompts]
    for answer in answers:
        answer.wait()
    start = max(a.times[0] for a in answers)
    end = min(a.times[-1] for a in answers)
    n_tokens = sum(start < t <= end for a in answers for t in a.times)
    return n_tokens / (end - start) if end > start else 0.0


def run(folder: Path, *, n_rounds: int, n_rows: int, n_prompt: int, n_reply: int) -> dict[str, Any]:
    """Prints both speeds; returns all rounds."""
    speeds: dict[str, list[float]] = {"off": [], "on": []}
    written: list[int] = []
    for i in range(n_rounds + 1):
        for kind in ("off", "on"):
            ssd = folder / f"decode-{i}" if kind == "on" else None
            with BenchEngine(
                CONFIG, dtype=mx.float32, memory_nbytes=MEMORY_NBYTES, ssd=ssd
            ) as engine:
                engine.ask(list(range(3, 259)), 32, read=False, write=False).wait()  # warm up
                tokens_per_s = speed(engine, n_rows=n_rows, n_prompt=n_prompt, n_reply=n_reply)
                n_written = engine.nbytes_written
            if i == 0:
                continue  # the first round warms up
            speeds[kind].append(tokens_per_s)
            if ssd is not None:
                written.append(n_written)
        print(f"{time.strftime('%H:%M:%S')} round {i} of {n_rounds}", flush=True)
    off, on = (statistics.median(speeds[kind]) for kind in ("off", "on"))
    ratio = statistics.median(a / b for a, b in zip(speeds["on"], speeds["off"], strict=True))
    rows = [["SSD tier", "tokens/s"], ["off", f"{off:.1f}"], ["on", f"{on:.1f}"]]
    print(f"\n{grid([*rows, ['on / off', f'{ratio:.3f}']])}")
    print(f"{n_rows} rows; {statistics.median(written) / 1e6:.1f} MB were written meanwhile")
    return {"tokens_per_s": speeds, "ratio": ratio, "bytes_written": written}
