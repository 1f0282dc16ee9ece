"""API dialects: one file each, found by being here.

A module of this package whose name has no leading underscore defines a class with the methods of
`Dialect` and names it in `DIALECT`. It is made with the `Defaults` that hold where a body says nothing.
The contract tests find it by themselves.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from firn.api.services import Services
from firn.core.errors import FirnError
from firn.core.events import Event
from firn.core.values import PLAIN_DEFAULTS, Defaults, GenerateRequest, Namespace, RequestId


@dataclass(frozen=True, slots=True)
class ReplyHead:
    """What the server knows about a reply before it begins."""

    id: str
    """Unique; a dialect puts its own prefix before it."""
    model: str
    created: int

    @property
    def request(self) -> RequestId:
        """What the log and the engine call it."""
        return RequestId(f"req_{self.id}")


class Encoder(Protocol):
    """Renders one stream, piece by piece. Owned by the task that writes it."""

    def feed(self, events: Sequence[Event]) -> bytes:
        """The frames for these events, to be written at once.

        No events at all means silence: the answer is something harmless that keeps the connection
        alive. Ended or Failed is the last event, and closes the stream in the dialect's own way; a
        stream whose client has gone is fed a Failed too, though nobody reads the frames.
        """
        ...


class ApiCall(Protocol):
    """A decoded body: what to generate, and how to show it."""

    @property
    def requests(self) -> tuple[GenerateRequest, ...]:
        """Run side by side; the choices of the second are numbered after those of the first. Empty:
        the reply only says that the model is there."""
        ...

    @property
    def stream(self) -> bool: ...

    @property
    def background(self) -> bool:
        """Answer with the fold of no events at once, and fold the whole reply when it is done."""
        ...

    @property
    def ignored(self) -> tuple[str, ...]:
        """Fields of the body that firn does not know; logged at DEBUG."""
        ...

    def encoder(self, head: ReplyHead) -> Encoder: ...

    def fold(self, head: ReplyHead, events: Iterable[Event]) -> dict[str, Any]:
        """The whole reply as one body, from the events of a stream that Ended.

        Of a call in the background also those of a stream that has not begun, or that Failed.
        """
        ...


@dataclass(frozen=True, slots=True)
class RouteRequest:
    """A request to a JsonRoute. `body` is empty where the route has no schema; `namespace` is the
    caller's own, which it shares with nobody."""

    namespace: Namespace
    path: Mapping[str, str] = field(default_factory=dict)
    query: Mapping[str, str] = field(default_factory=dict)
    body: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class JsonRoute:
    """A route that generates nothing: JSON in, JSON out. `path` may hold {parameters}.

    schema: JSON schema of the body, with an example; None: there is no body. computes: the model works
    for it, and the answer's usage says how much.
    """

    method: Literal["GET", "POST", "DELETE"]
    path: str
    summary: str
    answer: Callable[[RouteRequest], Awaitable[Mapping[str, Any]]]
    schema: Mapping[str, Any] | None = None
    computes: bool = False


class Dialect(Protocol):
    """One API's way of asking and answering. One instance per app."""

    path: str
    """POST here."""
    summary: str
    tool_id_prefix: str
    stream_headers: tuple[tuple[bytes, bytes], ...]
    """Of a reply that is a stream."""

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
        """What this API has besides its POST, below `path`: errors there have this API's shape."""
        ...


def discover(defaults: Defaults = PLAIN_DEFAULTS) -> list[Dialect]:
    """A fresh instance of every dialect in this folder."""
    found: list[Dialect] = []
    for module in pkgutil.iter_modules(__path__):
        if not module.name.startswith("_"):
            make: Callable[[Defaults], Dialect]
            make = importlib.import_module(f"{__name__}.{module.name}").DIALECT
            found.append(make(defaults))
    return found
