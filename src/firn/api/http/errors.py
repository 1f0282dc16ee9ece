"""Errors on the wire: the body in each API's shape, and the headers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

from starlette.requests import Request
from starlette.routing import BaseRoute, Match

from firn.core.errors import FirnError, TryLater, Unauthorized

OLLAMA = "/api"
"""All paths below it belong to Ollama's API."""

SEVERAL_MODELS = ("/api/pull", "/api/delete", "/api/copy", "/api/create")
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


def no_route(routes: list[BaseRoute], request: Request) -> str:
    """What a client is told whose path is no route here: most often its base URL is a little off.

    Clients of OpenAI's API want an address that ends in /v1, those of Anthropic's and Ollama's want
    one that does not.
    """
    method, path = request.method, request.url.path
    missing = f"There is no {method} {path} here"
    for meant in _spellings(path):
        if meant != path and _is_served(routes, request, meant):
            return f"{missing}; {meant} is: check the base URL that the client was given."
    if path in SEVERAL_MODELS:
        return f"{missing}: this server serves one model. One with --models-dir downloads others."
    return f"{missing}."


def _spellings(path: str) -> list[str]:
    """The path with one slash between words, below one /v1 or none."""
    words = [word for word in path.split("/") if word]
    while words[:1] == ["v1"]:
        words = words[1:]
    rest = "/" + "/".join(words)
    return ["/v1" + rest, rest]


def _is_served(routes: list[BaseRoute], request: Request, path: str) -> bool:
    scope = {**request.scope, "path": path, "raw_path": path.encode()}
    return any(route.matches(scope)[0] is Match.FULL for route in routes)
