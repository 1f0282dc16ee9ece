"""A follower's process: what it does with signals, and who may join as one."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import threading
from typing import Any, cast

import pytest

from firn import __version__
from firn.ranks import joining
from firn.ranks.calls import RankCall
from firn.ranks.leader import Leader
from firn.ranks.serve import FollowerLoop
from firn.ranks.wire import RankLink, encode

FOLLOW = """
import socket, sys
from firn.ranks.follower import Follower
from firn.ranks.wire import RankLink

follower = Follower(1, RankLink(socket.create_connection(("127.0.0.1", int(sys.argv[1])))))
follower.heed_signals(outlives_terminal=False)
follower.answer("ready")
sys.exit(follower.next().name != "end")
"""


def test_a_closed_terminal_is_passed_on_and_does_not_kill_a_follower() -> None:
    """The system and the shell both send SIGHUP; rank 0 decides when to end."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        process = subprocess.Popen([sys.executable, "-c", FOLLOW, str(server.getsockname()[1])])
        link = RankLink(server.accept()[0])
    try:
        assert link.receive().name == "ready"
        for _ in range(2):
            process.send_signal(signal.SIGHUP)
            assert link.receive().name == "stop"
        link.send(encode(RankCall("end")))
        assert process.wait(60) == 0
    finally:
        process.kill()
        link.close()


class Group:
    """Rank 0 of two, to whose port strangers connect before rank 1 does."""

    size = 2

    def __init__(self) -> None:
        self.connections: list[socket.socket] = []

    def from_first(self, data: bytes) -> bytes:
        host, port, secret = json.loads(data)
        for hello in (b"", b"\x16\x03\x01\x02", encode(RankCall("hello", (1, "guessed", "1")))):
            self.connections.append(socket.create_connection((host, port)))
            self.connections[-1].sendall(hello)
        self.connections.append(socket.create_connection((host, port)))
        self.connections[-1].sendall(encode(RankCall("hello", (1, secret, __version__))))
        return data


def test_a_stranger_that_connects_first_does_not_hold_the_ranks_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("NCCL_HOST_IP", "127.0.0.1")
    monkeypatch.setattr(joining, "GREET_S", 0.1)
    group: Any = Group()
    leaders: list[Leader] = []
    opening = threading.Thread(target=lambda: leaders.append(joining._open(group)), daemon=True)
    opening.start()
    opening.join(30)
    assert leaders, "it waits for a stranger"
    leaders[0].end()
    assert RankLink(group.connections[-1]).receive().name == "end"
    for connection in group.connections:
        connection.close()


class Calls:
    """Has `on_` methods with these names, and records their calls."""

    def __init__(self, *names: str) -> None:
        self.made: list[tuple[Any, ...]] = []
        for name in names:
            setattr(self, f"on_{name}", lambda *args, name=name: self.made.append((name, *args)))

    def compute(self) -> None:
        pass


def test_each_call_reaches_the_one_who_has_it() -> None:
    runner, slices = Calls("launch", "free_memory"), Calls("drop", "write")
    loop = FollowerLoop(cast("Any", None), cast("Any", runner), cast("Any", slices))
    for call in (
        RankCall("launch", (3,)),
        RankCall("drop", ([1],)),
        RankCall("free_memory"),
        RankCall("write", (7,), b"bytes"),
    ):
        loop._make(call)
    assert runner.made == [("launch", 3), ("free_memory",)]
    assert slices.made == [("drop", [1]), ("write", 7, b"bytes")]
    with pytest.raises(AttributeError):
        loop._make(RankCall("nobody's"))
