"""What drafting gains: firn with and without it, on text that repeats and text that does not.

    .venv/bin/python benchmarks/speculation.py [--model smollm2] [--rounds 3] [--streams 1,4,8]
        [--beside mlx-lm,mlx-lm-draft,mlx-vlm [--draft FOLDER]]
    PYTHONPATH=src python benchmarks/speculation.py --device-run [--shape 4b] [--streams 1,8]

Two servers of the same model run side by side, `--speculation auto` and `off`, and take turns, so
that a busy machine slows both; `--beside` adds other servers of the lab, among them mlx-lm's with a
draft model (without --draft, the model itself: every guess is right, and costs as much as the
model). Tokens per second are counted from the first token on; a ratio is the median of the rounds'
ratios.

    edit    "return this file with one change": most of the reply is in the prompt
    prose   a story: nothing to look up

`equal` is how many of the replies (greedy) were the same text as with `off`; steps of other shapes
round differently, so a tie may be broken the other way.

`--device-run` needs no server and no download: an engine in this process, a model of random weights, and
an oracle that guesses right with a given probability (see speculation_device.py).

Takes about half an hour on two cores; `--rounds 1 --streams 1` takes three minutes, `--device-run` a few
minutes on an H200.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from report import cli, grid, names, numbers, save
from servers import Server

from firn.assembly import model_names
from firn.demo.server import ServerProcess

START_S = 300.0
TOPICS = (
    "a lighthouse keeper",
    "a lost umbrella",
    "two rival bakers",
    "the last train",
    "a talking fox",
    "a clock that runs backwards",
    "an island without trees",
    "a letter that came too late",
)


def source_file(seed: int) -> str:
    """A Python file such as an agent edits: regular enough to be repeated, no two the same."""
    rng = random.Random(seed)
    names = rng.sample(
        ["width", "height", "depth", "weight", "price", "count", "speed", "angle"], 6
    )
    lines = ["import math", "", ""]
    for name in names:
        low, high = rng.randint(0, 9), rng.randint(100, 999)
        lines += [
            f"def check_{name}({name}: float) -> float:",
            f'    """The {name}, if it lies between {low} and {high}."""',
            f"    if not {low} <= {name} <= {high}:",
            f'        raise ValueError(f"{name} must be between {low} and {high}, not {{{name}}}")',
            f"    return math.floor({name} * {rng.randint(2, 99)}) / {rng.randint(2, 99)}",
            "",
            "",
        ]
    return "\n".join(lines)


def edit(seed: int) -> str:
    text = source_file(seed)
    return (
        f"Here is a file:\n\n```python\n{text}```\n\nReturn the whole file, with one change: the first "
        "function shall be called validate. Return the code and nothing else."
    )


def prose(seed: int) -> str:
    return (
        f"Write a long story about {TOPICS[seed % len(TOPICS)]}. Begin with the year {1700 + seed}."
    )


ASKS = {"edit": edit, "prose": prose}


@dataclass
class Figure:
    rate: float
    texts: list[str] = field(default_factory=list)


async def stream(port: int, body: dict[str, Any]) -> tuple[float, float, int, str]:
    """When the first and the last token arrived, how many there were, and the text."""
    raw = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 24)
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n"
    )
    writer.write(head.encode() + raw)
    first = last = 0.0
    n, n_parts, text = 0, 0, ""
    async for line in reader:
        if not line.startswith(b"data: {"):
            continue
        chunk = json.loads(line[6:])
        delta = chunk["choices"][0]["delta"].get("content") if chunk["choices"] else None
        if delta:
            text += delta
            n_parts += 1
            last = time.perf_counter()
            first = first or last
        if chunk.get("usage"):
            n = chunk["usage"]["completion_tokens"]
    writer.close()
    return first, last, n or n_parts, text


@dataclass(frozen=True)
class Peer:
    """A server under test: its port, and its name for the model."""

    port: int
    model: str = ""


async def measure(peer: Peer, kind: str, *, n_streams: int, n_tokens: int, turn: int) -> Figure:
    def body(i: int) -> dict[str, Any]:
        return {
            "model": peer.model,
            "messages": [{"role": "user", "content": ASKS[kind](1000 * turn + i)}],
            "max_tokens": n_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }

    replies = await asyncio.gather(*(stream(peer.port, body(i)) for i in range(n_streams)))
    began, ended = min(r[0] for r in replies), max(r[1] for r in replies)
    n = sum(r[2] - 1 for r in replies)
    return Figure(n / max(ended - began, 1e-9), [r[3] for r in replies])


async def run(args: argparse.Namespace, peers: dict[str, Peer]) -> None:
    rows = [["", "streams", "server", "tokens/s", "/ off", "worst round", "equal"]]
    result: list[dict[str, Any]] = []
    for kind in ASKS:
        for n_streams in numbers(args.streams):
            by_name: dict[str, list[Figure]] = {name: [] for name in peers}
            for turn in range(args.rounds + 1):
                order = list(peers) if turn % 2 else list(peers)[::-1]
                for name in order:
                    figure = await measure(
                        peers[name], kind, n_streams=n_streams, n_tokens=args.tokens, turn=turn
                    )
                    if turn:  # the first round warms up
                        by_name[name].append(figure)
            for name, figures in by_name.items():
                one = against(figures, by_name["off"])
                rows.append([kind, str(n_streams), name, *one.cells])
                print(" ".join(rows[-1]), flush=True)
                result.append({"kind": kind, "streams": n_streams, "server": name, **vars(one)})
    print(grid(rows))
    if args.out:
        save(args.out, "speculation", options=vars(args), result=result)


@dataclass
class Against:
    """One server's rounds, compared with those without guesses."""

    rate: float
    ratios: list[float]
    n_equal: int
    n_replies: int

    @property
    def cells(self) -> list[str]:
        ratio, worst = statistics.median(self.ratios), min(self.ratios)
        equal = f"{self.n_equal}/{self.n_replies}"
        return [f"{self.rate:.1f}", f"{ratio:.2f}", f"{worst:.2f}", equal]


