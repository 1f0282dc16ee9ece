"""API dialects: one file each, discovered by being in this folder.

A module of this package whose name has no leading underscore defines a class with the methods of
`Dialect` and names it in `DIALECT`. It is created with the `Defaults` for whatever a body leaves
out. The contract tests discover it, too.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from firn.api.services import Services
from firn.core.errors import FirnError
from firn.core.events import Event
from firn.core.values import PLAIN_DEFAULTS, Defaults, GenerateRequest, Namespace, RequestId


@dataclass(frozen=True, slots=True)
class ReplyHead:
    """What the server knows about a reply before it begins."""

    id: str
    """Unique; a dialect adds its own prefix."""
    model: str
    created: int

    @property
    def request(self) -> RequestId:
        """The request's id in the log and in the engine."""
        return RequestId(f"req_{self.id}")


class Encoder(Protocol):
    """Renders one stream, piece by piece. Owner: the task that writes it."""

    def feed(self, events: Sequence[Event]) -> bytes:
        """The frames for these events.

        No events at all means silence: render something harmless that keeps the connection alive.
        Ended or Failed is the last event, and ends the stream in the dialect's way. A stream whose
        client is gone receives a Failed, too, though nobody reads its frames.
        """
        ...


class ApiCall(Protocol):
    """A decoded body: what to generate, and how to show it."""

    @property
    def requests(self) -> tuple[GenerateRequest, ...]:
        """They run side by side; choices are numbered across all of them. Empty only for a
        `LoadCall`."""
        ...

    @property
    def stream(self) -> bool: ...

    @property
    def background(self) -> bool:
        """Whether to answer immediately with the fold of no events, and fold the whole reply when
        it is done."""
        ...

    @property
    def ignored(self) -> tuple[str, ...]:
        """Fields of the body that firn does not know; logged at DEBUG."""
        ...

    def encoder(self, head: ReplyHead) -> Encoder: ...

    def fold(self, head: ReplyHead, events: Iterable[Event]) -> dict[str, Any]:
        """The whole reply as one body, from the events of a stream up to Ended.

        For a background call, also from no events, or from those of a stream that Failed.
        """
        ...


@runtime_checkable
class LoadCall(Protocol):
    """What an `ApiCall` may have in addition, if it may ask only to load or unload a model."""

    @property
    def loads(self) -> str | None:
        """The name of that model, empty for the served one; None: the call has requests."""
        ...


@runtime_checkable
class KeepingCall(Protocol):
    """What an `ApiCall` may have in addition, if its encoder keeps what it has rendered."""

    @property
    def keep(self) -> Callable[[Any], None]:
        """Called with the reply."""
        ...


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """A request to a JsonRoute. namespace: the caller's key_id, which no other key shares. body: empty
    if the route has no schema."""

    namespace: Namespace
    path: Mapping[str, str] = field(default_factory=dict)
    query: Mapping[str, str] = field(default_factory=dict)
    body: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class JsonRoute:
    """A route that does not generate: JSON in, JSON out. path: may contain {parameters}.

    schema: JSON schema of the body, with an example; None: there is no body. computes: the model has to
    compute, and the answer's usage reports how much.
    """

    method: Literal["GET", "POST", "DELETE"]
    path: str
    summary: str
    answer: Callable[[RouteRequest], Awaitable[Mapping[str, Any] | bytes]]
    """bytes: the answer as JSON."""
    schema: Mapping[str, Any] | None = None
    computes: bool = False


class Dialect(Protocol):
    """The wire format of one API. One instance per app."""

    path: str
    """The path that clients POST to."""
    summary: str
    tool_id_prefix: str
    stream_headers: tuple[tuple[bytes, bytes], ...]
    """Headers of a streamed reply."""
    inline_nbytes: int
    """A larger body is decoded in the pool."""

    def decode(self, body: Mapping[str, Any], *, namespace: Namespace) -> ApiCall:
        """Raises InvalidValue and other BadRequests. namespace: see `RouteRequest`."""
        ...

    def render_error(self, error: FirnError) -> dict[str, Any]:
        """The body of an error response."""
        ...

    def schema(self) -> dict[str, Any]:
        """JSON schema of the body, for /openapi.json."""
        ...

    def routes(self, services: Services) -> Sequence[JsonRoute]:
        """Further routes of this API, below `path`: errors there have this API's shape."""
        ...


def discover(defaults: Defaults = PLAIN_DEFAULTS) -> list[Dialect]:
    """A fresh instance of every dialect in this folder."""
    dialects: list[Dialect] = []
    for module in pkgutil.iter_modules(__path__):
        if not module.name.startswith("_"):
            make: Callable[[Defaults], Dialect]
            make = importlib.import_module(f"{__name__}.{module.name}").DIALECT
            dialects.append(make(defaults))
    return dialects
