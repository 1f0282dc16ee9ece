"""The cache's counters and MLX's memory, for /metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

Snapshot = Callable[[], Mapping[str, Any]]
"""The counters now; empty without a cache. Must not block."""

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
    """The counters of one namespace, from its /v1/cache/stats."""
    if not stats.get("enabled"):
        return {}
    parts = {name: part["bytes"] for name, part in stats["memory"]["parts"].items()}
    return {**stats, "bytes": {"memory": parts}}


class CacheMetrics(Collector):
    def __init__(self, snapshot: Snapshot) -> None:
        self._snapshot = snapshot

    def collect(self) -> Iterable[Metric]:
        counters = self._snapshot()
        if not counters:
            return
        for name, (text, label) in COUNTED.items():
            family = CounterMetricFamily(f"firn_cache_{name}", text, labels=[label])
            for value, n in sorted(counters[name].items()):
                family.add_metric([value], n)
            yield family
        tokens = CounterMetricFamily(
            "firn_cache_tokens", "Prompt tokens, by origin", labels=["from"]
        )
        n_cached = 0
        for tier, n in sorted(counters["tokens"]["by_tier"].items()):
            tokens.add_metric([tier], n)
            n_cached += n
        tokens.add_metric(["computed"], max(counters["tokens"]["prompt"] - n_cached, 0))
        yield tokens
        yield CounterMetricFamily(
            "firn_cache_seconds_saved",
            "Prefill time saved, estimated",
            value=counters["seconds_saved"],
        )
        stored = GaugeMetricFamily(
            "firn_cache_bytes", "Bytes held, by tier and part", labels=["tier", "part"]
        )
        for tier, parts in counters["bytes"].items():
            for part, n in parts.items():
                stored.add_metric([tier, part], n)
        yield stored
        yield from _tier_metrics(counters)


def _tier_metrics(counters: Mapping[str, Any]) -> Iterable[Metric]:
    """For the operator only: all callers share the tiers."""
    if "limits" not in counters:
        return
    limits = GaugeMetricFamily("firn_cache_limit_bytes", "Capacity of a tier", labels=["tier"])
    for tier, n in counters["limits"].items():
        limits.add_metric([tier], n)
    yield limits
    operations = CounterMetricFamily(
        "firn_tier_operations",
        "Operations of a tier below memory, by kind",
        labels=["tier", "kind"],
    )
    moved = CounterMetricFamily(
        "firn_tier_bytes",
        "Bytes that a tier has written, read and evicted",
        labels=["tier", "kind"],
    )
    for tier, counts in counters["operations"].items():
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
