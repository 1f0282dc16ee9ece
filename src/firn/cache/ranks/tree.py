"""Rank 0's tree: that of one process, whose payloads and tiers the other ranks have their part in.

Owner: the engine thread.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from firn.cache.prefix import PrefixTree
from firn.cache.ranks.io import RankIo
from firn.cache.ranks.mirror import Mirror, number_of
from firn.cache.storage.container import Name
from firn.cache.storage.io import Io
from firn.core.ports import EngineLoad


class MirroredTree(PrefixTree):
    mirror: Mirror
    flush: Callable[[], None]

    def lead(self, mirror: Mirror, flush: Callable[[], None]) -> MirroredTree:
        """flush: sends what waits to be told."""
        self.mirror, self.flush = mirror, flush
        return self

    def add_tier(self, name: str, io: Io, **more: Any) -> None:
        super().add_tier(name, io, **more)
        if isinstance(io, RankIo):
            self.records.tiers[-1].received = io.received

    def tick(self, load: EngineLoad) -> None:
        super().tick(load)
        self.mirror.tell_dropped()
        self.flush()

    def number_of(self, name: Name) -> int:
        """The payload of a record that memory holds. Raises LookupError."""
        node = self.records.tree.find(name.key)
        if node is None or name.part not in node.records:
            raise LookupError(f"{name} is not in memory")
        return number_of(node.records[name.part].arrays)

    def close(self) -> None:
        if not self.mirror.is_over:  # without the others nothing more can be stored
            super().close()
