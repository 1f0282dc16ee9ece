"""Real `firn serve` processes on one folder: a common limit, each other's records, a kill -9.

Slow: real servers that start, are killed and start again, and half a second of clients.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from firn.cache.tiers._folder import Disk, FolderLock
from firn.demo.facts import FactSession, make_session
from firn.demo.server import ServerProcess
from tests.cache.tiers.folders import du
from tests.soak.house import House as Servers

GIB = 1 << 30
LIMIT_GIB = 0.0004
"""Room for less than half of the sessions."""
N_SESSIONS = 6
FLAGS = ("--cache-memory-mb", "1", "--cache-block-tokens", "16")


def sessions(n: int) -> list[FactSession]:
    """Sessions with the same questions but different answers."""
    return [
        make_session(i, n_facts=4, n_questions=6, keys_seed=1, kinds=("fact",), placement="system")
        for i in range(n)
    ]


@dataclass(frozen=True)
class Answer:
    right: bool
    n_prompt: int
    n_cached: int


def ask(server: ServerProcess, session: FactSession, n: int) -> Answer:
    body = {"messages": session.messages(n), "temperature": 0, "max_tokens": 64}
    reply = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
    usage = reply["usage"]
    return Answer(
        reply["choices"][0]["message"]["content"] == session.questions[n].answer,
        usage["prompt_tokens"],
        usage["prompt_tokens_details"]["cached_tokens"],
    )


@dataclass(eq=False)
class Gauge:
    """Measures a folder all the time, on its own thread."""

    folder: Path
    samples: list[int] = field(default_factory=list)
    _stop: threading.Event = field(default_factory=threading.Event)

    @contextmanager
    def running(self) -> Iterator[None]:
        thread = threading.Thread(target=self._run)
        thread.start()
        try:
            yield
        finally:
            self._stop.set()
            thread.join()

    def _run(self) -> None:
        lock = FolderLock(Disk(self.folder), timeout_s=30)
        while not self._stop.wait(0.01):  # leaves the lock to the servers
            # Under the lock, nothing is renamed or evicted while we count, but files still grow.
            with lock.hold():
                self.samples.append(du(self.folder))


class House(Servers):
    def start_small(self, *, limit_gib: float = LIMIT_GIB) -> ServerProcess:
        return self.start("--ssd-cache-max-gb", str(limit_gib), *FLAGS)

    @property
    def temps(self) -> list[str]:
        """Names of the files being written."""
        return os.listdir(self.folder / "tmp")

    @staticmethod
    def settle(server: ServerProcess) -> None:
        """Wait until the server has written all its records."""
        until = time.monotonic() + 30
        while time.monotonic() < until:
            found = server.get("/v1/cache/stats")
            if found["ssd"]["records"] >= found["memory"]["records"]:
                return
            time.sleep(0.02)
        raise AssertionError(found)


def talk(
    servers: Sequence[ServerProcess], talks: Sequence[FactSession], *, until: float
) -> list[Answer]:
    """Two clients per server, each asking about all sessions, in different orders."""

    def client(number: int) -> list[Answer]:
        server, found, i = servers[number % len(servers)], [], 7 * number
        while time.monotonic() < until or len(found) < len(talks):
            found.append(ask(server, talks[i % len(talks)], i // len(talks) % 6))
            i += 1
        return found

    n_clients = 2 * len(servers)
    with ThreadPoolExecutor(n_clients) as pool:
        return [a for found in pool.map(client, range(n_clients)) for a in found]


def test_two_servers_under_one_limit(tmp_path: Path) -> None:
    talks = sessions(N_SESSIONS)
    limit = int(LIMIT_GIB * GIB)
    with House(tmp_path) as house:
        one = house.start_small()
        assert ask(one, talks[0], 0).right
        house.settle(one)
        two = house.start_small()
        first = ask(two, talks[0], 0)
        assert first.right
        assert first.n_cached >= first.n_prompt - 16, "what the one has read the other has not"
        gauge = Gauge(house.folder)
        with gauge.running():
            answers = talk([one, two], talks, until=time.monotonic() + 0.5)
        stats = [server.get("/v1/cache/stats") for server in (one, two)]
        assert [server.stop() for server in (one, two)] == [0, 0]
    assert all(a.right for a in answers)
    assert len(gauge.samples) > 20
    assert limit * 0.7 < max(gauge.samples) <= limit
    assert sum(found["ssd"]["folder"]["counts"].get("evictions", 0) for found in stats) > 0
    for found in stats:
        assert found["faults"].keys() <= {"read: not stored"}, "the other one may have evicted it"
    assert du(house.folder) <= limit


def test_killed_in_the_midst_of_a_write(tmp_path: Path) -> None:
    """The first request to the next server hits the whole records, and the torn file is gone."""
    first, *others = sessions(80)
    with House(tmp_path) as house:
        server = house.start_small(limit_gib=1)
        assert ask(server, first, 0).right
        house.settle(server)
        with ThreadPoolExecutor(2) as pool:
            asked = [pool.submit(ask, server, session, 0) for session in others]
            stopped_in_a_write(house, server)
            server.kill()
            for reply in asked:
                reply.cancel()
        torn = set(house.temps)
        assert torn, "it was to be killed in the midst of a write"
        server = house.start_small(limit_gib=1)
        again = ask(server, first, 1)
        assert again.right
        assert again.n_cached >= again.n_prompt * 0.8
        assert server.get("/v1/cache/stats")["tokens"]["by_tier"] == {"ssd": again.n_cached}
        assert torn.isdisjoint(house.temps)
        assert all(ask(server, session, 0).right for session in others[:4])
        stats = server.get("/v1/cache/stats")
        assert stats["faults"] == {}
        assert stats["ssd"]["folder"]["quarantined"] == 0


def stopped_in_a_write(house: House, server: ServerProcess) -> None:
    """Stop the process while a record is being written."""
    pid, until = server._process.pid, time.monotonic() + 30
    while time.monotonic() < until:
        if house.temps:
            os.kill(pid, signal.SIGSTOP)
            os.waitpid(pid, os.WUNTRACED)  # then all of its threads have stopped
            if house.temps:
                return
            os.kill(pid, signal.SIGCONT)
    raise AssertionError("nothing was written")
