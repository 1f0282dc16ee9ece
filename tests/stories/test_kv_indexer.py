"""KV events as another project reads them: NVIDIA Dynamo's indexer, made for vLLM, follows firn.

    pip install ai-dynamo-runtime

Its process subscribes to a real server's events, asks for what it missed, and reports how much of a
prompt each worker has. Its answers are compared with what the server itself would resume from.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest

from firn.api.http.auth import SHARED
from firn.cache.prefix import PrefixCache
from firn.config import CacheConfig, Config, ModelConfig
from firn.engine import EngineParts
from tests import stores
from tests.api.real import Real, serving
from tests.cache.lab import prompt_of
from tests.test_kv_events import free_pair

BLOCK = 16
MODEL = "firn-demo"
WAIT_S = 60.0


def has_indexer() -> bool:
    try:
        return find_spec("dynamo.indexer") is not None
    except ImportError:
        return False


pytestmark = [
    pytest.mark.skipif(not has_indexer(), reason="the package ai-dynamo-runtime is not installed"),
    pytest.mark.skipif(find_spec("zmq") is None, reason="the package pyzmq is not installed"),
]


class Indexer:
    """Dynamo's indexer, in its own process."""

    def __init__(self, client: httpx.Client) -> None:
        self._client = client

    def follow(self, port: int) -> None:
        """Follow the server that publishes events at this port and replays them at the next."""
        self._post(
            "/register",
            {
                "instance_id": 1,
                "model_name": MODEL,
                "block_size": BLOCK,
                "endpoint": f"tcp://127.0.0.1:{port}",
                "replay_endpoint": f"tcp://127.0.0.1:{port + 1}",
            },
        )

    def n_blocks(self, ids: list[int]) -> int:
        """Blocks of a prompt that the server has, according to the indexer."""
        told = self._post("/query", {"model_name": MODEL, "token_ids": ids})
        return int(told["scores"].get("1", {}).get("0", 0)) // BLOCK

    def until(self, what: Callable[[], bool]) -> None:
        until = time.monotonic() + WAIT_S
        while not what():
            assert time.monotonic() < until, self._client.get("/dump").text[:2000]
            time.sleep(0.05)

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        answer = self._client.post(path, json=body)
        answer.raise_for_status()
        return answer.json()


@contextlib.contextmanager
def indexing(log: Path) -> Iterator[Indexer]:
    port = stores.free_port()
    command = [sys.executable, "-m", "dynamo.indexer", "--port", str(port), "--threads", "1"]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, env=dict(os.environ))
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=WAIT_S) as client:
            until = time.monotonic() + WAIT_S
            while True:
                with contextlib.suppress(httpx.TransportError):
                    client.get("/workers")
                    break
                assert time.monotonic() < until, log.read_text()
                assert process.poll() is None, log.read_text()
                time.sleep(0.05)
            yield Indexer(client)
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def publishing(port: int, **cache: Any) -> Iterator[Real]:
    settings = CacheConfig(
        no_ssd_cache=True,
        cache_block_tokens=BLOCK,
        kv_events=f"tcp://127.0.0.1:{port}",
        **cache,
    )
    config = Config(model=ModelConfig(path=MODEL), cache=settings)
    with serving(Path(), config=config) as real:
        yield real


def ask(real: Real, ids: list[int]) -> int:
    """Returns how many tokens were cached."""
    body = {"prompt": ids, "max_tokens": 1, "temperature": 0}
    told = httpx.post(f"{real.url}/v1/completions", json=body, timeout=WAIT_S)
    told.raise_for_status()
    return int(told.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def prompt(seed: int, n: int = 10 * BLOCK + 3) -> list[int]:
    return [(seed * 31 + 7 * i) % 89 + 1 for i in range(n)]


def test_it_knows_what_is_stored_and_what_was_cleared(tmp_path: Path) -> None:
    port = free_pair()
    with publishing(port) as real, indexing(tmp_path / "log") as indexer:
        ask(real, prompt(1))  # before anybody listens, so the indexer has to ask for a replay
        indexer.follow(port)
        ask(real, prompt(2))
        indexer.until(lambda: indexer.n_blocks(prompt(2)) == 10)
        indexer.until(lambda: indexer.n_blocks(prompt(1)) == 10)
        branch = [*prompt(1)[: 4 * BLOCK], *prompt(3)]
        assert indexer.n_blocks(branch) == 4
        assert indexer.n_blocks(prompt(3)) == 0
        assert ask(real, branch) >= 4 * BLOCK
        httpx.delete(f"{real.url}/v1/cache", timeout=WAIT_S).raise_for_status()
        indexer.until(lambda: indexer.n_blocks(prompt(1)) == indexer.n_blocks(branch) == 0)
        ask(real, prompt(1))
        indexer.until(lambda: indexer.n_blocks(prompt(1)) == 10)


def test_a_restart_is_a_new_beginning(tmp_path: Path) -> None:
    """The new process has nothing of what the old one announced, and says so without being asked."""
    port = free_pair()
    with indexing(tmp_path / "log") as indexer:
        with publishing(port) as real:
            ask(real, prompt(4))  # the first batches, which the new process must not repeat
            indexer.follow(port)
            for seed in (1, 2):
                ask(real, prompt(seed))
                indexer.until(lambda seed=seed: indexer.n_blocks(prompt(seed)) == 10)  # type: ignore[misc]
        with publishing(port) as real:
            indexer.until(lambda: indexer.n_blocks(prompt(1)) == indexer.n_blocks(prompt(2)) == 0)
            ask(real, prompt(3))
            indexer.until(lambda: indexer.n_blocks(prompt(3)) == 10)
            assert indexer.n_blocks(prompt(4)) == 0


def test_it_knows_what_was_evicted(tmp_path: Path) -> None:
    port = free_pair()
    seeds = range(1, 25)
    with (
        publishing(port, cache_memory_mb=1) as real,
        indexing(tmp_path / "log") as indexer,
    ):
        indexer.follow(port)
        for seed in seeds:
            ask(real, prompt(seed))
        probes = {seed: n_stored(real, prompt(seed)) for seed in seeds}
        assert probes[seeds[-1]] == 10
        assert probes[seeds[0]] < 10, "it was evicted"
        indexer.until(lambda: {s: indexer.n_blocks(prompt(s)) for s in seeds} == probes)


def n_stored(real: Real, ids: list[int]) -> int:
    """Whole blocks of the prompt that the server itself could resume from."""

    def look(parts: EngineParts) -> int:
        assert isinstance(parts.cache, PrefixCache)
        return parts.cache.probe(prompt_of(ids), SHARED).n_shared

    return real.server.engine.call(look).result(WAIT_S) // BLOCK
