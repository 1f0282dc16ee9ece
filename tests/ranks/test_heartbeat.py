"""A frozen process closes no connection: the other end can only notice its silence."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from firn.ranks.calls import RankCall
from firn.ranks.heartbeat import N_SILENT, Heartbeat
from firn.ranks.wire import LinkClosed, RankLink, encode
from tests.ranks.test_wire import pair

BEAT_S = 0.02
PATIENT_S = 0.3
"""Long, because a busy machine may delay a process that is not frozen."""
WAIT_S = 60.0
OTHER_END = f"""
import socket, sys, threading
from firn.ranks.heartbeat import Heartbeat
from firn.ranks.wire import RankLink
link = RankLink(socket.create_connection(("127.0.0.1", int(sys.argv[1]))))
link.listen(lambda call: None, lambda: None, name="other")
Heartbeat(link, silent=lambda: None, name="other", beat_s={BEAT_S})
threading.Event().wait()
"""


FOLLOWER = f"""
import logging, socket, sys
from firn.ranks.follower import Follower
from firn.ranks.wire import RankLink
logging.basicConfig()
link = RankLink(socket.create_connection(("127.0.0.1", int(sys.argv[1]))))
follower = Follower(1, link, beat_s={BEAT_S})
follower.begin()
follower.next()
"""


class Watched:
    """Our end of a connection."""

    def __init__(self, link: RankLink, *, beat_s: float = BEAT_S) -> None:
        self.link = link
        self.gone, self.silent = threading.Event(), threading.Event()
        self.calls: list[RankCall] = []
        link.listen(self.calls.append, self.gone.set, name="test")
        self.beat = Heartbeat(link, silent=self.silent.set, name="test", beat_s=beat_s)

    def on_answer(self, nbytes: int) -> None:
        """Wait until this many more bytes have arrived."""
        wanted = self.link.n_received + nbytes
        while self.link.n_received < wanted and not self.silent.is_set():
            threading.Event().wait(BEAT_S)


@contextmanager
def other_end() -> Iterator[tuple[Watched, subprocess.Popen[bytes]]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(WAIT_S)
        port = str(server.getsockname()[1])
        process = subprocess.Popen([sys.executable, "-c", OTHER_END, port])
        try:
            yield Watched(RankLink(server.accept()[0]), beat_s=PATIENT_S), process
        finally:
            process.kill()
            process.wait()


def test_a_frozen_process_is_noticed_and_one_that_runs_is_not() -> None:
    with other_end() as (watched, process):
        watched.beat.watch()
        watched.on_answer(3 * N_SILENT * len(encode(RankCall("alive"))))
        assert not watched.silent.is_set()
        process.send_signal(signal.SIGSTOP)
        assert watched.silent.wait(WAIT_S)
        assert not watched.gone.is_set(), "its connection is open"
        assert watched.calls == [], "a heartbeat is nobody's call"


def test_a_frozen_process_is_noticed_while_a_send_blocks() -> None:
    """Our own sends fill the buffer until one blocks, which must not stop the watching."""
    with other_end() as (watched, process):
        process.send_signal(signal.SIGSTOP)
        full = threading.Thread(target=send_much, args=(watched.link,), daemon=True)
        full.start()
        watched.beat.watch()
        assert watched.silent.wait(WAIT_S)
        assert full.is_alive()


def test_a_follower_ends_when_rank_0_is_frozen() -> None:
    """Rank 0 looks frozen to the follower: it keeps the connection open and sends nothing."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(WAIT_S)
        port = str(server.getsockname()[1])
        command = [sys.executable, "-c", FOLLOWER, port]
        process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        rank_0 = server.accept()[0]
        _, said = process.communicate(timeout=WAIT_S)
        rank_0.close()
    assert process.returncode == 1
    assert "rank 0 has sent nothing for 0.2 s" in said


def send_much(link: RankLink) -> None:
    with contextlib.suppress(LinkClosed):
        link.send(b"x" * (64 << 20))


def test_silence_counts_only_after_watch() -> None:
    near, link = pair()
    watched = Watched(link)
    threading.Event().wait(2 * N_SILENT * BEAT_S)  # like a rank that loads its model
    assert not watched.silent.is_set()
    watched.beat.watch()
    assert watched.silent.wait(WAIT_S)
    near.close()


def test_a_closed_connection_counts_as_gone_not_as_silent() -> None:
    near, link = pair()
    watched = Watched(link)
    watched.beat.watch()
    near.close()
    assert watched.gone.wait(WAIT_S)
    while any(t.name == "firn-watch-test" for t in threading.enumerate()):
        threading.Event().wait(BEAT_S)
    assert not watched.silent.is_set()
