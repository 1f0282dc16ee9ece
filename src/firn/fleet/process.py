"""A model's process as the front sees it: starts it, sends it orders, reads its reports, ends it.

Orders are lines of JSON on its standard input; reports are lines on another pipe. End of input
means that the front is gone, for whatever reason, and the process ends by itself. It has its own
session, so that Ctrl-C at the terminal reaches only the front.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from firn.core.units import MIB
from firn.fleet.catalogue import ModelSpec, to_json

log = logging.getLogger("firn.fleet")

MAX_LINE_NBYTES = MIB
Message = Mapping[str, Any]


class ModelProcess(Protocol):
    """A model's process. exited: resolves to its exit code."""

    socket: Path
    exited: asyncio.Future[int]

    def tell(self, message: Message) -> None:
        """Does nothing if it has ended."""
        ...

    def kill(self) -> None: ...


OnMessage = Callable[[Message], None]
Task = Literal["serve", "check"]
"""What a process is started for. One that checks only finds out whether the model can be loaded,
without its weights; it reports `checked` or `failed`, and ends."""


class Launch(Protocol):
    def __call__(
        self, spec: ModelSpec, socket: Path, on_message: OnMessage, *, task: Task = "serve"
    ) -> Awaitable[ModelProcess]:
        """Start a process. Raises OSError. on_message: called with each of its messages, on the
        asyncio thread."""
        ...


class SpawnedProcess:
    """A process of the operating system. Owner: the fleet."""

    def __init__(self, process: asyncio.subprocess.Process, socket: Path) -> None:
        self.socket = socket
        self.exited: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self._process = process
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def pid(self) -> int:
        return self._process.pid

    def follow(self, read_fd: int, on_message: OnMessage) -> None:
        self._tasks = [
            asyncio.create_task(self._listen(read_fd, on_message)),
            asyncio.create_task(self._wait()),
        ]

    async def _listen(self, read_fd: int, on_message: OnMessage) -> None:
        stream = asyncio.StreamReader(limit=MAX_LINE_NBYTES)
        pipe = os.fdopen(read_fd, "rb", 0)
        protocol = asyncio.StreamReaderProtocol(stream)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, pipe)
        try:
            while line := await stream.readline():
                on_message(json.loads(line))
        except (ValueError, OSError):
            log.exception(
                "a report from model process %d cannot be read; ignoring all later ones", self.pid
            )
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
        """Kill it and everything else in its process group."""
        if not self.exited.done():
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)


COMMAND = (sys.executable, "-m", "firn.fleet.worker")


async def launch(
    spec: ModelSpec,
    socket: Path,
    on_message: OnMessage,
    *,
    task: Task = "serve",
    command: Sequence[str] = COMMAND,
) -> SpawnedProcess:
    """Start a model's process. Raises OSError."""
    read_fd, write_fd = os.pipe()
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            str(write_fd),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            pass_fds=(write_fd,),
            start_new_session=True,
        )
    except OSError:
        os.close(read_fd)
        raise
    finally:
        os.close(write_fd)
    child = SpawnedProcess(process, socket)
    child.follow(read_fd, on_message)
    child.tell({"task": task, "config": json.loads(to_json(spec.config)), "socket": str(socket)})
    return child
