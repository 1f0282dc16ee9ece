"""The memory of a conversation, and what its next turn waits for, by its length.

    python benchmarks/memory_once.py                             # a small dense model
    python benchmarks/memory_once.py --shape 4b --device-run 90  # on a GPU, 90 seconds at most

A conversation of six turns grows to each length on firn's real engine. The peak memory of its last
turn, without the weights, is divided by the bytes of its keys and values at their longest, and so
is the memory that is held once the turn is over. The same prompt is then computed without a cache:
what that takes beyond its keys and values are the chunks' activations, and scores where attention
is not fused.

Then the first tokens of short turns are timed. Computing their few new tokens is timed as well, on
a row that never left the device (the same chunk after the same past), and subtracted: the rest is
the cost of finding, taking over and handing on a past.

Takes a few minutes on two cores.
"""

from __future__ import annotations

import argparse
import statistics
import time
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx
import numpy as np
from engines import BenchEngine, shape_of
from report import BenchError, cli, grid, numbers, save
from servers import lab

from firn.core.values import Prompt
from models import CONFIGS, SHAPES

SMALL = (
    CONFIGS["dense"]
    | {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 32}
    | {"num_attention_heads": 1, "num_key_value_heads": 1}
)
"""Hardly any computation and many layers, so that the cache's work shows."""
N_TURNS, N_SHORT = 6, 16
GIB = 1 << 30


@dataclass(eq=False)
class Point:
    n_tokens: int
    kv_nbytes: int = 0
    peak_nbytes: int = 0
    held_nbytes: int = 0
    without_nbytes: int = 0
    first_s: list[float] = field(default_factory=list)
    compute_s: list[float] = field(default_factory=list)
    n_cached: list[int] = field(default_factory=list)

    @property
    def row(self) -> list[str]:
        first, compute = statistics.median(self.first_s), statistics.median(self.compute_s)
        return [
            f"{self.n_tokens:,}",
            f"{self.kv_nbytes / (1 << 20):,.0f}",
            f"{self.peak_nbytes / self.kv_nbytes:.2f}",
            f"{self.held_nbytes / self.kv_nbytes:.2f}",
            f"{self.without_nbytes / self.kv_nbytes:.2f}",
            f"{1e3 * first:.1f}",
            f"{1e3 * compute:.1f}",
            f"{1e3 * (first - compute):.1f}",
        ]


class Conversation:
    """Owner: `measure`."""

    def __init__(self, engine: BenchEngine, *, seed: int) -> None:
        self._engine = engine
        self._rng = np.random.default_rng(seed)
        self._n_vocab = int(engine.config["vocab_size"])
        self.ids: list[int] = []

    def say(self, n_tokens: int, n_reply: int) -> tuple[float, int]:
        """One turn: seconds until its first token, and how many tokens came from the cache."""
        self.ids += self._rng.integers(3, self._n_vocab, n_tokens).tolist()
        answer = self._engine.ask(self.ids, n_reply).wait()
        self.ids += answer.tokens
        return answer.first_s, answer.n_cached


def grow(
    engine: BenchEngine, n_tokens: int, *, n_reply: int, before: int
) -> tuple[Conversation, Point]:
    conversation, point = Conversation(engine, seed=n_tokens), Point(n_tokens)
    per_turn = n_tokens // N_TURNS
    for _ in range(N_TURNS):
        n_last = len(conversation.ids) + per_turn
        mx.reset_peak_memory()
        conversation.say(per_turn, n_reply)
    point.kv_nbytes = token_nbytes(engine) * len(conversation.ids)
    point.peak_nbytes = mx.get_peak_memory() - before
    point.held_nbytes = active(engine) - before
    mx.reset_peak_memory()
    held = active(engine)
    engine.ask(conversation.ids[:n_last], n_reply, read=False, write=False).wait()
    point.without_nbytes = mx.get_peak_memory() - held
    return conversation, point