def against(figures: list[Figure], off: list[Figure]) -> Against:
    texts = [
        (a, b)
        for x, y in zip(figures, off, strict=True)
        for a, b in zip(x.texts, y.texts, strict=True)
    ]
    return Against(
        statistics.median(f.rate for f in figures),
        [f.rate / o.rate for f, o in zip(figures, off, strict=True)],
        sum(a == b for a, b in texts),
        len(texts),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--streams", default="1,4,8")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--beside", default="", help="other servers: mlx-lm, mlx-lm-draft, mlx-vlm")
    parser.add_argument("--draft", type=Path, help="the small model of those that have one")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--device-run", action="store_true")
    parser.add_argument("--shape", default="4b", help="of the model of --device-run: 4b or tiny")
    parser.add_argument("--right", default="0,0.5,0.8,1", help="how often the oracle is right")
    parser.add_argument("--head", action="store_true", help="guesses of a prediction head")
    args = parser.parse_args()
    if args.device_run:
        import speculation_device

        speculation_device.run(args)
        return
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        flags = ("--no-ssd-cache", "--speculation")
        peers: dict[str, Peer] = {}
        for name in ("auto", "off"):
            child = ServerProcess(args.model, *flags, name, log=folder / "log", start_s=START_S)
            stack.callback(child.stop)
            peers[name] = Peer(child.port)
        for name in names(args.beside):
            own = model_names.resolve(args.model)
            server = Server.start(name, own, memory_mb=256, draft=args.draft)
            stack.enter_context(server)
            peers[name] = Peer(server.port, server.target.model)
        asyncio.run(run(args, peers))


if __name__ == "__main__":
    cli(main)
