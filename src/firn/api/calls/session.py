"""One call's path through the engine: submits its jobs, turns tokens into the dialect's events."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from firn.api.calls.event_router import EventQueue
from firn.api.calls.jobs import JobMaker
from firn.api.calls.running import RunningRequest
from firn.api.http.auth import Caller
from firn.api.http.errors import Headers
from firn.api.services import Services
from firn.core.errors import InvalidValue, ShuttingDown
from firn.core.events import (
    AdmissionTimes,
    Admitted,
    Advanced,
    ChoiceDone,
    Ended,
    EngineEvent,
    Event,
    Failed,
    JobDone,
    JobFailed,
    Prefilled,
    Progress,
    PromptLogprobs,
    Resumed,
    Started,
    TextDelta,
    Token,
)
from firn.core.values import GenerateRequest, Prompt, RequestId, ServedRequest, Usage
from firn.text.reply.echo import EchoSlice, echoed
from firn.text.reply.unread_calls import UnreadCalls

logger = logging.getLogger("firn.api")

MAX_LOGPROBS = 1 << 18
"""Most logprobs in one reply, for the tokens of its prompts and their likeliest alternatives."""
MANY_LOGPROBS = 1 << 12
"""More logprobs than this are rendered in the pool, not on the asyncio thread."""
LONG_REPLY = 4096
"""In characters: a longer reply is searched for unread calls in the pool."""


class Session:
    """Owner: the task that answers the call, on the asyncio thread.

    `start` checks, tokenizes and submits; it raises faults. Then iterate: each batch holds what has
    happened since the last one, and an empty batch means that nothing has happened for a while. The
    last batch ends with Ended or Failed. `close` may be called at any time, and cancels what is
    still in the engine.
    """

    def __init__(
        self,
        services: Services,
        requests: Sequence[GenerateRequest],
        *,
        id: str,
        caller: Caller,
        new_tool_id: Callable[[], str] = lambda: f"call_{uuid.uuid4().hex[:24]}",
    ) -> None:
        self._services = services
        self._client = caller.client
        self._key_id, self._namespace = caller.key_id, caller.namespace
        self._jobs = JobMaker(services, caller, new_tool_id)
        self._queue: EventQueue | None = None
        self._pending: list[Event] = []
        self._runs: dict[RequestId, RunningRequest] = {}
        n_choices = 0
        for i, request in enumerate(requests):
            run_id = RequestId(f"{id}-{i}" if i else id)
            self._runs[run_id] = RunningRequest(run_id, request, first_choice=n_choices)
            n_choices += request.n
        self.ended = False
        """Whether the last event has arrived."""
        self.admitted_at: float | None = None
        self.waits: AdmissionTimes | None = None
        """Those of the first of its requests to leave the queue."""
        self.first_token_at: float | None = None
        self._on: dict[type[EngineEvent], Callable[[RunningRequest, Any, list[Event]], None]] = {
            Token: self._on_token,
            Admitted: self._on_admitted,
            Advanced: self._on_advanced,
            Prefilled: self._on_prefilled,
            PromptLogprobs: self._on_prompt_logprobs,
            ChoiceDone: self._on_choice_done,
            JobDone: self._on_job_done,
            JobFailed: self._on_job_failed,
        }

    # --- submitting ----------------------------------------------------------------------

    async def start(self) -> None:
        services, runs = self._services, self._runs.values()
        for run in runs:
            self._jobs.check(run.request)
        limit = services.limits.max_requests
        if len(runs) > limit:  # not a 429: trying again would not help
            raise InvalidValue(
                "prompt",
                f"{len(runs)} prompts in one request exceed the limit of {limit} (--max-queue)",
            )
        router = services.event_router
        self._queue = router.open(
            self._runs,
            self._client,
            silence_s=services.limits.keep_alive_s,
            cancel=self._cancel,
        )
        jobs = [await self._jobs.make(run) for run in runs]
        if self.n_logprobs > MAX_LOGPROBS:
            raise InvalidValue(
                "logprobs",
                f"for {sum(run.n_prompt for run in runs)} prompt tokens are too many for one "
                "reply: ask for fewer alternatives, with fewer prompts, or without echo",
            )
        if router.draining:
            raise ShuttingDown()
        for run, job in zip(runs, jobs, strict=True):
            services.engine.submit(job)
            run.submitted = True
            for choice in range(len(run.budgets)):
                self._check_budget(run, choice)
        self._pending.append(Started(n_prompt=sum(run.n_prompt for run in runs)))
        for run in runs:
            self._pending.extend(await self._echo(run))

    async def _echo(self, run: RunningRequest) -> list[Event]:
        """The prompt as the beginning of each reply, as soon as all its logprobs are known."""
        if run.echo is None or run.awaits_prompt_logprobs:
            return []
        slices = [EchoSlice(run.echo)]
        if run.echoed_ids is not None:
            tokenizer = self._services.tokenizer
            work = partial(echoed, tokenizer, run.echo, run.echoed_ids, run.prompt_logprobs)
            slices = await self._services.offload(
                self._key_id, work, when=self.n_logprobs > MANY_LOGPROBS
            )
        run.echo, run.prompt_logprobs = None, []
        choices = range(run.first_choice, run.first_choice + run.request.n)
        return [TextDelta(i, piece.text, piece.logprobs) for i in choices for piece in slices]

    # --- events --------------------------------------------------------------------------

    def __aiter__(self) -> Session:
        return self

    async def __anext__(self) -> list[Event]:
        events, self._pending = self._pending, []
        if self.ended or self._queue is None:
            raise StopAsyncIteration
        while not events:
            deliveries = await self._queue.take()
            for request, event in deliveries:
                run = self._runs[request]
                self._on[type(event)](run, event, events)
                if type(event) is PromptLogprobs:
                    events.extend(await self._echo(run))
                if self.ended:
                    break
            if not deliveries:
                return []
        return events

    def close(self) -> None:
        """Cancel whatever is still running. Idempotent."""
        if self._queue is None:
            return
        self._cancel()
        self._services.event_router.close(self._runs, self._queue)
        self._queue = None

    def sent(self) -> None:
        """Everything that this has returned so far is on its way to the client."""
        if self._queue is not None:
            readers = (reader for run in self._runs.values() for reader in run.readers)
            self._queue.sent(n_held_logprobs=sum(reader.n_held_logprobs for reader in readers))

    def _cancel(self) -> None:
        for run in self._runs.values():
            if run.submitted and not run.done:
                self._services.engine.cancel(run.id)

    def _on_token(self, run: RunningRequest, token: Token, out: list[Event]) -> None:
        choice = token.choice
        if choice in run.finished:
            run.drop(token)
            return
        run.n_drafted += token.n_drafted
        run.n_accepted += token.n_accepted
        if self.first_token_at is None:
            self.first_token_at = time.perf_counter()
        if run.prompt is not None and choice == 0:
            run.reply.append(token.id)
        reader = run.readers[choice]
        if run.budgets and run.budgets[choice].skips(token, reader):
            reader.n_completion += 1
            return
        self._emit(run, choice, reader.feed(token), out)
        if reader.stopped:  # its last event was ChoiceFinished
            run.finished.add(choice)
            self._services.engine.stop_choice(run.id, choice)
        elif run.budgets:
            self._check_budget(run, choice)

    def _emit(
        self, run: RunningRequest, choice: int, events: list[Event], out: list[Event]
    ) -> None:
        out.extend(events)
        text = run.call_watches[choice].observe(events) if run.call_watches else None
        if text is not None and len(text) > LONG_REPLY:
            watch = run.call_watches[choice]
            self._services.pool.submit(
                self._key_id, partial(self._warn_of_unread, run.id, watch, text)
            )
        elif text is not None:
            self._warn_of_unread(run.id, run.call_watches[choice], text)

    def _warn_of_unread(self, id: RequestId, watch: UnreadCalls, text: str) -> None:
        mark = watch.mark(text)
        if mark is not None:
            logger.warning(
                "%s offered tools; the reply has %a, but the parser %s found no call: "
                "see --tool-call-parser",
                id,
                mark,
                self._services.reply_format.tool or "none",
            )

    def _check_budget(self, run: RunningRequest, choice: int) -> None:
        forced = run.budgets[choice].check(run.readers[choice])
        if forced is not None:
            self._services.engine.force(run.id, choice, forced.tokens, at=forced.at)

    def _on_choice_done(self, run: RunningRequest, event: ChoiceDone, out: list[Event]) -> None:
        if event.choice not in run.finished:
            run.finished.add(event.choice)
            self._emit(run, event.choice, run.readers[event.choice].finish(event.reason), out)

    def _on_admitted(self, run: RunningRequest, event: Admitted, out: list[Event]) -> None:
        run.admitted, run.n_read = event, event.n_cached
        if self.admitted_at is None:
            self.admitted_at, self.waits = time.perf_counter(), event.waits
        out.append(Resumed(event.n_cached))

    def _on_advanced(self, run: RunningRequest, event: Advanced, out: list[Event]) -> None:
        run.admitted = event.admission

    def _on_prefilled(self, run: RunningRequest, event: Prefilled, out: list[Event]) -> None:
        run.n_read = event.n_done
        if event.n_done < event.n_total:  # the first token shows that the prompt is done
            out.append(Progress(event.n_done, event.n_total))

    def _on_prompt_logprobs(
        self, run: RunningRequest, event: PromptLogprobs, out: list[Event]
    ) -> None:
        run.prompt_logprobs.extend(event.logprobs)

    def _on_job_done(self, run: RunningRequest, event: JobDone, out: list[Event]) -> None:
        run.done = True
        if all(other.done for other in self._runs.values()):
            self.ended = True
            out.append(Ended(self.usage, self.first_token_at, time.time()))

    def _on_job_failed(self, run: RunningRequest, event: JobFailed, out: list[Event]) -> None:
        self.ended = True
        out.append(Failed(event.error))

    # --- state ---------------------------------------------------------------------------

    @property
    def usage(self) -> Usage:
        return sum((run.usage for run in self._runs.values() if run.submitted), Usage(0, 0))

    @property
    def n_waiting(self) -> int:
        """Requests that are still waiting for a row."""
        return sum(not run.is_admitted and not run.done for run in self._runs.values())

    @property
    def n_computed(self) -> int:
        """Tokens computed so far: see `RunningRequest.n_computed`."""
        return sum(run.n_computed for run in self._runs.values())

    @property
    def n_read(self) -> int:
        """Prompt tokens reused or computed so far."""
        return sum(run.n_read for run in self._runs.values())

    @property
    def n_logprobs(self) -> int:
        """Logprobs that the reply shows so far, those of the prompts included."""
        return sum(run.n_logprobs for run in self._runs.values())

    @property
    def may_skip(self) -> bool:
        """Whether part of a prompt may be skipped."""
        prepare = self._services.preparations.of
        return any(prepare(run.request) is not None for run in self._runs.values())

    @property
    def preparation_headers(self) -> Headers:
        """What the client should know of how its prompts are prepared."""
        return self._services.preparations.headers(self.admitted)

    @property
    def unenforced(self) -> Sequence[str]:
        """Parts of the requests that no grammar enforces in the replies."""
        return [place for run in self._runs.values() for place in run.unenforced]

    @property
    def admitted(self) -> Sequence[Admitted]:
        """What the cache had for each admitted prompt."""
        return [run.admitted for run in self._runs.values() if run.is_admitted]

    @property
    def prompts(self) -> Sequence[tuple[Prompt, Admitted]]:
        """The admitted prompts, with what the cache had for them; empty unless prompts are kept."""
        runs = self._runs.values()
        return [(run.prompt, run.admitted) for run in runs if run.prompt and run.is_admitted]

    def served(self, *, at_s: float, first_s: float | None) -> Sequence[ServedRequest]:
        """What a trace records of each request so far; empty unless prompts are kept."""
        return [
            ServedRequest(
                at_s=at_s,
                prompt=run.prompt,
                reply=tuple(run.reply),
                n_reply=run.n_completion,
                tiers=run.admitted.tiers,
                first_s=first_s,
                namespace=self._namespace,
            )
            for run in self._runs.values()
            if run.submitted and run.prompt is not None
        ]
