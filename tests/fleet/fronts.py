"""A front on a loopback port with real model processes, like `firn serve A B`, but on a thread."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import anthropic
import httpx
import ollama
import openai
import uvicorn

from firn.api.http.connections import Connections, http_config
from firn.config import Config, load
from firn.fleet import server
from firn.fleet.catalogue import ModelCatalogue
from firn.fleet.model import Model
from firn.fleet.placement import ModelState, PlacementRules
from firn.fleet.process import COMMAND, SpawnedProcess, launch
from firn.fleet.relay import WaitLimits

T = TypeVar("T")
GIB = 1 << 30
NEED_GB = 0.375
"""The estimate for a model without weights: its process, and the minimum for its requests."""


@dataclass
class Running:
    parts: server.FrontParts
    port: int
    loop: asyncio.AbstractEventLoop

    def __post_init__(self) -> None:
        self.client, self.plain = self.openai(), self.http()
        """Reused, because making a client takes time."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def openai(self, **options: Any) -> openai.OpenAI:
        options = {"api_key": "unused", "max_retries": 0, "timeout": 60, **options}
        return openai.OpenAI(base_url=f"{self.url}/v1", **options)

    def anthropic(self, **options: Any) -> anthropic.Anthropic:
        options = {"api_key": "unused", "max_retries": 0, "timeout": 60, **options}
        return anthropic.Anthropic(base_url=self.url, **options)

    def ollama(self) -> ollama.Client:
        return ollama.Client(host=self.url, timeout=60)

    def http(self, **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, timeout=60, **options)

    def model(self, name: str) -> Model:
        return self.parts.fleet.models[name]

    def states(self) -> dict[str, str]:
        return {name: model.state.value for name, model in self.parts.fleet.models.items()}

    def pid(self, name: str) -> int:
        child = self.model(name).child
        assert isinstance(child, SpawnedProcess)
        return child.pid

    def kill(self, name: str) -> None:
        os.kill(self.pid(name), signal.SIGKILL)

    def run(self, work: Callable[[], Awaitable[T]]) -> T:
        """Runs `work` on the front's own thread."""

        async def wrapped() -> T:
            return await work()

        return asyncio.run_coroutine_threadsafe(wrapped(), self.loop).result(60)

    def until(self, name: str, state: ModelState) -> None:
        """Wait until the model is in this state."""

        async def wait() -> None:
            while self.model(name).state is not state:
                await asyncio.sleep(0.01)

        self.run(lambda: asyncio.wait_for(wait(), 50))


def config(*models: str, tmp: Path, file: str = "", **flags: Any) -> Config:
    """As the command line would make it, with the cache in the test's folder."""
    given = {
        "cache.ssd_cache_dir": str(tmp / "ssd"),
        "cache.cache_block_tokens": "16",
        "cache.cache_memory_mb": "64",
        "log.level": "warning",
        **flags,
    }
    if models:
        given["model.path"] = models[0]
        given["fleet.models"] = list(models[1:])
    toml = None
    if file:
        toml = tmp / "firn.toml"
        toml.write_text(file)
    return load(given, environ={}, file=toml)


ECHO = (sys.executable, "-I", "-S", str(Path(__file__).with_name("echo_child.py")))


@contextmanager
def fronting(
    config: Config,
    *,
    rules: PlacementRules | None = None,
    waits: WaitLimits | None = None,
    command: Sequence[str] = COMMAND,
) -> Iterator[Running]:
    """command: starts a model's process; ECHO's has no model and starts quickly."""
    up, down = threading.Event(), threading.Event()
    fronts: list[Running] = []

    async def serve(folder: Path) -> None:
        start = functools.partial(launch, command=command)
        catalogue = ModelCatalogue(config)
        parts = server.build(config, catalogue, folder, start=start, rules=rules, waits=waits)
        web = uvicorn.Server(http_config(parts.app, Connections(), port=0, lifespan="off"))
        web.capture_signals = _nothing  # type: ignore[method-assign,assignment]
        running = asyncio.create_task(parts.fleet.run())
        serving = asyncio.create_task(web.serve())
        while not web.started:
            await asyncio.sleep(0.01)
        port = web.servers[0].sockets[0].getsockname()[1]
        fronts.append(Running(parts, port, asyncio.get_running_loop()))
        up.set()
        while not down.is_set():
            await asyncio.sleep(0.02)
        web.should_exit = web.force_exit = True
        await serving
        await parts.fleet.close()
        await running
        parts.pool.close()

    def main() -> None:
        with tempfile.TemporaryDirectory(prefix="firn-") as folder:
            asyncio.run(serve(Path(folder)))

    thread = threading.Thread(target=main, name="front")
    thread.start()
    try:
        assert up.wait(30)
        yield fronts[0]
    finally:
        down.set()
        thread.join(60)
        assert not thread.is_alive()


@contextmanager
def _nothing() -> Iterator[None]:
    yield
