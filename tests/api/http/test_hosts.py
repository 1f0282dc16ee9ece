"""Which host names the server answers to: its own, and addresses; a rebound name gets nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from firn.api.http.hosts import Hosts, is_from_browser, is_local, machine_names
from tests.api.live import Live, serve

OURS = [
    "localhost",
    "LOCALHOST:8000",
    "localhost.",
    "app.localhost:80",
    "127.0.0.1",
    "127.0.0.1:8000",
    "127.9.9.9",
    "[::1]",
    "[::1]:8000",
    "192.168.1.5:8000",
    "[fe80::1%25eth0]:8000",
    "host.docker.internal:8000",
]
NOT_OURS = [
    "evil.example",
    "evil.example:8000",
    "localhost.evil.example",
    "127.0.0.1.evil.example",
    "notlocalhost",
    "",
    "a b",
    "[evil.example]",
    "::ffff:evil",
    "[127.0.0.1].evil.example",
    "[::1].evil.example:80",
    "[127.0.0.1]",
    "[[::1]]",
    "127.0.0.1]",
    "[::1",
    "127.0.0.1%evil.example",
    "[::1]:80:80",
]


@pytest.mark.parametrize("host", OURS)
def test_the_servers_own_names_are_allowed(host: str) -> None:
    assert Hosts().allow(host)


@pytest.mark.parametrize("host", NOT_OURS)
def test_foreign_names_are_refused(host: str) -> None:
    assert not Hosts().allow(host)


def test_names_of_allowed_hosts_are_allowed() -> None:
    hosts = Hosts(["ai.example.com", "*.lab.example"])
    for ours in ("ai.example.com", "AI.Example.com:443", "a.lab.example", "b.a.lab.example"):
        assert hosts.allow(ours)
    for theirs in ("example.com", "x.ai.example.com", "lab.example", "evillab.example"):
        assert not hosts.allow(theirs)
    assert Hosts(["*"]).allow("anything.at.all")


def test_the_machines_names_depend_on_the_address() -> None:
    assert machine_names("127.0.0.1") == machine_names("::1") == ()
    assert machine_names("gpu.lan") == ("gpu.lan",)
    assert any(name.endswith(".local") for name in machine_names("0.0.0.0"))


def scope(client: Any = ("127.0.0.1", 5), **headers: str) -> dict[str, Any]:
    raw = [(k.replace("_", "-").encode(), v.encode()) for k, v in headers.items()]
    return {"type": "http", "client": client, "headers": raw}


def test_loopback_addresses_are_local() -> None:
    assert is_local(scope())
    assert is_local(scope(("::1", 5)))
    assert is_local(scope(("::ffff:127.0.0.1", 5)))
    for other in (("10.0.0.7", 5), ("::ffff:10.0.0.7", 5), ("testclient", 5), None):
        assert not is_local(scope(other))


@pytest.mark.parametrize("header", ["x_forwarded_for", "forwarded", "x_real_ip", "via"])
def test_a_proxys_requests_are_not_local(header: str) -> None:
    assert not is_local(scope(**{header: "127.0.0.1"}))


def test_browsers_are_known_by_their_headers() -> None:
    assert is_from_browser(scope(origin="http://evil.example")["headers"])
    assert is_from_browser(scope(sec_fetch_site="cross-site")["headers"])
    assert not is_from_browser(scope(user_agent="curl/8")["headers"])


# --- over the wire -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def live() -> Iterator[Live]:
    with serve(hosts=Hosts(["ai.example.com"])) as running:
        yield running


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/health"),
        ("GET", "/metrics"),
        ("GET", "/v1/models"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/v1/messages"),
        ("DELETE", "/v1/cache"),
        ("OPTIONS", "/v1/completions"),
        ("GET", "/openapi.json"),
        ("GET", "/nowhere"),
    ],
)
def test_dns_rebinding_is_refused(live: Live, method: str, path: str) -> None:
    """The page's own host name, resolved to our address."""
    answer = httpx.request(method, f"{live.url}{path}", headers={"host": "evil.example"})
    assert answer.status_code == 403
    error = answer.json()["error"]
    assert "'evil.example'" in error["message"]
    assert "--allowed-host" in error["message"]


@pytest.mark.parametrize("host", ["localhost", "ai.example.com:8000", "127.0.0.1", "[::1]:8000"])
def test_the_right_names_are_served(live: Live, host: str) -> None:
    assert httpx.get(f"{live.url}/health", headers={"host": host}).status_code == 200


def talk(live: Live, request: bytes) -> bytes:
    async def exchange() -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", live.port)
        writer.write(request)
        answer = await asyncio.wait_for(reader.read(), 30)
        writer.close()
        return answer

    return asyncio.run(exchange())


def test_two_host_headers_are_refused(live: Live) -> None:
    both = b"GET /health HTTP/1.1\r\nhost: localhost\r\nhost: evil.example\r\nconnection: close\r\n\r\n"
    assert talk(live, both).startswith(b"HTTP/1.1 403")


def test_a_request_without_a_host_header_is_served(live: Live) -> None:
    assert talk(live, b"GET /health HTTP/1.0\r\n\r\n").startswith(b"HTTP/1.1 200")
