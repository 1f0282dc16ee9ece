"""How far a call has come: for quotas, the log line, the dashboard, and whoever reads its reply."""

from __future__ import annotations

import time
from collections.abc import Sequence

from firn.api.calls.observer import Observer
from firn.api.calls.running import RunningRequest
from firn.core.events import AdmissionTimes, Admitted, Ended, EngineEvent, Event, Failed, Token
from firn.core.values import Job, Usage


class CallProgress(Observer):
    """Owner: the call's session. Remains readable when that is closed. Times are from
    `time.perf_counter`; None: not yet."""

    def __init__(self, n_requests: int) -> None:
        self.runs: list[RunningRequest] = []
        """Those of its requests that the engine was given."""
        self.ended = False
        """Whether the last event has arrived."""
        self.admitted_at: float | None = None
        self.waits: AdmissionTimes | None = None
        """Those of the first of its requests to leave the queue."""
        self.first_token_at: float | None = None
        self._n_requests = n_requests

    def submitted(self, run: RunningRequest, job: Job) -> None:
        self.runs.append(run)

    def observe(self, run: RunningRequest, event: EngineEvent, shown: Sequence[Event]) -> None:
        if type(event) is Token:
            if self.first_token_at is None:
                self.first_token_at = time.perf_counter()
        elif type(event) is Admitted and self.admitted_at is None:
            self.admitted_at, self.waits = time.perf_counter(), event.waits
        elif shown and type(shown[-1]) in (Ended, Failed):
            self.ended = True

    @property
    def usage(self) -> Usage:
        return sum((run.usage for run in self.runs), Usage(0, 0))

    @property
    def n_waiting(self) -> int:
        """Requests that have no row yet, those that are being prepared included."""
        return self._n_requests - sum(run.is_admitted or run.done for run in self.runs)

    @property
    def n_computed(self) -> int:
        """Tokens computed so far: see `RunningRequest.n_computed`."""
        return sum(run.n_computed for run in self.runs)

    @property
    def n_read(self) -> int:
        """Prompt tokens reused or computed so far."""
        return sum(run.n_read for run in self.runs)

    @property
    def n_logprobs(self) -> int:
        """Logprobs that the reply shows so far, those of the prompts included."""
        return sum(run.plan.n_logprobs(run.n_completion) for run in self.runs)

    @property
    def unenforced(self) -> Sequence[str]:
        """Parts of the requests that no grammar enforces in the replies."""
        return [place for run in self.runs for place in run.plan.unenforced]

    @property
    def admitted(self) -> Sequence[Admitted]:
        """What the cache had for each admitted prompt."""
        return [run.admitted for run in self.runs if run.is_admitted]

    @property
    def awaits_skips(self) -> bool:
        """Whether it is not known yet if part of a prompt is skipped."""
        return any(run.plan.may_skip for run in self.runs) and bool(self.n_waiting)
