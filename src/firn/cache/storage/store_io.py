"""A shared store behind I/O threads: a tier in which records can be looked up by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar, runtime_checkable

from firn.cache.storage.container import Name
from firn.cache.storage.io import TierIo
from firn.cache.storage.seal import Seal
from firn.cache.storage.threads import Done, IoThreads
from firn.cache.tiers import FoundRecord, Store

T = TypeVar("T")
Find = Callable[[Sequence[Name]], Mapping[Name, FoundRecord]]
"""Which of these records a store has. Called on an I/O thread; raises TierFault."""


@runtime_checkable
class Searchable(Protocol):
    """An `Io` whose records are found by looking up their names."""

    @property
    def deadline_s(self) -> float:
        """No request waits longer than this for the store."""
        ...

    def ask(self, search: Callable[[Find], T], done: Done[T]) -> None:
        """Run a search on an I/O thread."""
        ...


class StoreIo(TierIo):
    """Implements Io and Searchable. Owner: the cache, on the engine thread."""

    def __init__(
        self,
        store: Store,
        threads: IoThreads,
        *,
        seal: Seal | None = None,
        flush_timeout_s: float = 10.0,
    ) -> None:
        super().__init__(store, threads, seal=seal, flush_timeout_s=flush_timeout_s)
        self._store = store

    @property
    def deadline_s(self) -> float:
        return self._store.deadline_s

    def ask(self, search: Callable[[Find], T], done: Done[T]) -> None:
        self.threads.read(lambda: search(self._find), done)

    def _find(self, names: Sequence[Name]) -> dict[Name, FoundRecord]:
        by_text = {str(name): name for name in names}
        usable = [text for text in by_text if text not in self._foreign]
        records = self._store.find(usable)
        return {by_text[r.name]: r for r in records if r.name in by_text}
