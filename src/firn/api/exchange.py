"""One HTTP exchange: its id and what becomes of it, and how a fault is answered."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Scope, Send

from firn.api.auth import ANYONE, Caller
from firn.api.dialects import Dialect, _ollama, _openai
from firn.core.errors import FirnError, TryLater, Unauthorized
from firn.core.values import Namespace

SCOPE_KEY = "firn.exchange"
OLLAMA = "/api"
"""All that lies below is Ollama's."""

RenderError = Callable[[FirnError], dict[str, Any]]
Headers = Sequence[tuple[bytes, bytes]]


@dataclass(slots=True)
class Exchange:
    """Owned by the front layer; the layers below write down what the log line shall say."""

    id: str = field(default_factory=lambda: f"req_{uuid.uuid4().hex}")
    began_at: float = field(default_factory=time.perf_counter)
    caller: Caller = ANYONE
    status: int = 0
    gone: bool = False
    summary: str = ""
    body_nbytes: int = 0
    """Taken of the room for bodies."""
    fault: FirnError | None = None
    """Why it was refused, or ended badly."""
    session: str = ""
    """The conversation it belongs to."""
    own_page: bool | None = None
    """A browser asks for a page that came from this very server. None: nobody has looked."""
    passed_on: bool = False
    """Another process has answered it, and logs it."""

    @property
    def namespace(self) -> Namespace:
        """The caller's part of the cache."""
        return self.caller.namespace


def exchange_of(scope: Scope) -> Exchange:
    exchange: Exchange = scope[SCOPE_KEY]
    return exchange


class HttpFault(FirnError):
    """A fault that only HTTP has: an unknown route, a wrong method."""

    code = "not_found"
    kind = "invalid_request_error"

    def __init__(self, status: int, message: str, *, allow: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.allow = allow
        if status == 405:
            self.code = "method_not_allowed"


class ServerFault(FirnError):
    """Our own mistake. The client learns where to look, not what happened."""

    def __init__(self, exchange_id: str) -> None:
        super().__init__(f"The server made a mistake; its log has the details under {exchange_id}.")


class Shapes:
    """Which dialect's error body a path gets: that of the dialect it lies below, else OpenAI's."""

    def __init__(self, dialects: list[Dialect]) -> None:
        self._by_path: Mapping[str, RenderError] = {
            **{d.path: d.render_error for d in dialects},
            OLLAMA: _ollama.error_object,
        }

    def of(self, path: str) -> RenderError:
        for owner, render in self._by_path.items():
            if path == owner or path.startswith(f"{owner}/"):
                return render
        return _openai.error_object


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


async def send_error(send: Send, error: FirnError, render: RenderError) -> None:
    await send_json(send, render(error), status=error.status, headers=error_headers(error))


def error_headers(error: FirnError) -> Headers:
    match error:
        case TryLater():
            return [(b"retry-after", str(error.retry_after_s).encode())]
        case Unauthorized():
            return [(b"www-authenticate", b"Bearer")]
        case HttpFault(allow=str(allow)):
            return [(b"allow", allow.encode("latin-1"))]
        case _:
            return []
