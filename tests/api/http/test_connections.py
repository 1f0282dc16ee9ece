"""Incomplete requests, slow bodies, clients that do not read: none stays connected for long."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import httpx
import pytest
from uvicorn.server import ServerState

from firn.api.http import connections as module
from firn.api.http.auth import Keys
from firn.api.http.connections import Connection, ConnectionLimits, Connections, http_config
from firn.api.services import ApiLimits
from tests.api.live import Live, serve
from tests.waiting import wait_until

HEAD = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
BODY = json.dumps({"prompt": "hello", "max_tokens": 2}).encode()
LONG_S = 3600.0


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sweep often: the deadlines of these tests are tenths of a second."""
    monkeypatch.setattr(module, "SWEEP_S", 0.02)


class Observed(Connections):
    """Signals that a connection has ended."""

    def __init__(self, limits: ConnectionLimits) -> None:
        super().__init__(limits)
        self.removed = threading.Event()

    def remove(self, connection: Connection) -> None:
        super().remove(connection)
        self.removed.set()


@contextmanager
def limited(*, keys: Keys | None = None, **limits: float) -> Iterator[Live]:
    patient = {"head_s": LONG_S, "body_s": LONG_S, "drain_s": LONG_S, "stall_s": LONG_S}
    all_limits = ConnectionLimits(**{**patient, **limits})  # type: ignore[arg-type]
    with serve(connections=Connections(all_limits), keys=keys or Keys()) as live:
        yield live


def stream(key: str, *, more: bytes = b"") -> bytes:
    """A request of this key for a stream."""
    body = json.dumps({"prompt": "a", "stream": True}).encode()
    head = HEAD + b"x-api-key: %b\r\n" % key.encode()
    return head + b"content-length: %d\r\n\r\n%b" % (len(body), body) + more


def connect(live: Live, sent: bytes = b"") -> socket.socket:
    sock = socket.create_connection(("127.0.0.1", live.port), timeout=30)
    sock.sendall(sent)
    return sock


def answer(sock: socket.socket) -> bytes:
    """Everything until the server closes; b"" if it closed without an answer."""
    received = b""
    try:
        while piece := sock.recv(65536):
            received += piece
    except ConnectionResetError:
        pass
    return received


def is_healthy(live: Live) -> bool:
    return httpx.get(f"{live.url}/health", timeout=30).status_code == 200


# --- deadlines -----------------------------------------------------------------------------


@pytest.mark.parametrize("sent", [b"", b"P", HEAD, HEAD + b"content-le"])
def test_a_head_that_never_ends_is_not_waited_for(sent: bytes) -> None:
    with limited(head_s=0.1) as live, connect(live, sent) as sock:
        assert answer(sock).startswith(b"HTTP/1.1 408")
        assert is_healthy(live)


def test_a_slow_head_within_its_time_is_answered() -> None:
    with limited(head_s=LONG_S) as live, connect(live, HEAD) as sock:
        assert is_healthy(live)
        sock.sendall(b"connection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(BODY), BODY))
        assert answer(sock).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "sent",
    [
        HEAD + b"content-length: 100\r\n\r\n",
        HEAD + b"content-length: 100\r\n\r\n{",
        HEAD + b"transfer-encoding: chunked\r\n\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\n1\r\n{\r\n",
        HEAD + b"transfer-encoding: chunked\r\n\r\nffff",
    ],
)
def test_a_body_that_never_ends_is_not_waited_for(sent: bytes) -> None:
    with limited(body_s=0.1) as live, connect(live, sent) as sock:
        assert answer(sock).startswith(b"HTTP/1.1 408")
        assert live.n_calls() == 0
        assert is_healthy(live)


