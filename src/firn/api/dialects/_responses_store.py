"""Keeps responses for previous_response_id, for GET, and for background calls."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from firn.core.errors import InvalidValue, NotFound
from firn.core.units import MIB
from firn.core.values import Namespace, RequestId

MAX_COUNT = 1000
MAX_NBYTES = 64 * MIB
MAX_LINKS = 1000
"""Responses of one conversation that are followed, each to the one before it."""
OVERHEAD_NBYTES = 512
"""Memory of an entry in addition to its items and response."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response as JSON: the input items of its own request, not those of earlier ones; its output
    items; and the rest, without `output`. A later turn reads the items of all turns, but not the
    rest, which repeats the tools every time."""

    id: str
    request: RequestId
    previous: str | None
    is_running: bool
    items: bytes
    outputs: bytes
    response: bytes
    item_ids: frozenset[str]

    @property
    def nbytes(self) -> int:
        return len(self.items) + len(self.outputs) + len(self.response) + OVERHEAD_NBYTES

    def input(self) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = json.loads(self.items)
        return items

    def body(self) -> bytes:
        return b'%b, "output": %b}' % (self.response[:-1], self.outputs)

    def output(self) -> list[dict[str, Any]]:
        items: list[dict[str, Any]] = json.loads(self.outputs)
        return items


@dataclass(slots=True)
class _NamespaceResponses:
    """One namespace's responses; the first entry is evicted first."""

    entries: OrderedDict[str, StoredResponse] = field(default_factory=OrderedDict)
    nbytes: int = 0

    def put(self, stored: StoredResponse) -> None:
        self.take(stored.id)
        self.entries[stored.id] = stored
        self.nbytes += stored.nbytes

    def take(self, id: str) -> StoredResponse | None:
        old = self.entries.pop(id, None)
        self.nbytes -= old.nbytes if old else 0
        return old


class ResponseStore:
    """Owner: the dialect, so one per app. Thread-safe, since large bodies are decoded in the pool.

    Each namespace has its own limits. The least recently used response is evicted first, and one
    that continues another before that other: a conversation loses its end, never its beginning.
    """

    def __init__(self, *, max_count: int = MAX_COUNT, max_nbytes: int = MAX_NBYTES) -> None:
        self._max_count = max_count
        self._max_nbytes = max_nbytes
        self._by_namespace: dict[Namespace, _NamespaceResponses] = {}
        self._lock = threading.RLock()

    def put(self, namespace: Namespace, stored: StoredResponse) -> None:
        """Keep it, evicting others if necessary. One that is too large by itself is not kept."""
        with self._lock:
            responses = self._by_namespace.setdefault(namespace, _NamespaceResponses())
            if stored.nbytes > self._max_nbytes or self._max_count < 1:
                responses.take(stored.id)
                return
            responses.put(stored)
            self._touch(responses, stored)
            while len(responses.entries) > self._max_count or responses.nbytes > self._max_nbytes:
                responses.take(next(iter(responses.entries)))

    def update(self, namespace: Namespace, stored: StoredResponse) -> None:
        """Replace it, unless it has been deleted in the meantime."""
        with self._lock:
            if stored.id in self._of(namespace).entries:
                self.put(namespace, stored)

    def get(self, namespace: Namespace, id: str) -> StoredResponse:
        """Raises NotFound, even if another namespace has this response."""
        with self._lock:
            stored = self._of(namespace).entries.get(id)
            if stored is None:
                raise NotFound(f"You have no response {id[:64]!r}.", param="response_id")
            return stored

    def drop(self, namespace: Namespace, id: str) -> StoredResponse:
        with self._lock:
            stored = self.get(namespace, id)
            self._of(namespace).take(id)
            return stored

    def conversation(self, namespace: Namespace, id: str) -> Sequence[StoredResponse]:
        """This response and all those it continues, oldest first. Raises InvalidValue."""
        with self._lock:
            responses = self._of(namespace)
            chain = list(self._chain(responses, id))
            first = chain[-1] if chain else None
            if first is None or first.previous is not None:
                missing = id if first is None else first.previous
                raise InvalidValue(
                    "previous_response_id",
                    f"response {str(missing)[:64]!r} does not exist or was evicted",
                )
            if chain[0].is_running:
                raise InvalidValue("previous_response_id", "that response is still being generated")
            self._touch(responses, chain[0])
            return chain[::-1]

    def item(self, namespace: Namespace, id: str) -> dict[str, Any] | None:
        """An output item by its id, the newest if there are several; None: there is none."""
        with self._lock:
            for stored in reversed(self._of(namespace).entries.values()):
                if id in stored.item_ids:
                    return next(item for item in stored.output() if item["id"] == id)
            return None

    def _of(self, namespace: Namespace) -> _NamespaceResponses:
        return self._by_namespace.get(namespace) or _NamespaceResponses()

    def _chain(self, responses: _NamespaceResponses, id: str | None) -> Iterator[StoredResponse]:
        for _ in range(MAX_LINKS):
            stored = responses.entries.get(id) if id is not None else None
            if stored is None:
                return
            yield stored
            id = stored.previous

    def _touch(self, responses: _NamespaceResponses, stored: StoredResponse) -> None:
        for link in self._chain(responses, stored.id):
            responses.entries.move_to_end(link.id)
