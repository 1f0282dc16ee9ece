"""Who watches calls: the only list of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from firn.api.calls.observer import Observer
from firn.api.calls.prepared import ReplyPlan
from firn.api.calls.progress import CallProgress
from firn.api.calls.tally import CallTally, RecordedCall
from firn.api.calls.think_budget import ThinkBudgets
from firn.api.calls.unread_calls import UnreadCallWarnings
from firn.api.http.exchange import Exchange
from firn.api.observe.activity import Activity
from firn.api.observe.metrics import Metrics
from firn.api.services import Services
from firn.core.values import Namespace


def observers_of_requests(
    plans: Sequence[ReplyPlan], services: Services, key_id: Namespace
) -> Iterator[Observer]:
    """Those that requests need, whoever sends them."""
    if any(plan.think_limit for plan in plans):
        yield ThinkBudgets(services.engine)
    if any(plan.tools for plan in plans):
        yield UnreadCallWarnings(services, key_id)


def observers_of_client(
    exchange: Exchange,
    progress: CallProgress,
    *,
    services: Services,
    metrics: Metrics,
    activity: Activity,
) -> Iterator[Observer]:
    """Those of a client's call, in addition: what of it is counted, recorded and shown."""
    yield CallTally(exchange, progress, metrics)
    if services.telemetry.recorder is not None:
        yield RecordedCall(exchange, progress, services.telemetry.recorder)
    yield activity.follow(exchange, progress)