def test_a_slow_body_that_keeps_arriving_is_answered() -> None:
    """However slow it is: what has arrived extends its time."""
    with limited(body_s=0.0, body_nbytes_per_s=1) as live, connect(live, HEAD) as sock:
        sock.sendall(b"connection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(BODY), BODY[:-1]))
        assert is_healthy(live)  # some sweeps later
        assert is_healthy(live)
        sock.sendall(BODY[-1:])
        assert answer(sock).startswith(b"HTTP/1.1 200")


def test_a_refused_client_may_not_keep_sending_its_body() -> None:
    limits = ConnectionLimits(drain_s=0.1)
    with (
        serve(keys=Keys(["secret"]), connections=Connections(limits)) as live,
        connect(live, HEAD + b"content-length: 1000000\r\n\r\n{") as sock,
    ):
        assert answer(sock).startswith(b"HTTP/1.1 401")


def test_a_client_that_does_not_read_is_cut_off() -> None:
    connections = Observed(ConnectionLimits(stall_s=0.2))
    with serve(connections=connections) as live:
        live.engine.reply = lambda job, choice: [97] * 4000
        body = json.dumps({"prompt": "a", "stream": True, "max_tokens": 4000}).encode()
        request = HEAD + b"content-length: %d\r\n\r\n%b" % (len(body), body)
        with connect(live) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.sendall(request * 20)  # pipelined, and none of the answers is read
            assert connections.removed.wait(30)
        assert is_healthy(live)
        wait_until(lambda: not live.n_calls())


class Wire(asyncio.Transport):
    """Discards what is written."""

    def write(self, data: object) -> None:
        pass

    def get_extra_info(self, name: str, default: object = None) -> object:
        return default

    def is_closing(self) -> bool:
        return False

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


def connection_by(clock: list[float], **limits: float) -> Connection:
    """An open connection that uses the test's clock. Needs a running loop."""
    all_limits = ConnectionLimits(**limits)  # type: ignore[arg-type]
    connections = Connections(all_limits, clock=lambda: clock[0])

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await asyncio.Event().wait()

    config = http_config(app, connections)
    config.load()
    made = Connection(config, ServerState(), {}, connections=connections)
    made.connection_made(Wire())
    return made


def test_a_large_body_gets_time_by_what_has_arrived() -> None:
    async def look() -> None:
        clock = [0.0]
        made = connection_by(clock, body_s=20.0, body_nbytes_per_s=100)
        made.data_received(HEAD + b"content-length: 10000\r\n\r\n" + b" " * 500)
        assert not made.is_late(24.9), "500 bytes are five seconds"
        assert made.is_late(25.1)

    asyncio.run(look())


def test_a_client_that_reads_again_has_not_stalled() -> None:
    async def look() -> None:
        clock = [0.0]
        made = connection_by(clock, stall_s=60.0, head_s=LONG_S)
        made.pause_writing()
        assert made.is_late(60.1)
        clock[0] = 50.0
        made.resume_writing()
        assert not made.is_late(200.0)
        made.pause_writing()
        assert not made.is_late(110.0), "counted from its last silence"
        assert made.is_late(110.1)

    asyncio.run(look())


# --- how many ------------------------------------------------------------------------------


def test_half_sent_heads_do_not_keep_others_out() -> None:
    """The oldest are closed: honest clients have sent their whole head."""
    with limited(max_open=8, max_heads=4, n_spare=2) as live, ExitStack() as held:
        socks = [held.enter_context(connect(live, HEAD)) for _ in range(40)]
        assert answer(socks[0]) == b""
        for _ in range(3):
            assert is_healthy(live)
            reply = httpx.post(f"{live.url}/v1/completions", content=BODY, headers=JSON)
            assert reply.status_code == 200
            held.enter_context(connect(live, HEAD))


JSON = {"content-type": "application/json"}


def test_idle_connections_make_room() -> None:
    with limited(max_open=4, n_spare=0) as live, ExitStack() as held:
        for _ in range(12):
            client = held.enter_context(httpx.Client())
            assert client.get(f"{live.url}/health", timeout=30).status_code == 200


def test_a_full_server_still_answers_health_checks() -> None:
    with limited(max_open=3, n_spare=2, keys=Keys(["a", "b"])) as live, ExitStack() as held:
        live.engine.hold("decode")
        socks = [held.enter_context(connect(live, stream(key))) for key in "aab"]
        live.engine.wait_for(lambda engine: engine.n_in("decode") == 3)
        refused = httpx.post(
            f"{live.url}/v1/completions", content=BODY, headers=JSON | {"x-api-key": "b"}
        )
        assert refused.status_code == 503
        assert refused.headers["retry-after"] == "1"
        assert refused.json()["error"]["code"] == "overloaded"
        assert is_healthy(live)
        assert httpx.get(f"{live.url}/ready").status_code == 200
        live.engine.release("decode")
        for sock in socks:
            assert sock.recv(12) == b"HTTP/1.1 200"


def test_a_connection_beyond_all_places_is_closed_at_once() -> None:
    with limited(max_open=2, n_spare=0, keys=Keys(["a", "b"])) as live, ExitStack() as held:
        live.engine.hold("decode")
        for key in "ab":
            held.enter_context(connect(live, stream(key)))
        live.engine.wait_for(lambda engine: engine.n_in("decode") == 2)
        with connect(live) as sock:
            assert answer(sock) == b""
        live.engine.release("decode")


def test_closed_connections_are_forgotten() -> None:
    connections = Connections()
    with serve(connections=connections) as live:
        for sent in (b"", HEAD, b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"):
            connect(live, sent).close()
        assert is_healthy(live)
        while connections.n_open > 0:
            live.on_loop(lambda: None)


def test_one_key_cannot_take_all_connections() -> None:
    with limited(max_open=8, keys=Keys(["a", "b"])) as live, ExitStack() as held:
        live.engine.hold("decode")
        socks = [held.enter_context(connect(live, stream("a"))) for _ in range(4)]
        live.engine.wait_for(lambda engine: engine.n_in("decode") == 4)
        with connect(live, stream("a", more=b"")) as refused:
            assert refused.recv(12) == b"HTTP/1.1 503"
        other = held.enter_context(connect(live, stream("b")))
        live.engine.wait_for(lambda engine: engine.n_in("decode") == 5)
        live.engine.release("decode")
        for sock in (*socks, other):
            assert sock.recv(12) == b"HTTP/1.1 200"


def test_refused_clients_that_keep_sending_make_room() -> None:
    """They have no key, and so no place that anybody must wait for."""
    with limited(max_open=4, n_spare=0, keys=Keys(["a"])) as live, ExitStack() as held:
        for _ in range(12):
            sock = held.enter_context(connect(live, HEAD + b"content-length: 1000000\r\n\r\n{"))
            assert sock.recv(12) == b"HTTP/1.1 401"
        assert is_healthy(live)


def test_clients_that_do_not_read_what_needs_no_key_make_room() -> None:
    with limited(max_open=4, n_spare=0, keys=Keys(["a"])) as live, ExitStack() as held:
        page = b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n" * 2000
        for _ in range(4):
            sock = held.enter_context(socket.socket())
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(("127.0.0.1", live.port))
            sock.settimeout(5)
            with contextlib.suppress(TimeoutError):
                sock.sendall(page)
        wait_until(lambda: is_healthy(live))
        answered = httpx.post(
            f"{live.url}/v1/completions", content=BODY, headers=JSON | {"x-api-key": "a"}
        )
        assert answered.status_code == 200


def test_a_body_that_has_stopped_is_not_waited_for_however_large_it_is() -> None:
    async def look() -> None:
        clock = [0.0]
        made = connection_by(clock, body_s=20.0, body_nbytes_per_s=1, silence_s=30.0)
        made.data_received(HEAD + b"content-length: 10000\r\n\r\n" + b" " * 5000)
        assert not made.is_late(29.9)
        assert made.is_late(30.1)

    asyncio.run(look())


# --- sizes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "sent",
    [
        b"GET /" + b"a" * 200_000,
        b"GET / HTTP/1.1\r\n" + b"x" * 200_000,
        b"GET / HTTP/1.1\r\nx: " + b"y" * 200_000,
        b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 50_000,
    ],
)
def test_an_endless_head_is_refused(sent: bytes) -> None:
    with limited() as live, connect(live) as sock:
        for start in range(0, len(sent), 10_000):
            try:
                sock.sendall(sent[start : start + 10_000])
                live.on_loop(lambda: None)
            except (BrokenPipeError, ConnectionResetError):
                break
        assert answer(sock)[:12] in (b"HTTP/1.1 431", b"HTTP/1.1 400", b"")
        assert is_healthy(live)


CHUNKED = HEAD + b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n"
WHOLE = b"%x\r\n%b\r\n0\r\n" % (len(BODY), BODY)


@pytest.mark.parametrize(
    "sent",
    [
        CHUNKED + WHOLE + b"x: " + b"y" * 200_000,
        CHUNKED + WHOLE + b"x: y\r\n" * 50_000,
        CHUNKED + b"1;" + b"z" * 200_000,
    ],
    ids=["one trailer", "many trailers", "an extension of a chunk"],
)
def test_endless_trailers_are_refused(sent: bytes) -> None:
    with limited() as live, connect(live) as sock:
        for start in range(0, len(sent), 10_000):
            try:
                sock.sendall(sent[start : start + 10_000])
                live.on_loop(lambda: None)
            except (BrokenPipeError, ConnectionResetError):
                break
        assert answer(sock)[:12] in (b"HTTP/1.1 431", b"HTTP/1.1 400", b"")
        assert live.n_calls() == 0
        assert is_healthy(live)


def test_trailers_do_not_become_headers() -> None:
    """The headers have been checked by then."""
    with limited(keys=Keys(["a"])) as live:
        trailers = b"host: elsewhere.example\r\ncontent-type: text/plain\r\nx-session: z\r\n\r\n"
        keyed = CHUNKED.replace(b"\r\n\r\n", b"\r\nx-api-key: a\r\n\r\n")
        with connect(live, keyed) as sock:
            sock.sendall(WHOLE + trailers)
            plain = answer(sock)
        assert plain.startswith(b"HTTP/1.1 200")
        assert b"x-session: z" not in plain
        with connect(live, CHUNKED + WHOLE + b"x-api-key: a\r\n\r\n") as sock:
            assert answer(sock).startswith(b"HTTP/1.1 401")


def test_one_key_cannot_take_all_memory_for_bodies() -> None:
    limits = ApiLimits(body_nbytes=100_000, bodies_nbytes=300_000)
    with serve(limits=limits, context_length=200_000, keys=Keys(["a", "b"])) as live:
        large = json.dumps({"prompt": "a" * 90_000, "max_tokens": 1}).encode()

        def half(key: str) -> bytes:
            head = HEAD + b"x-api-key: %b\r\n" % key.encode()
            return head + b"content-length: %d\r\n\r\n%b" % (len(large) + 1, large)

        with ExitStack() as held:
            socks = [held.enter_context(connect(live, half("a"))) for _ in range(2)]
            assert any(_is_refused(sock) for sock in socks)
            whole = httpx.post(
                f"{live.url}/v1/completions", content=large, headers=JSON | {"x-api-key": "b"}
            )
            assert whole.status_code == 200


def _is_refused(sock: socket.socket) -> bool:
    sock.settimeout(2)
    try:
        return sock.recv(12) == b"HTTP/1.1 503"
    except TimeoutError:
        return False


def test_all_bodies_together_have_a_limit() -> None:
    limits = ApiLimits(body_nbytes=100_000, bodies_nbytes=150_000)
    with serve(limits=limits, context_length=200_000) as live:
        live.engine.hold("decode")
        large = json.dumps({"prompt": "a" * 90_000, "max_tokens": 1}).encode()
        request = HEAD + b"connection: close\r\ncontent-length: %d\r\n\r\n%b" % (len(large), large)
        with connect(live, request) as first:
            live.engine.wait_for(lambda engine: engine.n_in("decode") == 1)
            refused = httpx.post(f"{live.url}/v1/completions", content=large, headers=JSON)
            assert refused.status_code == 503
            assert refused.headers["retry-after"] == "1"
            live.engine.release("decode")
            assert answer(first).startswith(b"HTTP/1.1 200")
        assert (
            httpx.post(f"{live.url}/v1/completions", content=large, headers=JSON).status_code == 200
        )
