"""--kv-events: routers are told which blocks are stored."""

from __future__ import annotations

from firn.assembly.extras import Extra
from firn.cache.prefix import PrefixCache


class KVEvents(Extra):
    def watch(self, cache: PrefixCache) -> None:
        address = self.config.cache.kv_events
        if address is None:
            return
        from firn.kv_events import EventPublisher

        cache.records.tree.announcer = EventPublisher(address)


EXTRA = KVEvents
