"""Pictures by URL: fetched only where the operator allows it, and only from the public internet.

A host name is resolved once, all its addresses must be public, and the connection is made to one of
them: the address that was checked is the one used, even if the name resolves differently a moment
later. Each redirect is checked like the first URL. Proxy settings and .netrc are ignored.

Owner: the asyncio thread.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import httpx

from firn.core.errors import BadPicture, Overloaded
from firn.core.shares import Share, Shares
from firn.core.units import MIB
from firn.core.values import Chat, GenerateRequest, MessagePart, Namespace, PicturePart
from firn.media.headers import one_line

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
Resolve = Callable[[str, int], Awaitable[list[str]]]
"""All addresses of a host name; raises OSError."""

MAX_REDIRECTS = 3
REDIRECTS = frozenset({301, 302, 303, 307, 308})
MAX_AT_ONCE = 8
MAX_URLS = 256
"""Distinct URLs in one request. A prompt may have the same number of pictures."""
TOTAL_FACTOR = 8
"""Size limit for all pictures of a request together, as a multiple of the limit for one."""
TOO_MANY = f"more than {MAX_URLS} images to fetch; send fewer."
HEADERS = {"Accept": "image/*", "Accept-Encoding": "identity", "User-Agent": "firn"}


@dataclass(frozen=True, slots=True)
class FetchLimits:
    """Limits per picture; total_nbytes is for all that are held at a time, whoever asked for them.

    plain_http: http:// is allowed as well as https://.
    """

    nbytes: int
    total_nbytes: int = 1024 * MIB
    timeout_s: float = 10.0
    plain_http: bool = False


class Fetcher:
    """Fills in the bytes of the pictures that a request names by URL.

    Owner of the memory for them, in which every key gets its share: what is sent to name a picture is
    a millionth of what is fetched.
    """

    def __init__(
        self,
        limits: FetchLimits,
        *,
        resolve: Resolve | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """resolve, transport: the network; tests pass their own."""
        self._limits = limits
        self._resolve = resolve or system_resolver
        self._transport = transport
        self._memory = Shares(max(limits.total_nbytes, TOTAL_FACTOR * limits.nbytes))

    @asynccontextmanager
    async def gather(
        self, request: GenerateRequest, owner: Namespace
    ) -> AsyncIterator[GenerateRequest]:
        """The request with the bytes of each picture, or with the reason why there are none.

        Its pictures count as held until the context ends. Nothing is cached. Raises BadPicture if a
        picture of the newest message fails; if an older one fails, the conversation continues without
        it. Raises Overloaded if the owner holds its share of the memory.
        """
        with self._memory.open(owner) as share:
            yield await self._gather(request, share)

    async def _gather(self, request: GenerateRequest, share: Share) -> GenerateRequest:
        source = request.source
        if not isinstance(source, Chat) or not any(map(_is_remote, _parts(source))):
            return request
        newest = _urls_of_newest(source)
        wanted = _by_url(source, newest)
        slots = asyncio.Semaphore(MAX_AT_ONCE)
        n_left = TOTAL_FACTOR * self._limits.nbytes

        async def fetched(part: PicturePart) -> bytes | BadPicture:
            nonlocal n_left
            try:
                async with slots:
                    data = await self.fetch(part, share)
                n_left -= len(data)
                if n_left < 0:
                    raise BadPicture(
                        part.param, "the request's images are too large together; send fewer."
                    )
            except BadPicture as fault:
                if part.url in newest:
                    raise
                return fault
            return data

        try:
            async with asyncio.TaskGroup() as group:
                tasks = {url: group.create_task(fetched(part)) for url, part in wanted.items()}
        except* (BadPicture, Overloaded) as faults:
            raise faults.exceptions[0] from None

        def filled(part: MessagePart) -> MessagePart:
            if not isinstance(part, PicturePart) or not _is_remote(part):
                return part
            if part.url not in tasks:
                return replace(part, fault=TOO_MANY)
            result = tasks[part.url].result()
            if isinstance(result, bytes):
                return replace(part, data=result)
            return replace(part, fault=result.message.removeprefix(f"{result.param}: "))

        messages = tuple(replace(m, parts=tuple(map(filled, m.parts))) for m in source.messages)
        return replace(request, source=replace(source, messages=messages))

    async def fetch(self, part: PicturePart, share: Share) -> bytes:
        try:
            async with asyncio.timeout(self._limits.timeout_s):
                return await self._follow(part, share)
        except TimeoutError as e:
            late = f"the image did not arrive within {self._limits.timeout_s:g} seconds."
            raise BadPicture(part.param, late) from e
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as e:
            why = f"the image could not be fetched: {one_line(e)}"
            raise BadPicture(part.param, why) from e

    async def _follow(self, part: PicturePart, share: Share) -> bytes:
        url = httpx.URL(part.url)
        # One client per picture: a connection kept alive would outlive the check of its address.
        async with httpx.AsyncClient(
            trust_env=False,
            follow_redirects=False,
            timeout=self._limits.timeout_s,
            transport=self._transport,
        ) as client:
            for _ in range(MAX_REDIRECTS + 1):
                answer = await self._get(client, url, part, share)
                if isinstance(answer, bytes):
                    return answer
                url = answer
        raise BadPicture(
            part.param, f"the image's address redirects more than {MAX_REDIRECTS} times."
        )

    async def _get(
        self, client: httpx.AsyncClient, url: httpx.URL, part: PicturePart, share: Share
    ) -> bytes | httpx.URL:
        """The body, or the URL that the server redirects to."""
        address = await self._check(url, part)
        pinned = url.copy_with(host=str(address), userinfo=b"")
        async with client.stream(
            "GET",
            pinned,
            headers={**HEADERS, "Host": url.netloc.decode("ascii")},
            extensions={"sni_hostname": url.host},
        ) as response:
            if response.status_code in REDIRECTS and "location" in response.headers:
                return url.join(response.headers["location"])
            if response.status_code != 200:
                raise BadPicture(part.param, f"the image's server answered {response.status_code}.")
            if response.headers.get("content-encoding", "identity") != "identity":
                raise BadPicture(
                    part.param,
                    "the image's server ignored Accept-Encoding and sent a compressed response.",
                )
            body = bytearray()
            async for chunk in response.aiter_raw():
                if not share.grow(len(chunk)):
                    raise Overloaded(
                        "Your share of the memory for fetched images is in use; try again shortly."
                    )
                body += chunk
                if len(body) > self._limits.nbytes:
                    raise BadPicture(
                        part.param,
                        f"the image is over the limit of {self._limits.nbytes / MIB:g} MiB.",
                    )
            return bytes(body)

    async def _check(self, url: httpx.URL, part: PicturePart) -> Address:
        """An address to connect to, if the URL may be fetched. Raises BadPicture."""
        schemes = ("https", "http") if self._limits.plain_http else ("https",)
        if url.scheme not in schemes:
            raise BadPicture(
                part.param, f"the image's address must begin with {' or '.join(schemes)}://."
            )
        if not url.host:
            raise BadPicture(part.param, "the image's address has no host name.")
        port = url.port or (443 if url.scheme == "https" else 80)
        if port > 65535:
            raise BadPicture(part.param, "the image's address has a port above 65535.")
        addresses = [_parse(a) for a in await self._resolve(url.host, port)]
        if not addresses or not all(map(is_public, addresses)):
            raise BadPicture(part.param, "the image's address is not on the public internet.")
        return addresses[0]


async def system_resolver(host: str, port: int) -> list[str]:
    loop = asyncio.get_running_loop()
    entries = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return [str(entry[4][0]) for entry in entries]


def is_public(address: Address) -> bool:
    """Whether the address is not private, loopback, link-local, shared (CGNAT), multicast or
    reserved, nor an IPv6 form of such an IPv4 address."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = [address.ipv4_mapped, address.sixtofour, *(address.teredo or ())]
        if any(a is not None and not is_public(a) for a in inner):
            return False
        if address.ipv4_mapped is not None:
            return True
        if address.is_site_local:
            return False
    return address.is_global and not (
        address.is_private
        or address.is_loopback
        or address.is_link_local
        or address.is_multicast
        or address.is_reserved
        or address.is_unspecified
    )


def _parse(text: str) -> Address:
    return ipaddress.ip_address(text.partition("%")[0])


def _parts(chat: Chat) -> list[MessagePart]:
    return [part for message in chat.messages for part in message.parts]


def _urls_of_newest(chat: Chat) -> frozenset[str]:
    """The URLs that the user has just sent."""
    parts = chat.messages[chat.newest].parts if chat.newest >= 0 else ()
    return frozenset(part.url for part in parts if isinstance(part, PicturePart))


def _by_url(chat: Chat, newest: frozenset[str]) -> dict[str, PicturePart]:
    """The first part with each URL: a picture that occurs twice is fetched once. Raises BadPicture."""
    firsts: dict[str, PicturePart] = {}
    for part in _parts(chat):
        if isinstance(part, PicturePart) and _is_remote(part) and part.url not in firsts:
            if len(firsts) < MAX_URLS:
                firsts[part.url] = part
            elif part.url in newest:
                raise BadPicture(part.param, TOO_MANY)
    return firsts


def _is_remote(part: MessagePart) -> bool:
    return (
        isinstance(part, PicturePart)
        and part.data is None
        and not part.fault
        and part.url[:8].lower().startswith(("http://", "https://"))
    )
