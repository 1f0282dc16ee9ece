"""One HTTP exchange: what the layers and the log line know about it, and how JSON is sent."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Scope, Send

from firn.api.http.auth import ANYONE, Caller
from firn.api.http.errors import Headers
from firn.core.errors import FirnError
from firn.core.shares import Share
from firn.core.values import Namespace

SCOPE_KEY = "firn.exchange"
PLACE_KEY = "firn.place"
"""Takes a place for the request on its connection, see `Connection.take_place`."""


@dataclass(slots=True)
class Exchange:
    """Owner: `RequestLog`, the outermost layer. Inner layers note here what its log line shows."""

    id: str = field(default_factory=lambda: f"req_{uuid.uuid4().hex}")
    began_at: float = field(default_factory=time.perf_counter)
    caller: Caller = ANYONE
    status: int = 0
    gone: bool = False
    """Whether the client hung up."""
    summary: str = ""
    """Tokens and seconds, for the log line."""
    body: Share | None = None
    """What its body takes from the memory budget for bodies, see `BodyReader`."""
    fault: FirnError | None = None
    """Why it was refused, or failed."""
    conversation: str = ""
    """The conversation it belongs to, see `affinity`."""
    own_page: bool | None = None
    """Whether a browser sent it for a page of this server itself. None: not checked yet."""
    passed_on: bool = False
    """Whether another process has answered it, and logs it."""

    @property
    def namespace(self) -> Namespace:
        """The caller's namespace of the cache."""
        return self.caller.namespace

    @property
    def visible(self) -> Namespace | None:
        """The namespace whose records the caller may see and clear; None: all of them."""
        return None if self.caller.operator else self.caller.namespace


def exchange_of(scope: Scope) -> Exchange:
    exchange: Exchange = scope[SCOPE_KEY]
    return exchange


def client_of(scope: Scope) -> str:
    """Who gets a share, see `Caller.client`."""
    return exchange_of(scope).caller.client


async def send_json(
    send: Send, body: Mapping[str, Any], *, status: int = 200, headers: Headers | None = None
) -> None:
    await send_raw_json(send, json.dumps(body).encode(), status=status, headers=headers)


async def send_raw_json(
    send: Send, raw: bytes, *, status: int = 200, headers: Headers | None = None
) -> None:
    start: Headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(raw)).encode()),
        *(headers or ()),
    ]
    await send({"type": "http.response.start", "status": status, "headers": start})
    await send({"type": "http.response.body", "body": raw})
