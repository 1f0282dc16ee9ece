"""What the front process of several models costs: first tokens and tokens/s with it and without it.

    .venv/bin/python benchmarks/front.py [--model firn-demo] [--rounds 5] [--streams 16]

Two servers of the same model run side by side: one process (`alone`), and a front with the model's
process behind it (`fronted`). They take turns, so that a busy machine slows both; figures are
medians of the rounds, and the ratio is the median of the rounds' ratios.

    first ms   p50 of a short prompt's first token, one request at a time
    large ms   the same with a body of --body-kb, all of it cached: what reading the body twice costs
    tokens/s   of --streams concurrent streams

On Linux it also prints the processor time of the front, per request and per further token, which
says more than the clock on a busy machine.

Takes about a minute on two cores.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from firn.demo.server import ServerProcess

N_REQUESTS = 30
N_REPLY = 64


@dataclass(frozen=True)
class Figures:
    first_ms: float
    large_ms: float
    rate: float


async def stream(port: int, body: bytes) -> tuple[float, float, int]:
    """Seconds to the first token, total seconds, and the number of tokens."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    began = time.perf_counter()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    writer.write(head.encode() + body)
    first, n = 0.0, 0
    while piece := await reader.read(65536):
        n_new = piece.count(b'"content":"') - piece.count(b'"content":""')
        if n_new and not n:
            first = time.perf_counter() - began
        n += n_new
    writer.close()
    return first, time.perf_counter() - began, n


def body(model: str, text: str, *, n: int) -> bytes:
    messages = [{"role": "user", "content": text}]
    asked = {"model": model, "messages": messages, "max_tokens": n, "temperature": 0}
    return json.dumps({**asked, "stream": True, "ignore_eos": True}).encode()


async def measure(server: ServerProcess, model: str, *, streams: int, large: str) -> Figures:
    short, long = body(model, "Hello!", n=1), body(model, large, n=1)
    firsts = [(await stream(server.port, short))[0] for _ in range(N_REQUESTS)]
    larges = [(await stream(server.port, long))[0] for _ in range(N_REQUESTS // 3)]
    asked = [body(model, f"Hello number {i}!", n=N_REPLY) for i in range(streams)]
    began = time.perf_counter()
    replies = await asyncio.gather(*(stream(server.port, one) for one in asked))
    rate = sum(n for _, _, n in replies) / (time.perf_counter() - began)
    return Figures(1e3 * statistics.median(firsts), 1e3 * statistics.median(larges), rate)


def cpu_s(pid: int) -> float:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def processor_time(server: ServerProcess, model: str, *, streams: int) -> tuple[float, float]:
    """Processor seconds of the front: per request, and per further token."""
    pid, short = server.pid, body(model, "Hello!", n=1)
    before = cpu_s(pid)
    for _ in range(200):
        await stream(server.port, short)
    request_s = (cpu_s(pid) - before) / 200
    asked = [body(model, f"Hello number {i}!", n=256) for i in range(streams)]
    before = cpu_s(pid)
    replies = await asyncio.gather(*(stream(server.port, one) for one in asked))
    n_tokens = sum(n for _, _, n in replies)
    return request_s, max(cpu_s(pid) - before - streams * request_s, 0.0) / n_tokens


async def run(
    alone: ServerProcess,
    fronted: ServerProcess,
    model: str,
    *,
    rounds: int,
    streams: int,
    large: str,
) -> None:
    by_name: dict[str, list[Figures]] = {"alone": [], "fronted": []}
    servers = (("alone", alone), ("fronted", fronted))
    for i in range(rounds + 1):
        for name, server in servers if i % 2 else servers[::-1]:
            figures = await measure(server, model, streams=streams, large=large)
            if i:  # the first round warms up
                by_name[name].append(figures)
    print(f"{'':8} {'first ms':>9} {'large ms':>9} {'tokens/s':>9}")
    for name, rows in by_name.items():
        cells = [statistics.median(values) for values in zip(*map(_cells, rows), strict=True)]
        print(f"{name:8} {cells[0]:9.2f} {cells[1]:9.2f} {cells[2]:9.1f}")
    pairs = list(zip(by_name["alone"], by_name["fronted"], strict=True))
    later = statistics.median(b.first_ms - a.first_ms for a, b in pairs)
    large_later = statistics.median(b.large_ms - a.large_ms for a, b in pairs)
    ratio = statistics.median(b.rate / a.rate for a, b in pairs)
    if Path("/proc/self/stat").exists():
        request_s, token_s = await processor_time(fronted, model, streams=streams)
        print(f"the front takes {1e3 * request_s:.2f} ms a request, {1e6 * token_s:.0f} us a token")
    print(
        f"first token {later:+.2f} ms, with a large body {large_later:+.2f} ms; tokens/s x {ratio:.3f}"
    )


def _cells(figures: Figures) -> tuple[float, float, float]:
    return figures.first_ms, figures.large_ms, figures.rate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="firn-demo")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--body-kb", type=int, default=40)
    args = parser.parse_args()
    name = args.model.rstrip("/").split("/")[-1]
    large = "The price of a clock. " * (args.body_kb * 1024 // 22)
    with tempfile.TemporaryDirectory() as folder:
        log, flags = Path(folder) / "log", ("--no-ssd-cache", "--keep-alive", "-1")
        alone = ServerProcess(args.model, "--no-ssd-cache", log=log)
        fronted = ServerProcess(args.model, *flags, log=log)
        try:
            job = run(alone, fronted, name, rounds=args.rounds, streams=args.streams, large=large)
            asyncio.run(job)
        finally:
            alone.stop()
            fronted.stop()


if __name__ == "__main__":
    main()
