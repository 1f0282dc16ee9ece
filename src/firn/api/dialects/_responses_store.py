"""Responses kept for later: for previous_response_id, for GET, for who asked in the background."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from firn.core.errors import InvalidValue, NotFound
from firn.core.values import Namespace, RequestId

MAX_COUNT = 1000
MAX_NBYTES = 64 * 2**20
MAX_LINKS = 1000
OVERHEAD_NBYTES = 512
"""What an entry takes besides its two texts."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A response as JSON, and the items it was asked with: its own, not those of the ones before."""

    id: str
    request: RequestId
    previous: str | None
    is_running: bool
    items: bytes
    response: bytes
    item_ids: frozenset[str]

    @property
    def nbytes(self) -> int:
        return len(self.items) + len(self.response) + OVERHEAD_NBYTES

    def input(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = json.loads(self.items)
        return found

    def body(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.response)
        return found

    def output(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.body()["output"]
        return found


@dataclass(slots=True)
class _Shelf:
    """One namespace's entries, the one to go first in front."""

    entries: OrderedDict[str, Stored] = field(default_factory=OrderedDict)
    nbytes: int = 0

    def put(self, stored: Stored) -> None:
        self.take(stored.id)
        self.entries[stored.id] = stored
        self.nbytes += stored.nbytes

    def take(self, id: str) -> Stored | None:
        old = self.entries.pop(id, None)
        self.nbytes -= old.nbytes if old else 0
        return old


class ResponseStore:
    """Owner: the dialect, so one per app. Thread-safe: large bodies are decoded in the tokenize pool.

    Each namespace has a shelf of its own with its own limits. Who is asked for last goes last, and
    who continues another goes before it: a conversation loses its end first, never its beginning.
    """

    def __init__(self, *, max_count: int = MAX_COUNT, max_nbytes: int = MAX_NBYTES) -> None:
        self._max_count = max_count
        self._max_nbytes = max_nbytes
        self._shelves: dict[Namespace, _Shelf] = {}
        self._lock = threading.RLock()

    def put(self, namespace: Namespace, stored: Stored) -> None:
        """Keep it, and let others go; what is too large by itself is not kept."""
        with self._lock:
            shelf = self._shelves.setdefault(namespace, _Shelf())
            if stored.nbytes > self._max_nbytes or self._max_count < 1:
                shelf.take(stored.id)
                return
            shelf.put(stored)
            self._touch(shelf, stored)
            while len(shelf.entries) > self._max_count or shelf.nbytes > self._max_nbytes:
                shelf.take(next(iter(shelf.entries)))

    def update(self, namespace: Namespace, stored: Stored) -> None:
        """Put it where it is still there: what was deleted meanwhile stays so."""
        with self._lock:
            if stored.id in self._shelf(namespace).entries:
                self.put(namespace, stored)

    def get(self, namespace: Namespace, id: str) -> Stored:
        """Raises NotFound: also for what is somebody else's."""
        with self._lock:
            found = self._shelf(namespace).entries.get(id)
            if found is None:
                raise NotFound(f"There is no response {id[:64]!r} of yours.", param="response_id")
            return found

    def drop(self, namespace: Namespace, id: str) -> Stored:
        with self._lock:
            found = self.get(namespace, id)
            self._shelf(namespace).take(id)
            return found

    def conversation(self, namespace: Namespace, id: str) -> Sequence[Stored]:
        """This response and all it continues, the first one first."""
        with self._lock:
            shelf = self._shelf(namespace)
            chain = list(self._chain(shelf, id))
            first = chain[-1] if chain else None
            if first is None or first.previous is not None:
                missing = id if first is None else first.previous
                raise InvalidValue(
                    "previous_response_id", f"there is no response {str(missing)[:64]!r} (any more)"
                )
            if chain[0].is_running:
                raise InvalidValue("previous_response_id", "that response is still being made")
            self._touch(shelf, chain[0])
            return chain[::-1]

    def item(self, namespace: Namespace, id: str) -> dict[str, Any] | None:
        """An output item by its id, the newest where there are several."""
        with self._lock:
            for stored in reversed(self._shelf(namespace).entries.values()):
                if id in stored.item_ids:
                    return next(item for item in stored.output() if item["id"] == id)
            return None

    def _shelf(self, namespace: Namespace) -> _Shelf:
        return self._shelves.get(namespace) or _Shelf()

    def _chain(self, shelf: _Shelf, id: str | None) -> Iterator[Stored]:
        for _ in range(MAX_LINKS):
            stored = shelf.entries.get(id) if id is not None else None
            if stored is None:
                return
            yield stored
            id = stored.previous

    def _touch(self, shelf: _Shelf, stored: Stored) -> None:
        for link in self._chain(shelf, stored.id):
            shelf.entries.move_to_end(link.id)
