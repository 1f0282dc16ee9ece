"""What may watch a call: counters, log lines, warnings, limits of thinking, the dashboard."""

from __future__ import annotations

from collections.abc import Sequence

from firn.api.calls.running import RunningRequest
from firn.core.events import EngineEvent, Event
from firn.core.values import Job


class Observer:
    """Watches one call, on the asyncio thread. Does nothing by itself. Owner: the call's session."""

    def submitted(self, run: RunningRequest, job: Job) -> None:
        """The engine was given this request."""

    def observe(self, run: RunningRequest, event: EngineEvent, shown: Sequence[Event]) -> None:
        """The request has read an event; shown: what comes of it for the client. Not called for
        tokens that were computed after the end of their reply."""

    def close(self) -> None:
        """The call is over, however it ended. Called once."""
