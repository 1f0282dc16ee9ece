"""Real servers for long runs, seen from outside: over HTTP, in their folder, and in /proc.

Nothing here knows how the cache or the engine works inside.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx

from firn.demo.facts import FactSession, make_session
from firn.demo.server import ServerProcess

T = TypeVar("T")
N_QUESTIONS = 6
SMALL = ("--cache-memory-mb", "1", "--cache-block-tokens", "16")
"""So little memory that most reused tokens come from the disk."""


class House:
    """Servers that share one folder. Use as a context manager: none of them outlives it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "cache"
        self._log = folder / "log"
        self._servers: list[ServerProcess] = []

    def __enter__(self) -> House:
        return self

    def __exit__(self, *exc: object) -> None:
        for server in self._servers:
            server.kill()

    def start(self, *flags: str, model: str = "firn-demo") -> ServerProcess:
        server = ServerProcess(model, "--ssd-cache-dir", str(self.folder), *flags, log=self._log)
        self._servers.append(server)
        return server

    def log(self) -> str:
        return self._log.read_text(errors="replace")

    def records(self) -> list[Path]:
        """The record files of the cache, without those being written or in quarantine."""
        aside = {"tmp", "quarantine"}
        return [
            Path(place) / name
            for place, folders, names in os.walk(self.folder)
            if not aside & set(Path(place).relative_to(self.folder).parts)
            for name in names
            if name.endswith(".safetensors")
        ]


# --- questions with known answers ----------------------------------------------------------


def sessions(n: int, *, n_facts: int = 6, first: int = 0) -> list[FactSession]:
    """Sessions with the same questions but different answers, so that mixing them up is noticed."""
    return [
        make_session(
            first + i,
            n_facts=n_facts,
            n_questions=N_QUESTIONS,
            keys_seed=1,
            kinds=("fact",),
            placement="system",
        )
        for i in range(n)
    ]


@dataclass(frozen=True)
class Answer:
    right: bool
    n_prompt: int
    n_cached: int


def ask(
    url: str, session: FactSession, n: int, *, client: httpx.Client | None = None, **more: Any
) -> Answer:
    body = {"messages": session.messages(n), "temperature": 0, "max_tokens": 64, **more}
    post = client.post if client else httpx.post
    answer = post(f"{url}/v1/chat/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    reply = answer.json()
    usage = reply["usage"]
    return Answer(
        all(c["message"]["content"] == session.questions[n].answer for c in reply["choices"]),
        usage["prompt_tokens"],
        usage["prompt_tokens_details"]["cached_tokens"],
    )


def at_once(n: int, work: Callable[[int], T]) -> list[T]:
    """`work(0)` to `work(n - 1)`, each on its own thread."""
    with ThreadPoolExecutor(n) as pool:
        return list(pool.map(work, range(n)))


# --- what a process holds ------------------------------------------------------------------


@dataclass(frozen=True)
class Held:
    """rss_mib: memory in use, without what MLX's allocator keeps for reuse, which has its own limit
    and grows with the variety of buffer sizes. n_files, n_threads: 0 if there is no /proc."""

    rss_mib: float
    n_files: int
    n_threads: int


def held_by(server: ServerProcess) -> Held:
    pid = server._process.pid
    status = Path(f"/proc/{pid}/status")
    if status.exists():
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines() if ":" in line)
        rss_mib = int(fields["VmRSS"].split()[0]) / 1024 - _kept_mib(server)
        return Held(rss_mib, len(os.listdir(f"/proc/{pid}/fd")), int(fields["Threads"]))
    shown = subprocess.run(["ps", "-o", "rss=", "-p", str(pid)], capture_output=True, text=True)
    return Held(int(shown.stdout) / 1024 - _kept_mib(server), 0, 0)


def _kept_mib(server: ServerProcess) -> float:
    text = httpx.get(f"{server.url}/metrics", timeout=60).text
    (line,) = (x for x in text.splitlines() if x.startswith('firn_mlx_bytes{kind="cached"}'))
    return float(line.split()[-1]) / 2**20


def is_idle(server: ServerProcess) -> bool:
    health = server.get("/health")
    engine = health["engine"]
    return not any([health["calls"], engine["waiting"], engine["prefilling"], engine["decoding"]])


def wait_until(happened: Callable[[], object], *, timeout_s: float = 120.0) -> None:
    until = time.monotonic() + timeout_s
    while not happened():
        assert time.monotonic() < until, "it did not happen"
        time.sleep(0.05)


def let_go_of_everything(server: ServerProcess) -> None:
    """Waits until nothing runs, and nothing that ran still holds a part of the cache."""
    wait_until(lambda: is_idle(server))
    httpx.delete(f"{server.url}/v1/cache", timeout=60).raise_for_status()
    # Records with a lease would have stayed.
    wait_until(lambda: server.get("/v1/cache/stats")["memory"]["records"] == 0)


@contextmanager
def always_healthy(server: ServerProcess) -> Iterator[list[float]]:
    """Calls /health all the while, which must always answer; yields how long each answer took."""
    stop, took, faults = threading.Event(), [], []

    def look() -> None:
        while not stop.wait(0.1):
            began = time.monotonic()
            try:
                httpx.get(f"{server.url}/health", timeout=30).raise_for_status()
                took.append(time.monotonic() - began)
            except httpx.HTTPError as e:
                faults.append(repr(e))

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield took
    finally:
        stop.set()
        thread.join()
    assert faults == []
    assert took


# --- a disk that cannot be trusted ---------------------------------------------------------


class Saboteur:
    """Damages cache files while servers use them. One thread; deterministic except for timing."""

    def __init__(self, house: House, *, seed: int, pause_s: float = 0.002) -> None:
        self._house = house
        self._rng = random.Random(seed)
        self._pause_s = pause_s
        self._stop = threading.Event()
        self.n_done = 0
        self._ways: Sequence[Callable[[Path], object]] = (
            self._flip, self._cut, self._empty, self._exchange, self._remove, self._grow,
        )  # fmt: skip

    @contextmanager
    def at_work(self) -> Iterator[None]:
        thread = threading.Thread(target=self._run)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()

    def _run(self) -> None:
        while not self._stop.is_set():
            files = self._house.records()
            self._rng.shuffle(files)
            for path in files[: max(1, len(files) // 2)]:
                if self._stop.wait(self._pause_s):
                    return
                try:
                    self._rng.choice(self._ways)(path)
                    self.n_done += 1
                except (OSError, ValueError):
                    pass  # it is gone or empty already
            self._stop.wait(self._pause_s)

    def _flip(self, path: Path) -> None:
        with path.open("r+b") as f:
            size = os.fstat(f.fileno()).st_size
            at = self._rng.randrange(size)
            f.seek(at)
            byte = f.read(1)
            f.seek(at)
            f.write(bytes([byte[0] ^ (1 << self._rng.randrange(8))]))

    def _cut(self, path: Path) -> None:
        os.truncate(path, self._rng.randrange(path.stat().st_size))

    def _empty(self, path: Path) -> None:
        os.truncate(path, 0)

    def _grow(self, path: Path) -> None:
        with path.open("ab") as f:
            f.write(self._rng.randbytes(100))

    def _exchange(self, path: Path) -> None:
        """Another record's bytes under this one's name."""
        other = self._rng.choice(self._house.records())
        temp = path.with_suffix(".spoilt")
        shutil.copyfile(other, temp)
        os.replace(temp, path)

    def _remove(self, path: Path) -> None:
        path.unlink()
