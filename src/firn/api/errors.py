"""Errors on the wire: the body in each API's shape, and the headers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from firn.core.errors import FirnError, TryLater, Unauthorized

OLLAMA = "/api"
"""All paths below it belong to Ollama's API."""

RenderError = Callable[[FirnError], dict[str, Any]]
Headers = Sequence[tuple[bytes, bytes]]


class HttpFault(FirnError):
    """A fault at the level of HTTP: an unknown route, a wrong method."""

    code = "not_found"
    kind = "invalid_request_error"

    def __init__(self, status: int, message: str, *, allow: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.allow = allow
        if status == 405:
            self.code = "method_not_allowed"


class InternalFault(FirnError):
    """A bug in firn. The client learns where to look in the log, not what happened."""

    def __init__(self, exchange_id: str) -> None:
        super().__init__(f"Internal error; the server's log has the details under {exchange_id}.")


def openai_error(error: FirnError) -> dict[str, Any]:
    return {
        "error": {
            "message": error.message,
            "type": error.kind,
            "param": error.param,
            "code": error.code,
        }
    }


def ollama_error(error: FirnError) -> dict[str, Any]:
    return {"error": error.message}


class HasErrors(Protocol):
    """What `ErrorShapes` must know about a dialect."""

    path: str

    def render_error(self, error: FirnError) -> dict[str, Any]: ...


class ErrorShapes:
    """The shape of errors by path: that of the dialect it belongs to, else OpenAI's. Immutable."""

    def __init__(self, dialects: Iterable[HasErrors]) -> None:
        self._by_path: Mapping[str, RenderError] = {
            **{dialect.path: dialect.render_error for dialect in dialects},
            OLLAMA: ollama_error,
        }

    def of(self, path: str) -> RenderError:
        for owner, render in self._by_path.items():
            if path == owner or path.startswith(f"{owner}/"):
                return render
        return openai_error


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
