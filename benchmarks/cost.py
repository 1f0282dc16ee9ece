"""What the prefix cache costs on a GPU before it helps, and what it gains: servers, side by side.

    python benchmarks/cost.py --shape 4b          # takes about five minutes on an H200
    python benchmarks/cost.py --shape tiny        # a try on any machine

Three servers of one random model stay up and take turns: firn, firn without a cache, mlx-lm's. All
prompts are new, so firn stores everything that it computes while it is measured.

    x1, x8, x32   tokens/s of that many streams, prompts of about 450 tokens, 128 tokens each
    cold          first token of a long prompt that no server has seen
    memory        the same prompt with another question at its end
    disk          the same after a restart, from files that are not in the page cache; with the
                  disk's own speed for a sequential read of as many bytes
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from disks import drop, sequential_s
from report import BenchError, cli, grid, names, numbers, save
from servers import Server, kind_of, lab, words

from models import SHAPES, write_model

N_WORDS, N_REPLY = 95, 128
WORD_TOKENS = 4.6
MEMORY_MB, SSD_GB = 24 << 10, 32
WRITTEN_S, STILL_S = 30.0, 1.0
"""How long a server may write after a round; it is done if its folder is unchanged for STILL_S."""


def folder_of(shape: str) -> Path:
    folder = lab() / "models" / f"shape-{shape}"
    if not (folder / "config.json").exists():
        config, dtype = SHAPES[shape]
        write_model(folder, config, seed=7, dtype=dtype)
    return folder


def tokens_per_s(server: Server, n_streams: int, *, turn: object) -> float:
    def ask(i: int) -> int:
        text = words(N_WORDS, seed=(turn, n_streams, i))
        messages = [{"role": "user", "content": text}]
        return server.chat(messages, N_REPLY, ignore_eos=True).n_completion

    start = time.perf_counter()
    with ThreadPoolExecutor(n_streams) as pool:
        n_tokens = sum(pool.map(ask, range(max(n_streams, 3))))
    return n_tokens / (time.perf_counter() - start)


def first_s(server: Server, n_tokens: int, *, turn: object, question: str) -> tuple[float, int]:
    """Seconds to the first token, and how many tokens were cached."""
    text = words(int(n_tokens / WORD_TOKENS), seed=(turn, "long"))
    messages = [{"role": "user", "content": f"{text}\n{question}"}]
    reply = server.chat(messages, 2, ignore_eos=True)
    return reply.first_s, reply.n_cached


def restarted(model: Path, n_tokens: int, *, turns: int) -> dict[str, float]:
    """First-token times from the files of the last server."""
    by_name: dict[str, list[float]] = {"disk": [], "disk GB/s": [], "of the disk": []}
    folder = lab() / "run" / "firn" / "ssd"
    with Server.start("firn", model, memory_mb=MEMORY_MB, ssd_gb=SSD_GB, fresh=False) as server:
        for turn in range(turns):
            drop([f for f in folder.rglob("*") if f.is_file()])
            before = _bytes_read(server)
            seconds, n_cached = first_s(server, n_tokens, turn=turn, question="After a restart?")
            nbytes = _bytes_read(server) - before
            by_name["disk"].append(seconds)
            if nbytes > 0 and n_cached:
                sequential = sequential_s(lab() / "run", nbytes)
                by_name["disk GB/s"].append(nbytes / sequential / 1e9)
                by_name["of the disk"].append(nbytes / seconds / (nbytes / sequential))
    return {name: statistics.median(values) for name, values in by_name.items() if values}


def _bytes_read(server: Server) -> int:
    import http.client
    import json

    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=10)
    connection.request("GET", "/v1/cache/stats")
    stats = json.loads(connection.getresponse().read())
    connection.close()
    return int(stats.get("ssd", {}).get("bytes_read", 0))


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--shape", choices=list(SHAPES), default="tiny")
    options.add_argument("--servers", type=names, default=["firn", "firn-off", "mlx-lm"])
    options.add_argument("--streams", type=numbers, default=[1, 8, 32])
    options.add_argument("--tokens", type=int, default=16_384, help="of the long prompt")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--out", type=Path, help="JSON file (default: cost.json in the lab)")
    args = options.parse_args()
    for name in args.servers:
        kind_of(name)
    model = folder_of(args.shape)
    rows: dict[str, dict[str, list[float]]] = {name: {} for name in args.servers}
    with contextlib.ExitStack() as running:
        servers = [
            running.enter_context(
                Server.start(name, model, memory_mb=MEMORY_MB, ssd_gb=SSD_GB, preload=False)
            )
            for name in args.servers
        ]
        for i in range(-1, args.rounds):  # the first warms up
            for server in servers if i % 2 else servers[::-1]:
                values = measured(server, args, turn=i)
                shown_values = ", ".join(f"{k} {v:.3g}" for k, v in values.items())
                print(f"round {i + 1} of {args.rounds}, {server.name}: {shown_values}", flush=True)
                for name, value in values.items():
                    if i >= 0:
                        rows[server.name].setdefault(name, []).append(value)
    medians = {
        name: {k: statistics.median(v) for k, v in row.items()} for name, row in rows.items()
    }
    if "firn" in medians:
        medians["firn"] |= restarted(model, args.tokens, turns=args.rounds)
    print("\n" + shown(medians))
    save(args.out or lab() / "cost.json", "cost", options=vars(args), result={"servers": medians})


def measured(server: Server, args: argparse.Namespace, *, turn: int) -> dict[str, float]:
    def cold_s() -> float:
        return first_s(server, args.tokens, turn=turn, question="What is it about?")[0]

    cells: dict[str, Callable[[], float]] = {
        f"x{n}": partial(tokens_per_s, server, n, turn=turn) for n in args.streams
    }
    cells["cold"] = cold_s
    values = {}
    for name, measure in cells.items():
        try:
            values[name] = measure()
        except BenchError as error:
            if server.name.startswith("firn"):
                raise
            print(f"{server.name}, {name}: {error}", flush=True)  # its cell stays empty
    if server.name == "firn":
        time.sleep(1.0)  # everything it has computed is stored by then
        values["memory"], n_cached = first_s(
            server, args.tokens, turn=turn, question="Who wrote it?"
        )
        if n_cached < 0.9 * args.tokens * 0.9:
            raise BenchError(f"only {n_cached} tokens were cached")
        wait_until_written(server)
    return values


def wait_until_written(server: Server) -> None:
    """Waits for pending writes, which would slow down the next server."""
    until, before = time.monotonic() + WRITTEN_S, -1
    while time.monotonic() < until and before != (before := server.disk_nbytes()):
        time.sleep(STILL_S)


def shown(medians: dict[str, dict[str, float]]) -> str:
    columns = list(dict.fromkeys(key for row in medians.values() for key in row))
    table = [["", *columns]]
    for name, row in medians.items():
        table.append([name, *(f"{row[k]:.3g}" if k in row else "" for k in columns)])
    ours = medians.get("firn", {})
    for name, row in medians.items():
        if name != "firn" and ours:
            cells = [f"{ours[k] / row[k]:.2f}" if k in row and k in ours else "" for k in columns]
            table.append([f"firn / {name}", *cells])
    return grid(table)


if __name__ == "__main__":
    cli(main)
