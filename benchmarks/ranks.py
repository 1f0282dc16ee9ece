"""What ranks cost a sharded model: calls from rank 0 to another, and what all of them share.

    python benchmarks/ranks.py                 two processes over loopback, on whatever device MLX has
    mlx.launch --hostfile hosts.json -- python benchmarks/ranks.py --rank     on several machines

Prints a table in Markdown. Numbers are medians; a busy machine raises them, but not their ratios.

Takes some seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from firn.ranks.follower import Follower
    from firn.ranks.leader import Leader

N_RANKS = 2
N_TRIES = 300
CHUNK = 2048
WIDTH = 4096


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rank", action="store_true", help="be one of the ranks")
    if parser.parse_args().rank:
        measure()
    else:
        launch()


def launch() -> None:
    with tempfile.TemporaryDirectory() as folder:
        hosts = Path(folder) / "hosts.json"
        hosts.write_text(json.dumps([[f"127.0.0.1:{_free_port()}"] for _ in range(N_RANKS)]))
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "--rank"],
                env={**os.environ, "MLX_RANK": str(rank), "MLX_HOSTFILE": str(hosts)},
            )
            for rank in range(N_RANKS)
        ]
        for rank in ranks:
            rank.wait(300)


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def measure() -> None:
    import mlx.core as mx

    from firn.ranks.joining import form

    member = form()
    tokens = mx.zeros((8,), dtype=mx.int32)
    sums = mx.zeros((8, WIDTH), dtype=mx.float16)

    def share() -> None:
        mx.eval(member.group.share(tokens))

    def add() -> None:
        mx.eval(member.group.add(sums))

    for _ in range(20):
        share()
    if member.follower is not None:
        follow(member.follower, {"share": share, "add": add})
        return
    assert member.leader is not None
    leader = member.leader

    def step() -> None:
        leader.tell("launch", 7)
        leader.tell("collect", 7, 1)

    def prefill() -> None:
        leader.tell("prefill", 7, 0, CHUNK, 4 * CHUNK, None, blob=bytes(4 * CHUNK))

    def cut() -> None:
        for i in range(32):
            leader.tell_later("cut", i, "pages", 7, 0, 4096, 256 * i, 256 * (i + 1))
        leader.flush()

    rows: dict[str, Callable[[], None]] = {
        "a decode step's calls (launch, collect), as rank 0 pays for them": step,
        f"a prefill call with {CHUNK} tokens": prefill,
        "32 payloads cut, noted, and sent": cut,
    }
    print("| what | median | 95th percentile |\n|---|---|---|")
    for name, call in rows.items():
        tell(name, timed(call))
    tell("a call there and an answer back", timed(lambda: there_and_back(leader)))
    leader.tell("share", N_TRIES)
    tell("the newest tokens of 8 rows, shared by MLX: one a step", timed(share))
    leader.tell("add", N_TRIES)
    tell(f"a layer's sums for 8 rows ({WIDTH} wide), by MLX: two a layer", timed(add))
    leader.end()


def there_and_back(leader: Leader) -> None:
    leader.tell("ping")
    leader.gather("pong", timeout_s=10)


def follow(follower: Follower, collectives: Mapping[str, Callable[[], None]]) -> None:
    while (call := follower.next()).name != "end":
        if call.name == "ping":
            follower.answer("pong")
        elif call.name in collectives:
            for _ in range(call.args[0]):
                collectives[call.name]()


def timed(call: Callable[[], object]) -> list[float]:
    took = []
    for _ in range(N_TRIES):
        began = time.perf_counter()
        call()
        took.append(time.perf_counter() - began)
    return sorted(took)


def tell(name: str, took: list[float]) -> None:
    late = took[int(len(took) * 0.95)]
    print(f"| {name} | {statistics.median(took) * 1e6:.0f} µs | {late * 1e6:.0f} µs |", flush=True)


if __name__ == "__main__":
    main()
