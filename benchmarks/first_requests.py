"""How long does a start take, and how long do streams pause for requests of a new kind?

    python benchmarks/first_requests.py --shape 4b        # takes about three minutes on an H200
    python benchmarks/first_requests.py --shape tiny      # a try on any machine

On CUDA, MLX compiles kernels when they are first used. The first start finds none on the machine;
the second finds those of the first. After each start, requests of many kinds follow, most of them
together with a longer, plain stream; the longest pause of any stream counts.
"""

from __future__ import annotations

import argparse
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from cost import folder_of
from report import cli, grid
from servers import Server, words

N_REPLY = 64
BESIDE = 200
"""Tokens of the stream that the others disturb."""
REPEATED = f"{words(30, seed='repeated')}. " * 8
KINDS: dict[str, tuple[dict[str, Any], ...]] = {
    "one stream": ({},),
    "streams that join": ({}, {}, {}),
    "top-p, top-k, min-p": ({"temperature": 0.8, "top_p": 0.9, "top_k": 20, "min_p": 0.01},) * 2,
    "logprobs": ({"logprobs": True, "top_logprobs": 5},),
    "penalties": ({"presence_penalty": 0.5, "frequency_penalty": 0.2, "temperature": 0.8},),
    "logit bias": ({"logit_bias": {"5": 3}},),
    "drafts": ({"prediction": {"type": "content", "content": REPEATED}},),
    "a seed": ({"temperature": 1.0, "seed": 7},) * 2,
}


def pause_s(server: Server, kind: str) -> float:
    """The longest pause of any of the streams."""

    def ask(i: int, n_reply: int, options: dict[str, Any]) -> float:
        text = words(60 + 30 * i, seed=(kind, i, server.startup_s))
        messages = [{"role": "user", "content": text}]
        reply = server.chat(messages, n_reply, ignore_eos=True, **options)
        return max(b - a for a, b in zip(reply.times, reply.times[1:], strict=False))

    alone = kind == next(iter(KINDS))
    calls = [(i, N_REPLY, options) for i, options in enumerate(KINDS[kind])]
    calls += [] if alone else [(len(calls), BESIDE, {})]
    with ThreadPoolExecutor(len(calls)) as pool:
        return max(pool.map(lambda call: ask(*call), calls))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", default="4b")
    parser.add_argument("--memory-mb", type=int, default=4096)
    args = parser.parse_args()
    columns = []
    for name in ("first start", "second start"):
        fresh = name == "first start"
        with Server.start(
            "firn", folder_of(args.shape), memory_mb=args.memory_mb, fresh=fresh
        ) as server:
            pauses = [pause_s(server, kind) for kind in KINDS]
            columns.append([name, f"{server.startup_s:.1f}", *(f"{s:.2f}" for s in pauses)])
            print(" ".join(columns[-1]), flush=True)
    head = ["seconds", "until it answers", *(f"longest pause: {kind}" for kind in KINDS)]
    print(grid([list(row) for row in zip(head, *columns, strict=True)]))


if __name__ == "__main__":
    cli(main)
