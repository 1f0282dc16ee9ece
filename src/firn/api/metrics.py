"""What /metrics shows. Own registry, no globals."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from firn.api.mailroom import Mailroom
from firn.core.ports import Engine
from firn.core.values import Usage

FIRST_TOKEN_BUCKETS = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)


class Metrics:
    """Owner of the counters of the HTTP side; one per app, asyncio thread."""

    def __init__(
        self, engine: Engine, mailroom: Mailroom, *, extra: Iterable[Collector] = ()
    ) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "firn_requests",
            "HTTP requests by route and status.",
            ["route", "status"],
            registry=self._registry,
        )
        self._first_token = Histogram(
            "firn_first_token_seconds",
            "From the arrival of a request to its first token.",
            buckets=FIRST_TOKEN_BUCKETS,
            registry=self._registry,
        )
        self._tokens = Counter(
            "firn_tokens",
            "Tokens by kind; cached is a part of prompt, reasoning of completion.",
            ["kind"],
            registry=self._registry,
        )
        self._gone = Counter(
            "firn_clients_gone",
            "Requests whose client went away before the end.",
            registry=self._registry,
        )
        self._registry.register(_Live(engine, mailroom))
        for collector in extra:
            self._registry.register(collector)

    def count_request(self, route: str, status: int) -> None:
        self._requests.labels(route, str(status)).inc()

    def count_gone(self) -> None:
        self._gone.inc()

    def count_call(self, usage: Usage, *, first_token_s: float | None) -> None:
        self._tokens.labels("prompt").inc(usage.n_prompt)
        self._tokens.labels("cached").inc(usage.n_cached)
        self._tokens.labels("completion").inc(usage.n_completion)
        self._tokens.labels("reasoning").inc(usage.n_reasoning)
        if first_token_s is not None:
            self._first_token.observe(first_token_s)

    def render(self) -> bytes:
        return generate_latest(self._registry)


class _Live(Collector):
    """Gauges read when asked for, so that nothing has to keep them up to date."""

    def __init__(self, engine: Engine, mailroom: Mailroom) -> None:
        self._engine = engine
        self._mailroom = mailroom

    def describe(self) -> Iterable[Metric]:
        return ()  # registering must not ask an engine that has not started

    def collect(self) -> Iterator[Metric]:
        health = self._engine.health()
        jobs = GaugeMetricFamily("firn_jobs", "Jobs in the engine by stage.", labels=["stage"])
        jobs.add_metric(["waiting"], health.n_waiting)
        jobs.add_metric(["prefilling"], health.n_prefilling)
        jobs.add_metric(["decoding"], health.n_decoding)
        yield jobs
        yield GaugeMetricFamily(
            "firn_calls", "Calls accepted and not ended.", value=self._mailroom.n_calls
        )
        yield GaugeMetricFamily(
            "firn_engine_alive", "1 while the engine thread lives.", value=float(health.alive)
        )
        yield GaugeMetricFamily(
            "firn_engine_last_step_age_seconds",
            "Since the engine's last step.",
            value=health.last_step_age_s,
        )
