"""How a server listens: its address, uvicorn with firn's signal handlers, a connection limit."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
from collections.abc import Callable, Iterator
from dataclasses import replace

import uvicorn

from firn.api.http.connections import ConnectionLimits, Connections
from firn.core.errors import SetupError
from firn.host.machine import raise_descriptor_limit
from firn.host.shutdown import ASKED_TWICE, outlives_terminal

RESERVED_FILES = 64
"""Descriptors that are never connections: records being read and written, logs, the model."""

BACKLOG = 2048
"""Connections that the system queues until they are accepted; uvicorn's own default."""


def bind(host: str, port: int) -> socket.socket:
    """Before the model is loaded, so that a used address is reported early. Raises SetupError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
    except OSError as e:
        sock.close()
        raise _not_free(host, port, e) from e
    return sock


def listen(sock: socket.socket) -> None:
    """Accept connections from now on. Raises SetupError.

    Linux lets two servers bind the same address before either listens; then only one of them can.
    """
    try:
        sock.listen(BACKLOG)
    except OSError as e:
        host, port = sock.getsockname()[:2]
        raise _not_free(host, port, e) from e


def _not_free(host: str, port: int, error: OSError) -> SetupError:
    hint = "; choose another with --port" if error.errno == errno.EADDRINUSE else ""
    return SetupError(f"cannot listen on {host} port {port}: {error.strerror or error}{hint}")


class Uvicorn(uvicorn.Server):
    """Leaves signals to firn: uvicorn would raise them again after a clean stop."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    def stop_at_signals(self, begin: Callable[[], None]) -> Callable[[], None]:
        """At the first SIGINT or SIGTERM, or when its terminal is closed, call `begin` and stop serving;
        at the second signal end the process. Returns what stops it without a signal, once."""

        def stop() -> None:
            if self.should_exit:
                os._exit(ASKED_TWICE)
            begin()
            self.should_exit = True

        def stop_once() -> None:
            if not self.should_exit:
                stop()

        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop)
        if not outlives_terminal():  # closing one sends it twice: from the system and the shell
            loop.add_signal_handler(signal.SIGHUP, stop_once)
        return stop_once


def connections() -> Connections:
    """Limited by the number of descriptors, less those for the cache and the model's files."""
    limits = ConnectionLimits()
    n_files = raise_descriptor_limit()
    n_open = n_files - max(RESERVED_FILES, n_files // 4) - limits.n_spare
    n_open = max(n_open, 16)
    limits = replace(limits, max_open=n_open, max_heads=min(limits.max_heads, n_open // 2))
    return Connections(limits)


def address(sock: socket.socket) -> str:
    """The server's URL, as a client would type it."""
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
