"""Tokens per second, and how long replies pause while a long prompt arrives: firn and its rivals.

    python benchmarks/throughput.py --servers firn,mlx-lm --model dense

All servers are up the whole time and take short turns of a few seconds, so that a machine that
slows down slows all of them; ratios are taken within a round, between turns that are only seconds
apart. In a round a server answers different prompts of about 200 tokens at concurrency 1, 4 and 16,
48 tokens each; then eight streams decode while a prompt of about 4,000 tokens arrives, and the
longest pause between two tokens of any of them counts. `bare` is mlx-lm's own loop without a
server.

Takes about four minutes on two cores with two servers.
"""

from __future__ import annotations

import argparse
import contextlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from report import BenchError, cli, names, numbers, save, table
from servers import Bare, Server, kind_of, lab, model_folder

from firn.bench.report import rotated
from firn.bench.throughput import (
    N_LONG_WORDS,
    N_REPLY,
    Load,
    at_concurrency,
    columns,
    prompt,
    warm_up,
    while_prefilling,
)


@dataclass(frozen=True, slots=True)
class Contest:
    """Everything that is running; all take turns."""

    servers: dict[str, Server]
    bare: Bare | None
    load: Load

    def warm_up(self) -> None:
        for i in range(3):
            for server in self.servers.values():
                warm_up(server.target, i)
            self._bare_speed(("warm up", i))

    def speeds(self, n_streams: int, *, turn: int) -> dict[str, float]:
        n = self.load.n_requests(n_streams)
        speeds = {}
        for name, server in rotated(list(self.servers.items()), turn):
            speeds[name] = at_concurrency(server.target, n_streams, n_requests=n, turn=turn)
        if self.bare and n_streams == 1:
            speeds["bare"] = self._bare_speed(turn, n=n)
        return speeds

    def gaps(self, *, turn: int) -> dict[str, dict[str, float]]:
        gaps = {}
        for name, server in rotated(list(self.servers.items()), turn):
            gaps[name] = while_prefilling(server.target, turn=turn)
        if self.bare:
            request = {"kind": "long", "prompt": prompt((turn, "long"), N_LONG_WORDS)}
            gaps["bare"] = self.bare.ask(request)
        return gaps

    def _bare_speed(self, turn: object, *, n: int = 1) -> float:
        prompts = [prompt((turn, 1, i)) for i in range(n)]
        request = {"kind": "throughput", "prompts": prompts, "n_tokens": N_REPLY}
        return float(self.bare.ask(request)["tok_s_1"]) if self.bare else 0.0


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
    load = Load(tuple(args.concurrency), args.requests, gap=not args.no_gap)
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
        contest = Contest(servers, bare, load)
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
    print(table(title, columns(load), rounds=rounds, references=["bare"]))
    print("\n".join(["", *versions.values()]))
    out = args.out or lab() / "throughput.json"
    save(out, "throughput", options=vars(args), result={"versions": versions, "rounds": rounds})


if __name__ == "__main__":
    cli(main)