def next_turns(
    engine: BenchEngine, conversation: Conversation, point: Point, *, repeats: int
) -> None:
    for _ in range(repeats):
        first_s, n_cached = conversation.say(N_SHORT, 2)
        point.first_s.append(first_s)
        point.n_cached.append(n_cached)
    point.compute_s = computing(engine, len(conversation.ids), repeats=repeats)


def computing(engine: BenchEngine, n_past: int, *, repeats: int) -> list[float]:
    """Seconds to read N_SHORT tokens and pick one, after a past that never left the device."""

    def work(parts: Any) -> list[float]:
        runner = parts.runner
        row = runner.start(None)
        n_total = n_past + (repeats + 2) * (N_SHORT + 1)
        prompt = Prompt(np.ones(n_total, dtype=np.int64))
        for end in [*range(2048, n_past, 2048), n_past]:
            runner.prefill(row, prompt, end)
            runner.finish_chunk(row)
        seconds = []
        for _ in range(repeats + 1):
            began = time.perf_counter()
            runner.prefill(row, prompt, row.n_tokens + N_SHORT - 1)
            runner.finish_chunk(row)
            logits = runner._model(mx.array([[1]]), cache=row.layers)
            mx.eval(mx.argmax(logits[:, -1]))
            row.n_tokens += 1
            seconds.append(time.perf_counter() - began)
        runner.leave([row])
        return seconds[1:]

    times: list[float] = engine.engine.call(work).result()
    return times


def token_nbytes(engine: BenchEngine) -> int:
    def per_token(parts: Any) -> int:
        return int(parts.budget.cost.per_token_nbytes)

    return int(engine.engine.call(per_token).result())


def active(engine: BenchEngine) -> int:
    return int(engine.call(lambda cache: mx.get_active_memory()))


def forget(engine: BenchEngine) -> None:
    def empty(cache: Any) -> None:
        room = cache.records.memory.limit_nbytes
        cache.set_room(0)
        cache.set_room(room)

    engine.call(empty)


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--shape", choices=("small", *SHAPES), default="small")
    options.add_argument("--tokens", type=numbers, default=[2048, 8192, 16384], metavar="N,N,..")
    options.add_argument("--reply", type=int, default=32, help="tokens of a reply while it grows")
    options.add_argument(
        "--chunk", type=int, default=0, help="of prefill: small ones have small scores of their own"
    )
    options.add_argument("--repeats", type=int, default=7, help="short turns at each length")
    options.add_argument(
        "--device-run",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="begin no length after that",
    )
    args = options.parse_args()
    if args.repeats < 1 or min(args.tokens) < 16 * N_TURNS:
        raise BenchError("at least one repeat, and lengths of a hundred tokens or more, please")
    until = time.monotonic() + args.device_run if args.device_run else float("inf")
    config, dtype = (SMALL, mx.float32) if args.shape == "small" else shape_of(args.shape)
    points: list[Point] = []
    with BenchEngine(config, dtype=dtype, memory_nbytes=64 * GIB, chunk=args.chunk) as engine:
        Conversation(engine, seed=1).say(600, args.reply)
        for n_tokens in args.tokens:
            if time.monotonic() > until:
                print(f"no time for {n_tokens:,} tokens", flush=True)
                break
            forget(engine)
            mx.clear_cache()
            conversation, point = grow(engine, n_tokens, n_reply=args.reply, before=active(engine))
            next_turns(engine, conversation, point, repeats=args.repeats)
            points.append(point)
            print(f"{n_tokens:,} tokens: {point.peak_nbytes / point.kv_nbytes:.2f}", flush=True)
    head = [
        "tokens",
        "KV MiB",
        "peak/KV",
        "held/KV",
        "without a cache",
        "first ms",
        "computing ms",
        "rest ms",
    ]
    print(grid([head, *(p.row for p in points)]))
    save(
        lab() / f"memory_once-{args.shape}.json",
        "memory_once",
        options=vars(args),
        result=[p.__dict__ for p in points],
    )


if __name__ == "__main__":
    cli(main)
