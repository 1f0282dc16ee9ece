"""A client that hangs up frees its row, streaming or not, at every stage of its request."""

from __future__ import annotations

import json
import random
import socket
import threading
from typing import Any

import pytest

from firn.core.values import Job
from tests.api.live import Live, serve
from tests.fakes import FakeTokenizer, Stage

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
    "/v1/completions": {"prompt": ["hello", "there"]},
}


class Client:
    """A client on a socket that can hang up at any moment."""

    def __init__(self, live: Live, path: str, *, stream: bool) -> None:
        body = json.dumps({**BODIES[path], "stream": stream}).encode()
        self.n_jobs = len(BODIES[path].get("prompt", [None]))
        self._socket = socket.create_connection(("127.0.0.1", live.port), timeout=30)
        self._unread = b""
        self.send(
            f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n".encode()
            + body
        )

    def send(self, raw: bytes) -> None:
        self._socket.sendall(raw)

    def read_until(self, text: bytes) -> bytes:
        """What arrived up to the end of this text. Anything after it is kept for the next call."""
        while text not in self._unread:
            piece = self._socket.recv(65536)
            assert piece, self._unread
            self._unread += piece
        end = self._unread.index(text) + len(text)
        seen, self._unread = self._unread[:end], self._unread[end:]
        return seen

    def hang_up(self) -> None:
        self._socket.close()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stage", ["queue", "prefill", "decode"])
def test_hanging_up_frees_the_row(live: Live, stage: Stage, path: str, stream: bool) -> None:
    live.engine.chunk = 1
    live.engine.hold(stage, after=2)
    client = Client(live, path, stream=stream)
    live.engine.wait_for(lambda e: e.n_in(stage) == client.n_jobs)
    if stream:
        client.read_until(b"200 OK")
    client.hang_up()
    live.engine.wait_for(lambda e: len(e.cancelled) == client.n_jobs)
    assert set(live.engine.cancelled) == {job.id for job in live.engine.jobs}
    line = live.log.wait_for("client gone")
    assert path in line
    assert live.n_calls() == 0


def test_other_calls_continue_when_clients_hang_up() -> None:
    tokenizer = FakeTokenizer()
    text = "abcdefghij" * 20

    def reply(job: Job, choice: int) -> list[int]:
        return tokenizer.encode(text, add_special=False)

    with serve(reply=reply, tokenizer=tokenizer) as live:
        live.engine.hold("decode", after=5)
        gone = [Client(live, "/v1/chat/completions", stream=i % 2 == 0) for i in range(10)]
        stays: list[str] = []
        ask = threading.Thread(
            target=lambda: stays.append(
                live.openai().completions.create(model="fake", prompt="a").choices[0].text
            )
        )
        ask.start()
        live.engine.wait_for(lambda e: len(e.jobs) == 11 and e.n_sent() == 55)
        for client in gone:
            client.hang_up()
        live.engine.wait_for(lambda e: len(e.cancelled) == 10)
        live.engine.release("decode")
        ask.join()
        assert stays == [text]


class SlowPrompts:
    """Makes prompts only when the test lets it."""

    def __init__(self, prompts: Any) -> None:
        self._prompts = prompts
        self.begun = threading.Event()
        self.go_on = threading.Event()

    def make(self, source: Any, *, reasoning: Any) -> Any:
        self.begun.set()
        assert self.go_on.wait(30)
        return self._prompts.make(source, reasoning=reasoning)

    def tail(self, prompt: Any) -> str:
        return str(self._prompts.tail(prompt))

    def ends(self, source: Any) -> frozenset[int]:
        return frozenset()


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_may_hang_up_while_its_prompt_is_made(stream: bool) -> None:
    """No job is queued for it."""
    made: list[SlowPrompts] = []

    def wrap(prompts: Any) -> SlowPrompts:
        made.append(SlowPrompts(prompts))
        return made[0]

    with serve(wrap_prompts=wrap) as live:
        client = Client(live, "/v1/chat/completions", stream=stream)
        assert made[0].begun.wait(30)
        client.hang_up()
        live.log.wait_for("client gone")
        made[0].go_on.set()
        assert live.openai().completions.create(model="fake", prompt="a").choices
        assert len(live.engine.jobs) == 1
        assert live.engine.cancelled == []


def test_a_client_may_hang_up_before_its_body_is_whole(live: Live) -> None:
    with socket.create_connection(("127.0.0.1", live.port)) as client:
        client.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b'content-length: 100\r\n\r\n{"prompt":'
        )
    live.log.wait_for("client gone")
    assert live.engine.jobs == []


def test_a_second_request_on_a_connection_is_no_hang_up(live: Live) -> None:
    """A second request sent early does not mean that the client is gone."""
    live.engine.hold("decode", after=2)
    client = Client(live, "/v1/chat/completions", stream=True)
    live.engine.wait_for(lambda e: e.n_sent() == 2)
    body = b'{"prompt": "a"}'
    client.send(
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        b"content-length: %d\r\n\r\n%b" % (len(body), body)
    )
    live.engine.release("decode")
    client.read_until(b"[DONE]")
    client.read_until(b"text_completion")
    assert live.engine.cancelled == []
    client.hang_up()


def test_a_client_that_stops_reading_and_hangs_up_frees_its_row() -> None:
    """The stream is blocked by a full socket; hanging up still frees the row."""
    tokenizer = FakeTokenizer(["x" * 20_000])
    big = tokenizer.vocab_size - 1

    with serve(reply=lambda *_: [big] * 1000, tokenizer=tokenizer) as live:
        live.engine.hold("decode", after=400)  # twice 8 MB: more than the sockets buffer
        client = Client(live, "/v1/completions", stream=True)
        live.engine.wait_for(lambda e: e.n_sent() == 800)
        client.read_until(b"text_completion")
        client.hang_up()
        live.engine.wait_for(lambda e: len(e.cancelled) == 2)


def test_many_hang_ups_leave_nothing_behind() -> None:
    tokenizer = FakeTokenizer()
    pick = random.Random(1)
    with serve(reply=lambda *_: [65] * 100, tokenizer=tokenizer) as live:
        live.engine.chunk = 1
        live.engine.hold("decode", after=50)  # so that no reply ends by itself
        for _ in range(150):
            client = Client(live, pick.choice(list(BODIES)), stream=True)
            mark = pick.choice([None, b"HTTP", b"prefill", b"data:", b"A"])
            if mark is not None:
                client.read_until(mark)
            client.hang_up()
        for _ in range(150):
            live.log.wait_for("client gone")
        assert live.n_calls() == 0
        live.engine.wait_for(lambda e: not any(map(e.n_in, ("queue", "prefill", "decode"))))
        assert live.openai().completions.create(model="fake", prompt="a", max_tokens=1).choices
