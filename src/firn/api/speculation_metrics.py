"""Drafted tokens for /metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector


class SpeculationMetrics(Collector):
    def __init__(self, snapshot: Callable[[], Mapping[str, int]]) -> None:
        """snapshot: see `DraftTotals.view`; empty if nothing is ever drafted. Must not block."""
        self._snapshot = snapshot

    def collect(self) -> Iterable[Metric]:
        totals = self._snapshot()
        steps = CounterMetricFamily(
            "firn_decode_steps", "Decode steps of groups of rows, by kind", labels=["kind"]
        )
        if totals:
            steps.add_metric(["plain"], totals["steps"] - totals["draft_steps"])
            steps.add_metric(["drafts"], totals["draft_steps"])
        yield steps
        tokens = CounterMetricFamily(
            "firn_speculation_tokens",
            "Tokens of decode steps: drafted, accepted, and taken in total; "
            "row_steps is how many there would be at one per step",
            labels=["kind"],
        )
        for kind in ("drafted", "accepted", "taken", "row_steps") if totals else ():
            tokens.add_metric([kind], totals[kind])
        yield tokens
