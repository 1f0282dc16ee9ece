"""Short prompts that arrive together: read in one padded pass, one by one, or as the engine chooses.

    python benchmarks/short_prompts.py                                          # a small dense model
    python benchmarks/short_prompts.py --shape 4b --streams 32 --tokens 450 --device-run 80

All in one engine; in each round every way has its turn, with new prompts. Tokens/s are the replies'
tokens over the whole time, as a server's clients would see them; ratios are taken within a round.
On a busy machine, processor time says more than the clock.

Takes about a minute on two cores; `--device-run SECONDS` bounds it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import numpy as np
from engines import BenchEngine, shape_of
from report import BenchError, cli, grid, save
from servers import lab

from models import SHAPES

WAYS = ("one by one", "together", "chosen")
GIB = 1 << 30


class Fixed:
    """Always gives the same answer to whether short prompts are read together."""

    def __init__(self, answer: bool) -> None:
        self._answer = answer

    def should_batch(self) -> bool:
        return self._answer

    def saw(self, seconds: float, *, n_tokens: int, n_prompts: int) -> None:
        pass


def set_way(engine: BenchEngine, way: Any) -> None:
    def change(_: Any) -> None:
        engine.engine._loop._prefill._batches._trial = way

    engine.engine.call(change).result()


def turn(
    engine: BenchEngine, n_streams: int, n_tokens: int, n_reply: int, *, rng: Any
) -> tuple[float, float, float]:
    """Tokens/s, the mean time to a first token, and processor seconds."""
    n_vocab = int(engine.config["vocab_size"])
    lengths = rng.integers(int(0.9 * n_tokens), int(1.1 * n_tokens), n_streams)
    head = [1, 2, 3]  # as a chat template begins
    prompts = [[*head, *rng.integers(4, n_vocab, n).tolist()] for n in lengths]
    began, cpu_began = time.perf_counter(), time.process_time()
    answers = [engine.ask(ids, n_reply) for ids in prompts]
    for answer in answers:
        answer.wait()
    seconds = time.perf_counter() - began
    first = statistics.mean(a.first_s for a in answers)
    return n_streams * n_reply / seconds, first, time.process_time() - cpu_began


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--shape", choices=SHAPES, default="tiny")
    options.add_argument("--streams", type=int, default=16)
    options.add_argument(
        "--tokens", type=int, default=200, help="of a prompt, give or take a tenth"
    )
    options.add_argument("--reply", type=int, default=48)
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument(
        "--device-run", type=float, default=0.0, metavar="SECONDS", help="begin no round after that"
    )
    options.add_argument("--unpadded", action="store_true", help="a GPU's prompts have any shape")
    args = options.parse_args()
    if args.rounds < 1 or args.streams < 2:
        raise BenchError("at least one round and two streams, please")
    until = time.monotonic() + args.device_run if args.device_run else float("inf")
    config, dtype = shape_of(args.shape)
    results: dict[str, list[tuple[float, float, float]]] = {way: [] for way in WAYS}
    rng = np.random.default_rng(5)
    with BenchEngine(config, dtype=dtype, memory_nbytes=8 * GIB, pads=not args.unpadded) as engine:
        chosen = engine.engine._loop._prefill._batches._trial
        ways = {"one by one": Fixed(False), "together": Fixed(True), "chosen": chosen}
        for i in range(args.rounds + 1):
            if i > 1 and time.monotonic() > until:
                break
            for way in WAYS[i % 3 :] + WAYS[: i % 3]:
                set_way(engine, ways[way])
                result = turn(engine, args.streams, args.tokens, args.reply, rng=rng)
                if i:  # the first round warms up
                    results[way].append(result)
    head = ["way", "tok/s", "over one by one", "first token s", "processor s", "one by one over it"]
    rows = []
    for way in WAYS:
        pairs = list(zip(results[way], results["one by one"], strict=True))
        ratio = statistics.median(mine[0] / other[0] for mine, other in pairs)
        work = statistics.median(other[2] / mine[2] for mine, other in pairs)
        speed, first, cpu = (statistics.median(r[k] for r in results[way]) for k in range(3))
        cells = [f"{speed:,.0f}", f"{ratio:.2f}", f"{first:.3f}", f"{cpu:.2f}", f"{work:.2f}"]
        rows.append([way, *cells])
    print(grid([head, *rows]))
    save(
        lab() / f"short_prompts-{args.shape}.json",
        "short_prompts",
        options=vars(args),
        result=results,
    )


if __name__ == "__main__":
    cli(main)
