"""The address of a server: which one gets it, and what the other one is told."""

from __future__ import annotations

import contextlib
import socket

import pytest

from firn.core.errors import SetupError
from firn.listener import bind, listen


def test_an_address_that_another_server_listens_at() -> None:
    with contextlib.closing(bind("127.0.0.1", 0)) as first:
        listen(first)
        port = first.getsockname()[1]
        with pytest.raises(
            SetupError, match=f"cannot listen on 127.0.0.1 port {port}: Address .*--port"
        ):
            bind("127.0.0.1", port)


def test_two_servers_that_load_their_models_at_the_same_time() -> None:
    """Linux lets both bind the address until one of them listens."""

    def follow(first: socket.socket, port: int) -> None:
        with contextlib.closing(bind("127.0.0.1", port)) as second:
            listen(first)
            listen(second)

    with contextlib.closing(bind("127.0.0.1", 0)) as first:
        port = first.getsockname()[1]
        with pytest.raises(
            SetupError, match=f"cannot listen on 127.0.0.1 port {port}: Address .*--port"
        ):
            follow(first, port)
