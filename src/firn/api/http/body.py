"""Request bodies: read within a limit, checked before parsing, large ones parsed off the event loop."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import Executor
from typing import Any, TypeVar

from starlette.types import Receive

from firn.api.http import json_bounds
from firn.api.http.hosts import is_from_browser
from firn.core.errors import BadRequest, BodyTooLarge

T = TypeVar("T")

INLINE_NBYTES = 64 * 1024
"""A body of up to this size is parsed in a few milliseconds, whatever it contains."""
MAX_DIGITS = 512
"""Of one number: reading an integer takes time by the square of its digits."""
MAX_DEPTH = 100
"""Deeper nesting could overflow the stack of a template or a schema compiler."""


class ClientGone(Exception):
    """The client has closed the connection: there is nobody to answer."""


async def read_body(
    headers: Iterable[tuple[bytes, bytes]],
    receive: Receive,
    *,
    limit_nbytes: int,
    take: Callable[[int], None] = lambda nbytes: None,
) -> bytes:
    """The whole body. Raises BodyTooLarge as early as possible, and ClientGone.

    take: called with the size of every piece before it is stored; may raise.
    """
    for name, value in headers:
        # The HTTP parser accepts only numbers.
        if name == b"content-length" and int(value) > limit_nbytes:
            raise BodyTooLarge(limit_nbytes)
    pieces: list[bytes] = []
    nbytes = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientGone()
        piece: bytes = message.get("body", b"")
        nbytes += len(piece)
        if nbytes > limit_nbytes:
            raise BodyTooLarge(limit_nbytes)
        take(len(piece))
        pieces.append(piece)
        if not message.get("more_body", False):
            return b"".join(pieces)


def check_content_type(headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Raises BadRequest for a compressed body, and for one that a web page does not declare as JSON.

    A web page may post other types to a server on the user's own machine without a CORS preflight.
    For JSON the browser sends one, which is refused unless --allow-origin permits the page. Other
    programs may leave the type out, or send curl's default.
    """
    headers = list(headers)
    by_name = dict(headers)
    media_type = by_name.get(b"content-type", b"").partition(b";")[0].strip().lower()
    is_json = media_type == b"application/json" or media_type.endswith(b"+json")
    if not is_json and is_from_browser(headers):
        raise BadRequest("A web page has to send the header 'content-type: application/json'.")
    encoding = by_name.get(b"content-encoding", b"").strip().lower()
    if encoding not in (b"", b"identity"):
        raise BadRequest("The body is compressed (content-encoding); send it as plain JSON.")


async def decoded(
    raw: bytes,
    pool: Executor,
    decode: Callable[[dict[str, Any]], T],
    *,
    inline_nbytes: int = INLINE_NBYTES,
) -> T:
    """The result of `decode` for the body's object. Raises BadRequest, and what `decode` raises.

    A body of more than `inline_nbytes` is decoded in the pool: it may take seconds, and streams
    must not wait.
    """

    def work() -> T:
        return decode(parse_object(raw))

    if len(raw) <= inline_nbytes:
        return work()
    return await asyncio.get_running_loop().run_in_executor(pool, work)


def parse_object(raw: bytes) -> dict[str, Any]:
    try:
        json_bounds.check(raw)
        value = _parse(raw.decode("utf-8-sig"))  # some editors begin files with a byte order mark
    except UnicodeDecodeError as error:
        raise BadRequest(f"The body is not UTF-8: {error.reason} at byte {error.start}.") from None
    except json.JSONDecodeError as error:
        raise BadRequest(
            f"The body is not JSON: {error.msg} at line {error.lineno}, column {error.colno}."
        ) from None
    except ValueError as error:
        raise BadRequest(f"The body cannot be used: {error}.") from None
    if not isinstance(value, dict):
        raise BadRequest("The body must be a JSON object.")
    return value


def parse(text: str) -> object:
    """JSON that can be walked recursively and encoded as UTF-8. Raises ValueError.

    NaN and infinities pass: decoders that expect a number refuse them, and name the parameter.
    """
    if len(text) > INLINE_NBYTES:
        json_bounds.check(text.encode("utf-8", "surrogatepass"))
    return _parse(text)


def _parse(text: str) -> object:
    try:
        value = json.loads(text, parse_int=_integer, parse_float=_float)
    except json.JSONDecodeError:
        raise
    except RecursionError:
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels") from None
    if text.count("[") + text.count("{") > MAX_DEPTH and _deeper_than(value, MAX_DEPTH):
        raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
    if "\\ud" in text or "\\uD" in text:  # an escape can encode half a character
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ValueError("an unpaired surrogate escape in a string") from None
    return value


# Between two calls of these, the parser lets other threads run.


def _integer(digits: str) -> int:
    return int(_bounded(digits))


def _float(digits: str) -> float:
    return float(_bounded(digits))


def _bounded(digits: str) -> str:
    if len(digits) > MAX_DIGITS:
        raise ValueError("a number with too many digits")
    return digits


def _deeper_than(value: object, limit: int) -> bool:
    level = [value]
    for _ in range(limit):
        inner: list[Any] = []
        for node in level:
            if type(node) is dict:
                inner.extend(node.values())
            elif type(node) is list:
                inner.extend(node)
        level = [node for node in inner if type(node) in (dict, list)]
        if not level:
            return False
    return True


async def while_connected(receive: Receive, work: Callable[[], Awaitable[T]]) -> T:
    """Do the work. If the client hangs up, cancel it immediately and raise ClientGone."""

    async def hung_up() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working = asyncio.ensure_future(work())
    watching = asyncio.ensure_future(hung_up())
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone()
        return working.result()
    finally:
        watching.cancel()
        working.cancel()
        await asyncio.wait({working, watching})
