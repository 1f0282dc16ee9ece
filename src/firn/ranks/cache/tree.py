"""Rank 0's tree: like a single process's, but other ranks hold slices of its payloads and tiers.

Owner: the engine thread.
"""

from __future__ import annotations

from collections.abc import Callable

from firn.cache.prefix import CacheSettings, PrefixCache
from firn.core.ports import EngineLoad
from firn.ranks.cache.mirror import MirroredLayout


class MirroredTree(PrefixCache):
    def __init__(
        self,
        layout: MirroredLayout,
        settings: CacheSettings,
        *,
        fingerprint: bytes,
        dtype: str,
        flush: Callable[[], None],
    ) -> None:
        """flush: sends the calls that are still queued for the other ranks."""
        super().__init__(layout, settings, fingerprint=fingerprint, dtype=dtype)
        self._mirror = layout.mirror
        self._flush = flush

    def tick(self, load: EngineLoad) -> None:
        super().tick(load)
        self._mirror.tell_dropped()
        self._flush()

    def close(self) -> None:
        if not self._mirror.is_over:  # without the others nothing more can be stored
            super().close()
