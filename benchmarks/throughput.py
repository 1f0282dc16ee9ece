"""Tokens per second, and what decoders feel while a long prompt arrives; firn beside its rivals.

    python benchmarks/throughput.py --servers firn,mlx-lm --model dense

All servers are up the whole time and take short turns, a second or a few, so that a machine that slows
down slows all of them; ratios are taken within a round, where they lie seconds apart. In a round a
server answers different prompts of about 200 tokens at concurrency 1, 4 and 16, 48 tokens each; then
eight streams decode while a prompt of about 4,000 tokens comes in, and the longest pause between two
tokens of any of them counts. `bare` is mlx-lm's own loop without a server.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from report import BenchError, Column, cli, names, numbers, save, table
from servers import Bare, Message, Reply, Server, kind_of, lab, model_folder, words

N_WORDS, N_LONG_WORDS = 44, 890
N_REPLY = 48
N_DECODERS, N_DECODER_TOKENS = 8, 400
N_BEFORE = 10
"""Tokens of every decoder before the long prompt is sent."""


def prompt(seed: object, n_words: int = N_WORDS) -> list[Message]:
    return [{"role": "user", "content": words(n_words, seed=seed)}]


def at_concurrency(server: Server, n_streams: int, *, n_requests: int, turn: object) -> float:
    """Output tokens per second of all streams together."""

    def ask(i: int) -> Reply:
        return server.chat(prompt((turn, n_streams, i)), N_REPLY, ignore_eos=True)

    start = time.perf_counter()
    with ThreadPoolExecutor(n_streams) as pool:
        replies = list(pool.map(ask, range(n_requests)))
    return sum(r.n_completion for r in replies) / (time.perf_counter() - start)


def while_prefilling(server: Server, *, turn: object) -> dict[str, float]:
    """The longest pause of any decoder between the long prompt's arrival and its first token."""
    times: list[list[float]] = [[] for _ in range(N_DECODERS)]

    def decode(i: int) -> Reply:
        return server.chat(
            prompt((turn, "decoder", i)),
            N_DECODER_TOKENS,
            ignore_eos=True,
            on_piece=times[i].append,
        )

    with ThreadPoolExecutor(N_DECODERS) as pool:
        streams = [pool.submit(decode, i) for i in range(N_DECODERS)]
        while min(len(t) for t in times) < N_BEFORE and not any(s.done() for s in streams):
            time.sleep(0.01)
        sent = time.perf_counter()
        reply = server.chat(prompt((turn, "long"), N_LONG_WORDS), 8, ignore_eos=True)
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


@dataclass(frozen=True, slots=True)
class Contest:
    """Everything that is up; one turn after another."""

    servers: dict[str, Server]
    bare: Bare | None
    per_stream: int
    """Requests of each stream in a turn; a single stream has twice as many, for the clock's sake."""

    def warm_up(self) -> None:
        for i in range(3):
            for server in self.servers.values():
                server.chat(prompt(("warm up", i)), N_REPLY)
            self._bare_speed(("warm up", i))

    def speeds(self, n_streams: int, *, turn: int) -> dict[str, float]:
        n = self.per_stream * max(n_streams, 2)
        found = {}
        for name, server in _rotated(self.servers, turn):
            found[name] = at_concurrency(server, n_streams, n_requests=n, turn=turn)
        if self.bare and n_streams == 1:
            found["bare"] = self._bare_speed(turn, n=n)
        return found

    def gaps(self, *, turn: int) -> dict[str, dict[str, float]]:
        found = {}
        for name, server in _rotated(self.servers, turn):
            found[name] = while_prefilling(server, turn=turn)
        if self.bare:
            request = {"kind": "long", "prompt": prompt((turn, "long"), N_LONG_WORDS)}
            found["bare"] = self.bare.ask(request)
        return found

    def _bare_speed(self, turn: object, *, n: int = 1) -> float:
        prompts = [prompt((turn, 1, i)) for i in range(n)]
        request = {"kind": "throughput", "prompts": prompts, "n_tokens": N_REPLY}
        return float(self.bare.ask(request)["tok_s_1"]) if self.bare else 0.0


def _rotated(servers: dict[str, Server], turn: int) -> list[tuple[str, Server]]:
    """Nobody is always first."""
    items = list(servers.items())
    k = turn % len(items)
    return [*items[k:], *items[:k]]


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
    options.add_argument("--rounds", type=int, default=7, help="A B A B ..: turns of each server")
    options.add_argument("--requests", type=int, default=3, help="of each stream in a turn")
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
    names_all = [*args.servers, *([] if args.no_bare else ["bare"])]
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in names_all}
    with contextlib.ExitStack() as running:
        servers = {
            name: running.enter_context(Server.start(name, model, memory_mb=args.memory_mb))
            for name in args.servers
        }
        bare = None if args.no_bare else running.enter_context(Bare.start(model))
        contest = Contest(servers, bare, args.requests)
        contest.warm_up()
        for i in range(args.rounds):
            print(f"round {i + 1} of {args.rounds}", flush=True)
            results: dict[str, dict[str, Any]] = {name: {} for name in names_all}
            for n in args.concurrency:
                for name, speed in contest.speeds(n, turn=i).items():
                    results[name][f"tok_s_{n}"] = speed
            if not args.no_gap:
                for name, gap in contest.gaps(turn=i).items():
                    results[name] |= gap
            for name, result in results.items():
                rounds[name].append(result)
    print()
    title = f"{model.name}, medians of rounds: {args.rounds}"
    print(table(title, columns(args), rounds=rounds, references=["bare"]))
    print("\n".join(["", *versions.values()]))
    out = args.out or lab() / "throughput.json"
    save(out, "throughput", options=vars(args), result={"versions": versions, "rounds": rounds})


if __name__ == "__main__":
    cli(main)
