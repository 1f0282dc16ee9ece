"""The cache's counters for /metrics, and the memory below it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

Snapshot = Callable[[], Mapping[str, Any]]
"""Counters as they are now; empty without a cache. Must not block."""

COUNTED = {
    "hits": ("Lookups that reused something, by kind", "kind"),
    "misses": ("Lookups that reused nothing, by reason", "reason"),
    "shortfalls": ("Lookups that reused less than was shared, by reason", "reason"),
    "evictions": ("Records that left memory, by part", "part"),
    "commits": ("Records stored, by part", "part"),
    "dropped": ("Records not kept, by reason", "reason"),
    "faults": ("Faults that cost a miss, by place", "place"),
}


def own_snapshot(stats: Mapping[str, Any]) -> Mapping[str, Any]:
    """Counters from what /v1/cache/stats says about one namespace."""
    if not stats.get("enabled"):
        return {}
    parts = {part: held["bytes"] for part, held in stats["memory"]["parts"].items()}
    return {**stats, "bytes": {"memory": parts}}


class CacheMetrics(Collector):
    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterable[Metric]:
        seen = self._snapshot()
        if not seen:
            return
        for name, (text, label) in COUNTED.items():
            family = CounterMetricFamily(f"firn_cache_{name}", text, labels=[label])
            for value, n in sorted(seen[name].items()):
                family.add_metric([value], n)
            yield family
        tokens = CounterMetricFamily(
            "firn_cache_tokens", "Prompt tokens, by origin", labels=["from"]
        )
        n_cached = 0
        for tier, n in sorted(seen["tokens"]["by_tier"].items()):
            tokens.add_metric([tier], n)
            n_cached += n
        tokens.add_metric(["computed"], max(seen["tokens"]["prompt"] - n_cached, 0))
        yield tokens
        yield CounterMetricFamily(
            "firn_cache_seconds_saved", "Prefill time saved, estimated", value=seen["seconds_saved"]
        )
        held = GaugeMetricFamily(
            "firn_cache_bytes", "Bytes held, by tier and part", labels=["tier", "part"]
        )
        for tier, parts in seen["bytes"].items():
            for part, n in parts.items():
                held.add_metric([tier, part], n)
        yield held
        yield from _of_tiers(seen)


def _of_tiers(seen: Mapping[str, Any]) -> Iterable[Metric]:
    """For the operator only: all callers share the tiers."""
    if "limits" not in seen:
        return
    limits = GaugeMetricFamily("firn_cache_limit_bytes", "Most that a tier holds", labels=["tier"])
    for tier, n in seen["limits"].items():
        limits.add_metric([tier], n)
    yield limits
    operations = CounterMetricFamily(
        "firn_tier_operations",
        "What a tier below memory has done, by kind",
        labels=["tier", "kind"],
    )
    moved = CounterMetricFamily(
        "firn_tier_bytes", "Bytes that a tier has written, read, evicted", labels=["tier", "kind"]
    )
    for tier, counts in seen["operations"].items():
        for kind, n in sorted(counts.items()):
            is_bytes = kind.startswith("bytes_")
            (moved if is_bytes else operations).add_metric([tier, kind.removeprefix("bytes_")], n)
    yield operations
    yield moved


class MemoryMetrics(Collector):
    def __init__(self, allocated: Callable[[], Mapping[str, int]]) -> None:
        """allocated: bytes by kind, from any thread."""
        self._allocated = allocated

    def collect(self) -> Iterable[Metric]:
        family = GaugeMetricFamily(
            "firn_mlx_bytes",
            "Memory of MLX's allocator: in use (active), or kept for reuse (cached)",
            labels=["kind"],
        )
        for kind, n in self._allocated().items():
            family.add_metric([kind], n)
        yield family
