"""What is told of a call when it is over: its log line, the counters, and the trace."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence

from firn.api.calls.observer import Observer
from firn.api.calls.progress import CallProgress
from firn.api.calls.running import RunningRequest
from firn.api.http.exchange import Exchange
from firn.api.observe.metrics import Metrics
from firn.core.events import (
    Admitted,
    ChoiceFinished,
    EngineEvent,
    Event,
    Failed,
    Token,
    reasons_in_words,
)
from firn.core.measure import writing_speed
from firn.core.ports import Recorder
from firn.core.values import Job, Prompt, RequestId, ServedRequest


class CallTally(Observer):
    """Log line and counters."""

    def __init__(self, exchange: Exchange, progress: CallProgress, metrics: Metrics) -> None:
        self._exchange = exchange
        self._progress = progress
        self._metrics = metrics
        self._reasons: list[str] = []

    def observe(self, run: RunningRequest, event: EngineEvent, shown: Sequence[Event]) -> None:
        last = shown[-1] if shown else None  # nothing follows either of these
        if type(last) is ChoiceFinished:
            self._reasons.append(last.reason)
        elif type(last) is Failed:
            self._reasons.append(last.error.code)
            self._exchange.fault = last.error

    def close(self) -> None:
        usage, first_at = self._progress.usage, self._progress.first_token_at
        first_s = None if first_at is None else first_at - self._exchange.began_at
        origins = _origins(self._progress.admitted)
        text = f" prompt={usage.n_prompt} cached={usage.n_cached}{origins}"
        text += f" reply={usage.n_completion}"
        if usage.n_skipped:
            text += f" skipped={usage.n_skipped} (approximate)"
        if usage.n_drafted:
            text += f" drafted={usage.n_drafted} accepted={usage.n_accepted}"
        if first_at is not None and first_s is not None:
            rate = writing_speed(usage.n_completion, time.perf_counter() - first_at)
            text += f" first={first_s:.3f}s" + ("" if rate is None else f" rate={rate:.1f}/s")
        if self._reasons:
            text += f" finish={','.join(dict.fromkeys(self._reasons))}"
        self._exchange.summary = text
        self._metrics.count_call(self._exchange.caller.key_id, usage, first_token_s=first_s)


def _origins(admitted: Sequence[Admitted]) -> str:
    """How many cached tokens came from each tier, and why not more."""
    tiers: Counter[str] = Counter()
    for admission in admitted:
        tiers.update(dict(admission.tiers))
    text = f" ({', '.join(f'{name} {n}' for name, n in tiers.items())})" if tiers else ""
    reasons = reasons_in_words(admitted)
    return f'{text} why="{reasons}"' if reasons else text


class RecordedCall(Observer):
    """Records its requests in a trace."""

    def __init__(self, exchange: Exchange, progress: CallProgress, recorder: Recorder) -> None:
        self._exchange = exchange
        self._progress = progress
        self._recorder = recorder
        self._prompts: dict[RequestId, Prompt] = {}
        self._replies: dict[RequestId, list[int]] = {}
        """Of each request, the tokens of its first choice."""

    def submitted(self, run: RunningRequest, job: Job) -> None:
        self._prompts[run.id], self._replies[run.id] = job.prompt, []

    def observe(self, run: RunningRequest, event: EngineEvent, shown: Sequence[Event]) -> None:
        if type(event) is Token and event.choice == 0:
            self._replies[run.id].append(event.id)

    def close(self) -> None:
        first_at, began_at = self._progress.first_token_at, self._exchange.began_at
        at_s = time.time() - (time.perf_counter() - began_at)
        for run in self._progress.runs:
            self._recorder.record(
                ServedRequest(
                    at_s=at_s,
                    prompt=self._prompts[run.id],
                    reply=tuple(self._replies[run.id]),
                    n_reply=run.n_completion,
                    tiers=run.admitted.tiers,
                    first_s=None if first_at is None else first_at - began_at,
                    namespace=self._exchange.namespace,
                )
            )
