"""A request for another protocol is answered over HTTP/1.1, and its body is read."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator

import pytest

from tests.api.live import GREETING, Live, serve

HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\n"
    b"connection: Upgrade, HTTP2-Settings\r\nupgrade: h2c\r\nhttp2-settings: AAMAAABk\r\n"
    b"content-type: application/json\r\n"
)
BODY = json.dumps({"prompt": "hello", "max_tokens": 99}).encode()
SIZED = HEAD + b"content-length: %d\r\n\r\n%b" % (len(BODY), BODY)
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY)
WEBSOCKET = (
    b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
    b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-version: 13\r\n\r\n"
)


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serve() as running:
        yield running


@pytest.fixture
def sock(live: Live) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", live.port), timeout=30) as connected:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield connected


def answer(sock: socket.socket) -> http.client.HTTPResponse:
    """The next answer on this connection: over HTTP/1.1, with nothing about an upgrade."""
    reply = http.client.HTTPResponse(sock)
    reply.begin()
    assert (reply.version, reply.status) == (11, 200)
    assert reply.getheader("upgrade") is None
    return reply


def completed(sock: socket.socket) -> str:
    return str(json.load(answer(sock))["choices"][0]["text"])


def test_a_request_for_websockets_gets_a_plain_answer(sock: socket.socket) -> None:
    sock.sendall(WEBSOCKET)
    assert json.load(answer(sock))["data"][0]["id"] == "fake"


@pytest.mark.parametrize("request_", [SIZED, CHUNKED], ids=["sized", "chunked"])
@pytest.mark.parametrize("n_at_once", [1, 7, 1 << 20])
def test_the_body_of_a_request_for_http_2_is_read(
    live: Live, sock: socket.socket, request_: bytes, n_at_once: int
) -> None:
    """Java's client sends it like this. The connection is then as good as any other."""
    for _ in range(2):
        for start in range(0, len(request_), n_at_once):
            sock.sendall(request_[start : start + n_at_once])
        assert completed(sock) == GREETING
        assert live.prompt == "hello"


def test_requests_sent_together_are_answered_in_turn(sock: socket.socket) -> None:
    sock.sendall(SIZED + WEBSOCKET + CHUNKED)
    whole = sock.makefile("rb")
    got: list[object] = []
    for _ in range(3):
        assert whole.readline() == b"HTTP/1.1 200 OK\r\n"
        fields = http.client.parse_headers(whole)
        assert "upgrade" not in fields
        got.append(json.loads(whole.read(int(fields["content-length"])))["object"])
    assert got == ["text_completion", "list", "text_completion"]


def test_a_tunnel_is_refused(sock: socket.socket) -> None:
    sock.sendall(b"CONNECT example.com:443 HTTP/1.1\r\nhost: localhost\r\n\r\n")
    reply = http.client.HTTPResponse(sock)
    reply.begin()
    assert reply.status == 400
