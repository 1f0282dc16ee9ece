"""Calls over a socket arrive whole and in order, and the end of the connection is noticed."""

from __future__ import annotations

import queue
import socket
import threading

import pytest

from firn.ranks.calls import RankCall
from firn.ranks.leader import Leader
from firn.ranks.wire import LinkClosed, RankLink, encode

CALLS = [
    RankCall("launch", (7,)),
    RankCall("prefill", (1, None, [2, "x"]), b"\0" * 70_000),
    RankCall("end"),
]


class Slow(socket.socket):
    """Returns at most `n_most` bytes at a time, however many have arrived."""

    n_most = 1 << 30

    def recv(self, bufsize: int, flags: int = 0, /) -> bytes:
        return super().recv(min(bufsize, self.n_most), flags)


def pair(*, n_most: int = 1 << 30) -> tuple[socket.socket, RankLink]:
    """n_most: bytes that the second end receives at a time."""
    server = socket.create_server(("127.0.0.1", 0))
    near = socket.create_connection(server.getsockname())
    accepted, _ = server.accept()
    server.close()
    far = Slow(fileno=accepted.detach())
    far.n_most = n_most
    return near, RankLink(far)


@pytest.mark.parametrize("step", [1, 7, 4096, 1 << 20])
def test_calls_arrive_whole_however_they_are_cut(step: int) -> None:
    near, link = pair(n_most=step)
    calls = CALLS if step > 100 else [CALLS[0], CALLS[2]]
    data = b"".join(map(encode, calls))

    def send() -> None:
        near.sendall(data)
        near.close()

    threading.Thread(target=send, daemon=True).start()
    assert [link.receive() for _ in calls] == calls
    with pytest.raises(LinkClosed):
        link.receive()


def test_answers_wait_for_their_handler() -> None:
    near, link = pair()
    leader = Leader({1: link})
    near.sendall(encode(RankCall("ready", ({"capacity": 3},))))
    assert leader.gather("ready", timeout_s=30)[1].args == ({"capacity": 3},)
    heard: queue.SimpleQueue[RankCall] = queue.SimpleQueue()
    near.sendall(encode(RankCall("seen", ([], []))))
    leader.on_answer("seen", lambda rank, call: heard.put(call))
    assert heard.get(timeout=30).name == "seen"
    leader.end()
    near.close()


def test_deferred_calls_are_sent_before_the_next_call() -> None:
    near, link = pair()
    leader, far = Leader({1: link}), RankLink(near)
    leader.tell_later("cut", 1)
    leader.tell_later("drop", [1])
    leader.tell("launch", 7)
    leader.end()
    assert [far.receive().name for _ in range(4)] == ["cut", "drop", "launch", "end"]
    far.close()
