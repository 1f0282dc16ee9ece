"""One model's process, as the front sees it: started, listened to, ended.

It gets orders as lines of JSON on its standard input, and reports in lines on another pipe. The end of
its input means that the front is gone, however that happened: then it ends by itself. It has a session
of its own, so that a Ctrl-C at the terminal reaches the front alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from firn.fleet.catalogue import ModelSpec, to_json

log = logging.getLogger("firn.fleet")

MAX_LINE = 1 << 20
Message = Mapping[str, Any]


class ModelProcess(Protocol):
    """A model's process. `exited` holds its exit code."""

    socket: Path
    exited: asyncio.Future[int]

    def tell(self, message: Message) -> None:
        """Does nothing if it has ended."""
        ...

    def kill(self) -> None: ...


OnMessage = Callable[[Message], None]
Launch = Callable[[ModelSpec, Path, OnMessage], Any]
"""Starts a process; an awaitable ModelProcess. `OnMessage` gets each of its messages, on the asyncio
thread."""


class SpawnedProcess:
    """A real one. Owner: the fleet."""

    def __init__(self, process: asyncio.subprocess.Process, socket: Path) -> None:
        self.socket = socket
        self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._process = process
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def pid(self) -> int:
        return self._process.pid

    def follow(self, reading: int, hear: OnMessage) -> None:
        self._tasks = [
            asyncio.create_task(self._listen(reading, hear)),
            asyncio.create_task(self._wait()),
        ]

    async def _listen(self, reading: int, hear: OnMessage) -> None:
        stream = asyncio.StreamReader(limit=MAX_LINE)
        pipe = os.fdopen(reading, "rb", 0)
        protocol = asyncio.StreamReaderProtocol(stream)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, pipe)
        try:
            while line := await stream.readline():
                hear(json.loads(line))
        except (ValueError, OSError):
            log.exception("a report of process %d cannot be read", self.pid)
        finally:
            transport.close()

    async def _wait(self) -> None:
        code = await self._process.wait()
        with contextlib.suppress(OSError):
            self.socket.unlink(missing_ok=True)
        if not self.exited.done():
            self.exited.set_result(code)

    def tell(self, message: Message) -> None:
        stdin = self._process.stdin
        if stdin is not None and not stdin.is_closing() and not self.exited.done():
            stdin.write(json.dumps(message).encode() + b"\n")

    def kill(self) -> None:
        """At once, with whatever it has started in its session."""
        if not self.exited.done():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)


COMMAND = (sys.executable, "-m", "firn.fleet.worker")


async def launch(
    spec: ModelSpec,
    socket: Path,
    hear: OnMessage,
    *,
    command: Sequence[str] = COMMAND,
) -> SpawnedProcess:
    """Start a model's process. Raises OSError."""
    reading, writing = os.pipe()
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            str(writing),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            pass_fds=(writing,),
            start_new_session=True,
        )
    except OSError:
        os.close(reading)
        raise
    finally:
        os.close(writing)
    child = SpawnedProcess(process, socket)
    child.follow(reading, hear)
    child.tell({"config": json.loads(to_json(spec.config)), "socket": str(socket)})
    return child
