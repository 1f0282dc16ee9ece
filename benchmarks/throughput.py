"""Tokens per second, and what decoders feel while a long prompt arrives; firn beside its rivals.

    python benchmarks/throughput.py --servers firn,mlx-lm --model dense

Each round runs every server in turn, so that a machine that slows down slows all of them. A server
answers different prompts of about 200 tokens at concurrency 1, 4 and 16, 48 tokens each; then eight
streams decode while a prompt of about 4,000 tokens comes in, and the longest pause between two tokens of
any of them counts. `bare` is mlx-lm's own loop without a server.
"""

from __future__ import annotations

import argparse
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

from report import BenchError, Column, cli, names, numbers, save, table
from servers import Message, Reply, Server, bare, kind_of, lab, model_folder, words

N_WORDS, N_LONG_WORDS = 44, 890
N_REPLY = 48
N_DECODERS, N_DECODER_TOKENS = 8, 400
N_BEFORE = 10
"""Tokens of every decoder before the long prompt is sent."""


def prompt(seed: object, n_words: int = N_WORDS) -> list[Message]:
    return [{"role": "user", "content": words(n_words, seed=seed)}]


def at_concurrency(server: Server, n_streams: int, *, n_requests: int) -> float:
    """Output tokens per second of all streams together."""

    def ask(i: int) -> Reply:
        return server.chat(prompt((n_streams, i)), N_REPLY, ignore_eos=True)

    start = time.perf_counter()
    with ThreadPoolExecutor(n_streams) as pool:
        replies = list(pool.map(ask, range(n_requests)))
    return sum(r.n_completion for r in replies) / (time.perf_counter() - start)


def while_prefilling(server: Server) -> dict[str, float]:
    """The longest pause of any decoder between the long prompt's arrival and its first token."""
    times: list[list[float]] = [[] for _ in range(N_DECODERS)]

    def decode(i: int) -> Reply:
        return server.chat(
            prompt(("decoder", i)), N_DECODER_TOKENS, ignore_eos=True, on_piece=times[i].append
        )

    with ThreadPoolExecutor(N_DECODERS) as pool:
        streams = [pool.submit(decode, i) for i in range(N_DECODERS)]
        while min(len(t) for t in times) < N_BEFORE and not any(s.done() for s in streams):
            time.sleep(0.01)
        sent = time.perf_counter()
        reply = server.chat(prompt("long", N_LONG_WORDS), 8, ignore_eos=True)
        first = sent + reply.first_s
        for stream in streams:
            stream.result()
    gaps = [_longest_gap(t, sent, first) for t in times]
    n_alive = sum(t[-1] >= first for t in times)
    return {
        "gap_s": max(gaps),
        "long_first_s": reply.first_s,
        "long_tokens": reply.n_prompt,
        "decoders_left": n_alive,
    }


def _longest_gap(times: list[float], start: float, end: float) -> float:
    """The longest pause that overlaps [start, end)."""
    pairs = pairwise(times)
    return max((b - a for a, b in pairs if b > start and a < end), default=0.0)


def run_server(name: str, model: Path, args: argparse.Namespace) -> dict[str, float]:
    with Server.start(name, model, memory_mb=args.memory_mb) as server:
        for i in range(3):  # warm up
            server.chat(prompt(("warm up", i)), N_REPLY)
        result = {"startup_s": server.startup_s}
        for n in args.concurrency:
            speed = at_concurrency(server, n, n_requests=max(args.requests, n))
            result[f"tok_s_{n}"] = speed
        if not args.no_gap:
            result |= while_prefilling(server)
        return result


def run_bare(model: Path, args: argparse.Namespace) -> dict[str, float]:
    request = {
        "kind": "throughput",
        "prompts": [prompt((1, i)) for i in range(args.requests)],
        "long_prompt": prompt("long", N_LONG_WORDS),
        "n_tokens": N_REPLY,
    }
    return bare(model, request)


def columns(args: argparse.Namespace) -> list[Column]:
    levels = [Column(f"tok_s_{n}", f"tok/s x{n}", 0, "more") for n in args.concurrency]
    if args.no_gap:
        return levels
    return [*levels, Column("gap_s", "worst gap s"), Column("long_first_s", "long prompt s")]


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--servers", type=names, default=["firn", "mlx-lm"], metavar="A,B,..")
    options.add_argument("--model", default="dense", help="a model of the lab, or a folder")
    options.add_argument("--rounds", type=int, default=3, help="A B A B ..: turns of each server")
    options.add_argument("--requests", type=int, default=48, help="at each concurrency")
    options.add_argument("--concurrency", type=numbers, default=[1, 4, 16], metavar="1,4,16")
    options.add_argument("--memory-mb", type=int, default=256, help="each server's prefix cache")
    options.add_argument("--no-gap", action="store_true", help="leave out the long prompt")
    options.add_argument("--no-bare", action="store_true", help="leave out mlx-lm's own loop")
    options.add_argument("--out", type=Path, help="JSON file (default: throughput.json in the lab)")
    args = options.parse_args()
    if args.rounds < 1 or args.requests < 1:
        raise BenchError("at least one round and one request, please")
    model = model_folder(args.model)
    versions = {name: kind_of(name).versions() for name in args.servers}
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in args.servers}
    if not args.no_bare:
        rounds["bare"] = []
    for i in range(args.rounds):
        for name, results in rounds.items():
            print(f"round {i + 1} of {args.rounds}: {name}", flush=True)
            result = run_bare(model, args) if name == "bare" else run_server(name, model, args)
            results.append(result)
    print()
    title = f"{model.name}, medians of rounds: {args.rounds}"
    print(table(title, columns(args), rounds=rounds, references=["bare"]))
    print("\n".join(["", *versions.values()]))
    out = args.out or lab() / "throughput.json"
    save(out, "throughput", options=vars(args), result={"versions": versions, "rounds": rounds})


if __name__ == "__main__":
    cli(main)
