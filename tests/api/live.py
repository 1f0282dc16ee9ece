"""A real uvicorn on a loopback port, with a fake engine behind the real app."""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import anthropic
import openai
import uvicorn

from firn.api.calls.event_router import EventRouter
from firn.api.calls.quotas import Quotas
from firn.api.http.auth import Keys
from firn.api.http.connections import Connections, http_config
from firn.api.http.hosts import Hosts
from firn.api.server import create_app
from firn.api.services import Access, ApiLimits, Services
from firn.core.fair_pool import FairPool
from firn.core.values import Job
from firn.text.prompt.maker import PromptMaker
from firn.text.reply.formats import PLAIN, ReplyFormat
from tests.fakes import FakeEngine, FakeTokenizer

GREETING = "Hello, world! Grüße, 世界."


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = threading.Event()
        self.loop: asyncio.AbstractEventLoop | None = None

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        self.loop = asyncio.get_running_loop()
        self.up.set()


class LogLines(logging.Handler):
    """Every line the server logs, for tests that wait for one."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.lines: queue.Queue[str] = queue.Queue()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)
        self.lines.put(record.getMessage())

    def wait_for(self, text: str) -> str:
        while text not in (line := self.lines.get(timeout=30)):
            pass
        return line


@dataclass
class Live:
    """A running server and the fakes inside it."""

    engine: FakeEngine
    tokenizer: Any
    event_router: EventRouter
    log: LogLines
    port: int
    server: _Server

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def openai(self, *, api_key: str = "unused", **options: Any) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, timeout=60, **options
        )

    def anthropic(self, *, api_key: str = "unused", **options: Any) -> anthropic.Anthropic:
        return anthropic.Anthropic(
            base_url=self.url, api_key=api_key, max_retries=0, timeout=60, **options
        )

    def async_openai(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(
            base_url=f"{self.url}/v1", api_key="unused", max_retries=0, timeout=60
        )

    @property
    def prompt(self) -> str:
        """The last prompt that the engine was given, as text."""
        return str(self.tokenizer.decode(self.engine.jobs[-1].prompt.ids.tolist()))

    def n_calls(self) -> int:
        seen: list[int] = []
        self.on_loop(lambda: seen.append(self.event_router.n_calls))
        return seen[0]

    def on_loop(self, work: Any, *args: Any) -> None:
        """Run `work` on the asyncio thread, and wait until it is done."""
        done = threading.Event()

        def call() -> None:
            work(*args)
            done.set()

        assert self.server.loop is not None
        self.server.loop.call_soon_threadsafe(call)
        assert done.wait(30)


@contextmanager
def serve(
    *,
    reply: Any = None,
    tokenizer: Any = None,
    limits: ApiLimits | None = None,
    context_length: int = 4096,
    wrap_prompts: Any = lambda prompts: prompts,
    reply_format: ReplyFormat = PLAIN,
    connections: Connections | None = None,
    port: int = 0,
    event_router: EventRouter | None = None,
    keys: Keys | None = None,
    hosts: Hosts | None = None,
    allow_origins: tuple[str, ...] = (),
    quotas: Quotas | None = None,
    **options: Any,
) -> Iterator[Live]:
    """port: 0 for any free port."""
    tokenizer = tokenizer or FakeTokenizer()
    event_router = event_router or EventRouter()

    def greet(job: Job, choice: int) -> list[int]:
        return tokenizer.encode(GREETING, add_special=False)

    engine = FakeEngine(
        event_router.publish,
        reply or greet,
        vocab_size=getattr(tokenizer, "vocab_size", 0) or tokenizer.n_ids,
        context_length=context_length,
    )
    log = LogLines()
    logger = logging.getLogger("firn.api")
    logger.addHandler(log)
    logger.setLevel(logging.DEBUG)
    with closing(FairPool(3, name="pool")) as pool:
        prompts = PromptMaker(
            tokenizer,
            context_length=context_length,
            n_ids=engine.model.n_ids,
            tool_format=reply_format.tool,
        )
        app = create_app(
            Services(
                engine=engine,
                tokenizer=tokenizer,
                prompts=wrap_prompts(prompts),
                reply_format=reply_format,
                event_router=event_router,
                pool=pool,
                limits=limits or ApiLimits(),
                access=Access(keys or Keys(), hosts or Hosts(), allow_origins, quotas or Quotas()),
                **options,
            )
        )
        server = _Server(http_config(app, connections or Connections(), port=port))
        thread = threading.Thread(target=server.run, name="uvicorn")
        thread.start()
        try:
            assert server.up.wait(30)
            port = server.servers[0].sockets[0].getsockname()[1]
            yield Live(engine, tokenizer, event_router, log, port, server)
        finally:
            server.should_exit = True
            server.force_exit = True
            thread.join()
            engine.stop()
            logger.removeHandler(log)
