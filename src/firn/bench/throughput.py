"""Tokens per second, and the longest pause of a running reply while a long prompt arrives."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from firn.bench.client import Message, Target, TimedReply, words
from firn.bench.report import BenchError, Column

N_WORDS, N_LONG_WORDS = 44, 890
N_REPLY = 48
N_DECODERS, N_DECODER_TOKENS = 8, 400
N_BEFORE = 10
"""Tokens that must have arrived from every decoder before the long prompt is sent."""


@dataclass(frozen=True, slots=True)
class Load:
    """concurrency: numbers of concurrent streams, tried one after the other. per_stream: requests
    of each in a round; a single stream sends twice as many, to be measurable. gap: send a long
    prompt too."""

    concurrency: tuple[int, ...] = (1, 4, 16)
    per_stream: int = 3
    gap: bool = True

    def n_requests(self, n_streams: int) -> int:
        return self.per_stream * max(n_streams, 2)


def columns(load: Load) -> list[Column]:
    levels = [Column(f"tok_s_{n}", f"tok/s x{n}", 0, "more") for n in load.concurrency]
    if not load.gap:
        return levels
    return [*levels, Column("gap_s", "worst gap s"), Column("long_first_s", "long prompt s")]


def prompt(seed: object, n_words: int = N_WORDS) -> list[Message]:
    return [{"role": "user", "content": words(n_words, seed=seed)}]


def warm_up(target: Target, turn: object) -> None:
    target.chat(prompt(("warm up", turn)), N_REPLY)


def run(
    target: Target, load: Load, *, turn: object, on_part: Callable[[], object] = lambda: None
) -> dict[str, Any]:
    """One round: every level, then the long prompt."""
    result: dict[str, Any] = {}
    for n in load.concurrency:
        result[f"tok_s_{n}"] = at_concurrency(target, n, n_requests=load.n_requests(n), turn=turn)
        on_part()
    if load.gap:
        result |= while_prefilling(target, turn=turn)
        on_part()
    return result


def at_concurrency(target: Target, n_streams: int, *, n_requests: int, turn: object) -> float:
    """Output tokens per second of all streams together."""

    def ask(i: int) -> TimedReply:
        return target.chat(prompt((turn, n_streams, i)), N_REPLY, ignore_eos=True)

    start = time.perf_counter()
    with ThreadPoolExecutor(n_streams) as pool:
        replies = list(pool.map(ask, range(n_requests)))
    return sum(r.n_completion for r in replies) / (time.perf_counter() - start)


def while_prefilling(target: Target, *, turn: object) -> dict[str, float]:
    """The longest pause of any decoder between the long prompt's arrival and its first token."""
    times: list[list[float]] = [[] for _ in range(N_DECODERS)]
    ended = threading.Event()

    def decode(i: int) -> TimedReply:
        def on_piece(now: float) -> None:
            if ended.is_set():
                raise BenchError("the benchmark was stopped")
            times[i].append(now)

        return target.chat(
            prompt((turn, "decoder", i)), N_DECODER_TOKENS, ignore_eos=True, on_piece=on_piece
        )

    with ThreadPoolExecutor(N_DECODERS) as pool:
        try:
            streams = [pool.submit(decode, i) for i in range(N_DECODERS)]
            while min(len(t) for t in times) < N_BEFORE and not any(s.done() for s in streams):
                time.sleep(0.01)
            sent = time.perf_counter()
            reply = target.chat(prompt((turn, "long"), N_LONG_WORDS), 8, ignore_eos=True)
            first = sent + reply.first_s
            for stream in streams:
                stream.result()
        finally:
            ended.set()  # after Ctrl-C or a failure, do not wait for the rest of the replies
    gaps = [longest_gap(t, sent, first) for t in times]
    n_alive = sum(bool(t) and t[-1] >= first for t in times)
    return {
        "gap_s": max(gaps),
        "long_first_s": reply.first_s,
        "long_tokens": reply.n_prompt,
        "decoders_left": n_alive,
    }


def longest_gap(times: Sequence[float], start: float, end: float) -> float:
    """The longest pause that overlaps [start, end)."""
    pairs = pairwise(times)
    return max((b - a for a, b in pairs if b > start and a < end), default=0.0)
