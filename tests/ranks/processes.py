"""Two real `firn serve --tensor-parallel` processes on loopback, started as mlx.launch would."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from firn.demo.server import _free_port
from firn.ranks import heartbeat
from tests import one_blas

START_S = 120.0
"""Bounds, not expectations: the machine may be busy."""
STOP_S = 60.0
N_RANKS = 2


@dataclass(frozen=True)
class Ranks:
    port: int
    processes: Sequence[subprocess.Popen[bytes]]
    logs: Sequence[Path]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def log(self, rank: int) -> str:
        return self.logs[rank].read_text()

    def stop(self) -> list[int]:
        """Stop rank 0, as a user does; returns the exit codes of all."""
        self.processes[0].send_signal(signal.SIGTERM)
        return self.wait()

    def wait(self) -> list[int]:
        return [p.wait(STOP_S) for p in self.processes]


FIRN = ("-m", "firn")


def impatient(*, beat_s: float = heartbeat.BEAT_S, end_s: float = 1.0) -> tuple[str, str]:
    """A program that gives up a lost rank soon: until then, the other one keeps a core busy."""
    script = (
        f"from firn.ranks import heartbeat; heartbeat.BEAT_S = {beat_s}; "
        f"from firn.ranks import leader; leader.END_S = {end_s}; "
        "from firn.cli import main; main()"
    )
    return "-c", script


def start(model: Path, *flags: str, folder: Path, program: Sequence[str] = FIRN) -> Ranks:
    """folder: holds the logs and the home of these processes."""
    port = _free_port()
    command = (*program, "serve", str(model), "--port", str(port), "--tensor-parallel", *flags)
    return launch(*command, folder=folder, port=port)


def launch(*arguments: str, folder: Path, port: int = 0) -> Ranks:
    """Python with these arguments, once for each rank. port: where rank 0 will listen."""
    folder.mkdir(parents=True, exist_ok=True)
    one_blas.remember(folder / "home")
    hosts = folder / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{_free_port()}"] for _ in range(N_RANKS)]))
    processes, logs = [], []
    for rank in range(N_RANKS):
        log = folder / f"rank-{rank}.log"
        environ = {**os.environ, "MLX_RANK": str(rank), "MLX_HOSTFILE": str(hosts)}
        environ["XDG_CACHE_HOME"] = environ["HOME"] = str(folder / "home")  # a Mac knows HOME only
        with log.open("wb") as f:
            processes.append(
                subprocess.Popen([sys.executable, *arguments], stdout=f, stderr=f, env=environ)
            )
        logs.append(log)
    return Ranks(port, processes, logs)


@contextmanager
def serving(
    model: Path, *flags: str, folder: Path, program: Sequence[str] = FIRN
) -> Iterator[Ranks]:
    ranks = start(model, *flags, folder=folder, program=program)
    try:
        _await(ranks)
        yield ranks
    finally:
        end(ranks)


def end(ranks: Ranks) -> None:
    for process in ranks.processes:
        process.kill()
        process.wait(STOP_S)


def _await(ranks: Ranks) -> None:
    until = time.monotonic() + START_S
    while time.monotonic() < until:
        if any(p.poll() is not None for p in ranks.processes):
            break
        with contextlib.suppress(httpx.TransportError):
            if client().get(f"{ranks.url}/ready").status_code == 200:
                return
        time.sleep(0.05)
    raise AssertionError("\n".join(ranks.log(rank)[-3000:] for rank in range(N_RANKS)))


# --- asking --------------------------------------------------------------------------------


@functools.cache
def client() -> httpx.Client:
    """One client for all requests: making one takes longer than most requests."""
    return httpx.Client(timeout=60, limits=httpx.Limits(max_keepalive_connections=0))


@dataclass(frozen=True)
class Answer:
    text: str
    n_cached: int
    n_prompt: int


def ask(url: str, prompt: str, **more: Any) -> Answer:
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0} | more
    reply = client().post(f"{url}/v1/completions", json=body).json()
    usage = reply["usage"]
    return Answer(
        reply["choices"][0]["text"],
        usage["prompt_tokens_details"]["cached_tokens"],
        usage["prompt_tokens"],
    )
