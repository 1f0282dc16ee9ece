"""Pictures by address: only from the public internet, only what was checked, within limits."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest

from firn.core.errors import BadPicture, Overloaded
from firn.core.shares import Shares
from firn.core.values import Chat, GenerateRequest, Message, Namespace, PicturePart, TextPart
from firn.media.fetch import MAX_URLS, TOTAL_FACTOR, Fetcher, FetchLimits, is_public

PUBLIC = "93.184.216.34"
NAMES: Mapping[str, list[str]] = {
    "pictures.example": [PUBLIC],
    "two.example": [PUBLIC, "2606:2800:220:1::1"],
    "localhost": ["127.0.0.1"],
    "rebound.example": ["10.0.0.7"],
    "half.example": [PUBLIC, "192.168.1.1"],
    "mapped.example": ["::ffff:127.0.0.1"],
    "metadata.example": ["169.254.169.254"],
    "shared.example": ["100.64.1.1"],
    "six.example": ["fe80::1%eth0"],
    "nat.example": ["64:ff9b::a00:1"],
    "empty.example": [],
}


class Web:
    """Answers requests, and records them."""

    def __init__(self, answer: Callable[[httpx.Request], httpx.Response]) -> None:
        self.asked: list[httpx.Request] = []
        self._answer = answer
        self.resolved: list[str] = []

    async def resolve(self, host: str, port: int) -> list[str]:
        self.resolved.append(host)
        if host in NAMES:
            return list(NAMES[host])
        try:
            return [str(ipaddress.ip_address(host))]
        except ValueError:
            raise OSError("name not known") from None

    def handle(self, request: httpx.Request) -> httpx.Response:
        self.asked.append(request)
        return self._answer(request)

    def fetch(self, url: str, **limits: Any) -> bytes:
        fetcher = Fetcher(
            FetchLimits(**{"nbytes": 1000, **limits}),
            resolve=self.resolve,
            transport=httpx.MockTransport(self.handle),
        )
        part = PicturePart(url, param="messages[2].content[1]")
        return asyncio.run(fetcher.fetch(part, Shares(1 << 20).open("")))


async def streamed(body: bytes) -> AsyncIterator[bytes]:
    for at in range(0, len(body), 100):
        yield body[at : at + 100]


def ok(request: httpx.Request) -> httpx.Response:
    return httpx.Response(200, content=streamed(b"pixels"))


def no_web(request: httpx.Request) -> httpx.Response:
    raise AssertionError(f"connected to {request.url}")


def test_it_connects_to_the_address_that_was_checked() -> None:
    web = Web(ok)
    assert web.fetch("https://user:secret@pictures.example:8443/a.png?x=1") == b"pixels"
    (request,) = web.asked
    assert request.url.host == PUBLIC
    assert request.url.port == 8443
    assert request.url.raw_path == b"/a.png?x=1"
    assert request.headers["host"] == "pictures.example:8443"
    assert request.extensions["sni_hostname"] == "pictures.example"
    assert "authorization" not in request.headers
    assert web.resolved == ["pictures.example"]


def test_ipv4_and_ipv6_addresses_are_fetched() -> None:
    assert Web(ok).fetch("https://two.example/") == b"pixels"
    assert Web(ok).fetch("https://[2606:2800:220:1::1]/") == b"pixels"


@pytest.mark.parametrize(
    "host",
    [
        "localhost", "rebound.example", "half.example", "mapped.example", "metadata.example",
        "shared.example", "six.example", "nat.example", "empty.example", "127.0.0.1", "0.0.0.0",
        "10.1.2.3", "172.16.0.1", "192.168.0.1", "169.254.169.254", "100.100.100.200",
        "224.0.0.1", "240.0.0.1", "255.255.255.255", "192.0.2.1", "198.18.0.1", "[::1]", "[::]",
        "[fc00::1]", "[fe80::1]", "[fec0::1]", "[ff02::1]", "[::ffff:10.0.0.1]", "[2002:7f00:1::]",
        "[64:ff9b::7f00:1]", "[2001:0:7f00:1::]", "[2001:db8::1]",
    ],
)  # fmt: skip
def test_nothing_private_is_reached(host: str) -> None:
    with pytest.raises(BadPicture, match="public internet") as fault:
        Web(no_web).fetch(f"https://{host}/a.png")
    assert fault.value.param == "messages[2].content[1]"
    assert fault.value.status == 400


@pytest.mark.parametrize("text", ["1.1.1.1", "8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8"])
def test_public_addresses_are_allowed(text: str) -> None:
    assert is_public(ipaddress.ip_address(text))


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("http://pictures.example/a.png", "must begin with https"),
        ("ftp://pictures.example/a.png", "must begin with https"),
        ("https:///a.png", "could not be fetched|has no host name"),
        ("https://nowhere.example/", "could not be fetched"),
        ("https://pictures.example:99999/", "port above 65535"),
    ],
)
def test_malformed_addresses_are_refused(url: str, said: str) -> None:
    with pytest.raises(BadPicture, match=said):
        Web(no_web).fetch(url)


def test_plain_http_is_fetched_where_it_is_allowed() -> None:
    assert Web(ok).fetch("http://pictures.example/", plain_http=True) == b"pixels"


def redirect(to: str) -> Callable[[httpx.Request], httpx.Response]:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/final.png":
            return ok(request)
        return httpx.Response(302, headers={"location": to})

    return answer


def test_redirects_are_followed() -> None:
    web = Web(redirect("/final.png"))
    assert web.fetch("https://pictures.example/start") == b"pixels"
    assert [r.headers["host"] for r in web.asked] == ["pictures.example"] * 2
    assert web.resolved == ["pictures.example"] * 2  # every hop is checked


@pytest.mark.parametrize(
    ("to", "said"),
    [
        ("https://localhost/final.png", "public internet"),
        ("https://rebound.example/final.png", "public internet"),
        ("http://pictures.example/final.png", "must begin with https"),
        ("file:///etc/passwd", "must begin with https"),
        ("/again", "redirects more than 3 times"),
    ],
)
def test_redirects_are_checked(to: str, said: str) -> None:
    web = Web(redirect(to))
    with pytest.raises(BadPicture, match=said):
        web.fetch("https://pictures.example/start")
    assert all(r.url.host == PUBLIC for r in web.asked)


@pytest.mark.parametrize(
    ("response", "said"),
    [
        (httpx.Response(404), "answered 404"),
        (httpx.Response(200, content=streamed(b"x" * 1001)), "over the limit"),
        (httpx.Response(200, headers={"content-encoding": "gzip"}), "compressed"),
    ],
)
def test_answers_that_are_refused(response: httpx.Response, said: str) -> None:
    with pytest.raises(BadPicture, match=said):
        Web(lambda _: response).fetch("https://pictures.example/")


def test_a_silent_server_times_out() -> None:
    class Slow(httpx.AsyncBaseTransport):
        async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
            await asyncio.Event().wait()
            raise AssertionError

    fetcher = Fetcher(
        FetchLimits(nbytes=10, timeout_s=0.05), resolve=Web(ok).resolve, transport=Slow()
    )
    with pytest.raises(BadPicture, match=r"within 0\.05 seconds"):
        asyncio.run(
            fetcher.fetch(PicturePart("https://pictures.example/"), Shares(1 << 20).open(""))
        )


def test_only_remote_pictures_of_a_request_are_filled_in() -> None:
    parts = (
        TextPart("see"),
        PicturePart("https://pictures.example/a.png"),
        PicturePart("data:image/png;base64,AAAA"),
    )
    request = GenerateRequest("m", Chat((Message("user", parts), Message("assistant"))))
    web = Web(ok)
    fetcher = Fetcher(
        FetchLimits(nbytes=100), resolve=web.resolve, transport=httpx.MockTransport(web.handle)
    )
    got = asyncio.run(gathered(fetcher, request))
    assert isinstance(got.source, Chat)
    text, fetched, inline = got.source.messages[0].parts
    assert (text, inline) == (parts[0], parts[2])
    assert isinstance(fetched, PicturePart)
    assert fetched.data == b"pixels"
    again = asyncio.run(gathered(fetcher, got))
    assert again is got
    assert len(web.asked) == 1


async def gathered(fetcher: Fetcher, request: GenerateRequest, owner: str = "a") -> GenerateRequest:
    async with fetcher.gather(request, Namespace(owner)) as whole:
        return whole


def gather(web: Web, *urls: str, nbytes: int = 1000) -> GenerateRequest:
    fetcher = Fetcher(
        FetchLimits(nbytes=nbytes), resolve=web.resolve, transport=httpx.MockTransport(web.handle)
    )
    parts = tuple(PicturePart(url, param=f"content[{i}]") for i, url in enumerate(urls))
    return asyncio.run(gathered(fetcher, GenerateRequest("m", Chat((Message("user", parts),)))))


def test_an_address_that_is_shown_twice_is_fetched_once() -> None:
    web = Web(ok)
    got = gather(web, *["https://pictures.example/a.png"] * 3, "https://pictures.example/b.png")
    assert isinstance(got.source, Chat)
    parts = got.source.messages[0].parts
    assert [p.data for p in parts if isinstance(p, PicturePart)] == [b"pixels"] * 4
    assert len(web.asked) == 2


def test_a_request_fetches_a_limited_number_of_pictures() -> None:
    urls = [f"https://pictures.example/{i}.png" for i in range(MAX_URLS + 1)]
    with pytest.raises(BadPicture, match=rf"^content\[{MAX_URLS}\]: more than"):
        gather(Web(no_web), *urls)


def test_a_request_fetches_a_limited_number_of_bytes() -> None:
    """Each is within the limit, but all of them together are not."""
    urls = [f"https://pictures.example/{i}.png" for i in range(TOTAL_FACTOR + 1)]
    assert gather(Web(ok), *urls[:-1], nbytes=len(b"pixels"))
    with pytest.raises(BadPicture, match="too large together"):
        gather(Web(ok), *urls, nbytes=len(b"pixels"))


def test_a_key_holds_its_share_of_fetched_bytes() -> None:
    """Sixteen requests whose prompts wait would hold the pictures of all of them otherwise."""
    parts = (PicturePart("https://pictures.example/a.png"),)
    request = GenerateRequest("m", Chat((Message("user", parts),)))
    limits = FetchLimits(nbytes=len(b"pixels"), total_nbytes=16 * len(b"pixels"))
    web = Web(ok)
    fetcher = Fetcher(limits, resolve=web.resolve, transport=httpx.MockTransport(web.handle))

    async def run() -> None:
        async with AsyncExitStack() as held:
            for _ in range(8):
                await held.enter_async_context(fetcher.gather(request, Namespace("a")))
            with pytest.raises(Overloaded):
                await gathered(fetcher, request, "a")
            await gathered(fetcher, request, "b")
        await gathered(fetcher, request, "a")

    asyncio.run(run())


def test_one_fault_ends_the_request() -> None:
    """The first fault is reported, and the other fetches end."""

    async def run() -> None:
        never = asyncio.Event()

        class Stuck(httpx.AsyncBaseTransport):
            async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
                if request.url.path == "/bad":
                    return httpx.Response(500)
                await never.wait()
                raise AssertionError

        fetcher = Fetcher(FetchLimits(nbytes=10), resolve=Web(ok).resolve, transport=Stuck())
        urls = ("https://pictures.example/slow", "https://pictures.example/bad")
        parts = tuple(PicturePart(url, param=url) for url in urls)
        with pytest.raises(BadPicture, match="answered 500") as fault:
            await gathered(fetcher, GenerateRequest("m", Chat((Message("user", parts),))))
        assert fault.value.param == urls[1]
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(run())
