"""What /metrics shows: everything to the operator, their own numbers to other callers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from firn.api.calls.event_router import EventRouter
from firn.core.ports import Engine
from firn.core.values import Namespace, Usage

FIRST_TOKEN_BUCKETS = (0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)
CALLS = "Calls in progress."


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


class Counters:
    """Requests and tokens of one caller, or of all. Owner: Metrics."""

    def __init__(self, *collectors: Collector) -> None:
        self.registry = CollectorRegistry()
        self._requests = Counter(
            "firn_requests",
            "HTTP requests by route and status.",
            ["route", "status"],
            registry=self.registry,
        )
        self._first_token = Histogram(
            "firn_first_token_seconds",
            "From the arrival of a request to its first token.",
            buckets=FIRST_TOKEN_BUCKETS,
            registry=self.registry,
        )
        self._tokens = Counter(
            "firn_tokens",
            "Tokens by kind; cached and skipped are of prompt, reasoning and accepted of completion.",
            ["kind"],
            registry=self.registry,
        )
        self._gone = Counter(
            "firn_clients_gone",
            "Requests whose client disconnected before the end.",
            registry=self.registry,
        )
        for collector in collectors:
            self.registry.register(collector)

        self.n_generated = 0

    def request(self, route: str, status: int, *, gone: bool) -> None:
        self._requests.labels(route, str(status)).inc()
        if gone:
            self._gone.inc()

    def call(self, usage: Usage, *, first_token_s: float | None) -> None:
        self._tokens.labels("prompt").inc(usage.n_prompt)
        self._tokens.labels("cached").inc(usage.n_cached)
        self._tokens.labels("skipped").inc(usage.n_skipped)
        self._tokens.labels("completion").inc(usage.n_completion)
        self.n_generated += usage.n_completion
        self._tokens.labels("reasoning").inc(usage.n_reasoning)
        self._tokens.labels("drafted").inc(usage.n_drafted)
        self._tokens.labels("accepted").inc(usage.n_accepted)
        if first_token_s is not None:
            self._first_token.observe(first_token_s)


class Metrics:
    """Owner of the HTTP side's counters. One per app, on the asyncio thread."""

    def __init__(
        self,
        engine: Engine,
        event_router: EventRouter,
        *,
        n_calls: Callable[[Namespace], int] = lambda key_id: 0,
        extra: Iterable[Collector] = (),
    ) -> None:
        """n_calls: how many calls a key has open."""
        self._everything = Counters(_EngineGauges(engine, event_router), *extra)
        self._n_calls = n_calls
        self._by_key: dict[Namespace, Counters] = {}

    def count_request(self, key_id: Namespace, route: str, status: int, *, gone: bool) -> None:
        for counters in (self._everything, self._of(key_id)):
            counters.request(route, status, gone=gone)

    def count_call(self, key_id: Namespace, usage: Usage, *, first_token_s: float | None) -> None:
        for counters in (self._everything, self._of(key_id)):
            counters.call(usage, first_token_s=first_token_s)

    @property
    def n_generated(self) -> int:
        """Tokens of all replies that have ended."""
        return self._everything.n_generated

    def render(self) -> bytes:
        """For the operator."""
        return generate_latest(self._everything.registry)

    def render_own(self, key_id: Namespace, *, extra: Iterable[Collector] = ()) -> bytes:
        """For one caller: the counters of its key, and those of `extra`."""
        registry = CollectorRegistry()
        for collector in extra:
            registry.register(collector)
        return generate_latest(self._of(key_id).registry) + generate_latest(registry)

    def _of(self, key_id: Namespace) -> Counters:
        """One per key, and one for all callers without a known key: a bounded number."""
        if key_id not in self._by_key:
            self._by_key[key_id] = Counters(_CallGauge(lambda: self._n_calls(key_id)))
        return self._by_key[key_id]


class _CallGauge(Collector):
    def __init__(self, n_calls: Callable[[], int]) -> None:
        self._n_calls = n_calls

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("firn_calls", CALLS, value=self._n_calls())


class _EngineGauges(Collector):
    """Gauges read on demand, so that nothing has to keep them up to date."""

    def __init__(self, engine: Engine, event_router: EventRouter) -> None:
        self._engine = engine
        self._event_router = event_router

    def describe(self) -> Iterable[Metric]:
        return ()  # otherwise registering would read an engine that has not started

    def collect(self) -> Iterator[Metric]:
        health = self._engine.health()
        jobs = GaugeMetricFamily("firn_jobs", "Jobs in the engine by stage.", labels=["stage"])
        jobs.add_metric(["waiting"], health.n_waiting)
        jobs.add_metric(["prefilling"], health.n_prefilling)
        jobs.add_metric(["decoding"], health.n_decoding)
        yield jobs
        yield GaugeMetricFamily("firn_calls", CALLS, value=self._event_router.n_calls)
        yield GaugeMetricFamily(
            "firn_engine_alive", "1 while the engine thread is alive.", value=float(health.alive)
        )
        yield GaugeMetricFamily(
            "firn_engine_last_step_age_seconds",
            "Time since the engine's last step.",
            value=health.last_step_age_s,
        )
