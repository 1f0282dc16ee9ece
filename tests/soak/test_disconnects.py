"""Storms of clients that vanish at any moment leave nothing behind, and others are answered."""

from __future__ import annotations

import json
import random
import socket
import struct
import threading
from pathlib import Path

import httpx
import pytest

from tests.soak.house import (
    N_QUESTIONS,
    SMALL,
    House,
    always_healthy,
    ask,
    at_once,
    held_by,
    let_go_of_everything,
    sessions,
)

N_GONE = 3000
N_AT_ONCE = 8


def vanish(port: int, rng: random.Random, body: dict[str, object]) -> None:
    """Send some or all of a request, read some of the answer, and disconnect, orderly or not."""
    path = rng.choice(["/v1/chat/completions", "/v1/messages", "/v1/responses"])
    raw = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"content-length: {len(raw)}\r\n\r\n"
    ).encode()
    sent = head + raw
    if rng.random() < 0.3:
        sent = sent[: rng.randrange(len(sent))]
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=30) as sock:
            if rng.random() < 0.5:  # a reset instead of an orderly close
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            sock.sendall(sent)
            sock.settimeout(rng.choice([0.001, 0.01, 0.05, 0.2]))
            for _ in range(rng.randrange(6)):
                if not sock.recv(rng.choice([1, 100, 4096])):
                    return
    except OSError:
        return


@pytest.mark.soak
@pytest.mark.parametrize("model", ["firn-demo", "firn-demo-hybrid"])
def test_storms_leave_nothing_behind(tmp_path: Path, model: str) -> None:
    talks = sessions(12)
    with House(tmp_path) as house:
        server = house.start(*SMALL, "--max-concurrency", "8", "--max-queue", "64", model=model)
        for n in range(2):
            assert all(ask(server.url, talk, n).right for talk in talks)
        let_go_of_everything(server)
        before, over = held_by(server), threading.Event()

        def storm(number: int) -> None:
            rng = random.Random(number)
            for _ in range(N_GONE // 2 // N_AT_ONCE):
                talk = rng.choice(talks)
                wanted = {
                    "messages": talk.messages(rng.randrange(N_QUESTIONS)),
                    "input": "hello " * rng.randrange(1, 300),
                    "max_tokens": rng.choice([1, 20, 400]),
                    "stream": rng.random() < 0.7,
                    "n": 1,
                }
                vanish(server.port, rng, wanted)

        def witness(number: int) -> int:
            """Asks all the while, and must get right answers; a full queue is an answer, too."""
            n_right, i = 0, 5 * number
            while not over.is_set():
                i += 1
                talk, n = talks[i % len(talks)], i % N_QUESTIONS
                try:
                    assert ask(server.url, talk, n).right
                    n_right += 1
                except AssertionError as e:
                    if "queue_full" not in str(e):
                        raise
                except httpx.HTTPError as e:
                    raise AssertionError(repr(e)) from e
            return n_right

        with always_healthy(server):
            witnesses: list[int] = []
            watching = threading.Thread(target=lambda: witnesses.extend(at_once(2, witness)))
            watching.start()
            at_once(N_AT_ONCE, storm)
            over.set()
            watching.join()
        assert len(witnesses) == 2, "a witness was not answered rightly"
        assert all(witnesses)
        let_go_of_everything(server)
        after = held_by(server)
        print(f"{N_GONE // 2} gone, {sum(witnesses)} answered meanwhile; {before}, {after}")
        assert after.n_files <= before.n_files + 2
        assert after.n_threads <= before.n_threads + 2
        assert after.rss_mib < before.rss_mib * 1.1 + 24
        assert all(ask(server.url, talk, 0).right for talk in talks)
        assert server.stop() == 0
    assert "Traceback" not in house.log()
