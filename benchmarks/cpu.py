"""Servers as pip installs them, on this CPU: nothing preloaded, nothing configured.

    python benchmarks/cpu.py --servers firn,mlx-lm --models dense
    python benchmarks/cpu.py --servers firn,mlx-lm,llama.cpp --models smollm2

In a round each server reads a prompt of about 2,000 tokens that it has never seen, writes 48 tokens
after it, and answers short prompts at concurrency 1, 4 and 16. llama.cpp (llama-cpp-python) serves
the GGUF file that smollm2 is made from, unchanged: 4 bits, and one stream at a time.

Takes about two minutes on two cores for the dense model. SmolLM2 takes ten minutes a round, nearly all
of them mlx-lm's.
"""

from __future__ import annotations

import argparse
import contextlib
from pathlib import Path
from typing import Any

from report import BenchError, Column, cli, names, numbers, save, table
from servers import Server, kind_of, lab, model_folder

from firn.bench.client import Message, TimedReply, words
from firn.bench.throughput import at_concurrency

N_TOKENS = 2000
N_REPLY = 48
GGUF = "smollm2.gguf"
"""setup.sh puts it next to the folder that is made from it."""


def long_prompt(seed: object, n_words: int) -> list[Message]:
    return [{"role": "user", "content": words(n_words, seed=seed)}]


def cold(server: Server, n_words: int, *, n_tokens: int, turn: object) -> dict[str, float]:
    """n_tokens: approximate length, for servers that report no counts in a stream."""
    reply = server.chat(long_prompt((turn, "cold"), n_words), N_REPLY, ignore_eos=True)
    return {
        "prompt_tokens": reply.n_prompt,
        "first_s": reply.first_s,
        "prefill_tok_s": (reply.n_prompt or n_tokens) / reply.first_s,
        "decode_tok_s": _decode_speed(reply),
    }


def _decode_speed(reply: TimedReply) -> float:
    """Tokens per second after the first token; a server may send several tokens in one piece."""
    return (reply.n_completion - 1) / max(reply.total_s - reply.first_s, 1e-9)


def words_for(server: Server, n_tokens: int) -> int:
    """How many words make a prompt of `n_tokens`."""
    n_prompt = server.chat(long_prompt("how long", 40), 1).n_prompt
    return max(n_tokens * 40 // max(n_prompt, 1), 1)


def columns(levels: list[int]) -> list[Column]:
    return [
        Column("first_s", "cold first token s"),
        Column("prefill_tok_s", "prefill tok/s", 0, "more"),
        Column("decode_tok_s", "decode behind it tok/s", 1, "more"),
        *(Column(f"tok_s_{n}", f"tok/s x{n}", 0, "more") for n in levels),
    ]


def weights_for(name: str, model: str) -> Path:
    if name != "llama.cpp":
        return model_folder(model)
    path = lab() / "models" / GGUF
    if model != "smollm2" or not path.exists():
        raise BenchError("llama.cpp has smollm2 only: run benchmarks/setup.sh")
    return path


def contest(model: str, args: argparse.Namespace) -> dict[str, list[dict[str, Any]]]:
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in args.servers}
    with contextlib.ExitStack() as running:
        servers = {
            name: running.enter_context(
                Server.start(name, weights_for(name, model), memory_mb=1024, preload=False)
            )
            for name in args.servers
        }
        n_words = words_for(servers[args.servers[0]], args.tokens)
        for server in servers.values():
            server.chat(long_prompt("warm up", 40), N_REPLY, ignore_eos=True)
        for turn in range(args.rounds):
            for name, server in servers.items():
                print(f"{model}: round {turn + 1} of {args.rounds}, {name}", flush=True)
                result = cold(server, n_words, n_tokens=args.tokens, turn=turn)
                for n in args.concurrency:
                    result[f"tok_s_{n}"] = at_concurrency(
                        server.target, n, n_requests=max(n, 2), turn=turn
                    )
                rounds[name].append(result)
    return rounds


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--servers", type=names, default=["firn", "mlx-lm"], metavar="A,B,..")
    options.add_argument("--models", type=names, default=["dense"], metavar="A,B,..")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--tokens", type=int, default=N_TOKENS, help="of the cold prompt")
    options.add_argument("--concurrency", type=numbers, default=[1, 4, 16], metavar="1,4,16")
    options.add_argument("--out", type=Path, help="JSON file (default: cpu.json in the lab)")
    args = options.parse_args()
    versions = {name: kind_of(name).versions() for name in args.servers}
    results = {}
    for model in args.models:
        results[model] = contest(model, args)
        title = f"{model}, as installed, medians of rounds: {args.rounds}"
        print("\n" + table(title, columns(args.concurrency), rounds=results[model]) + "\n")
    print("\n".join(versions.values()))
    out = args.out or lab() / "cpu.json"
    save(out, "cpu", options=vars(args), result={"versions": versions, "rounds": results})


if __name__ == "__main__":
    cli(main)
