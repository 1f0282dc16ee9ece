"""One call's path through the engine: submits its jobs, turns tokens into the dialect's events."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial

from firn.api.calls.event_router import EventQueue
from firn.api.calls.observer import Observer
from firn.api.calls.observers import observers_of_requests
from firn.api.calls.prepare import RequestPreparer
from firn.api.calls.prepared import PreparedRequest
from firn.api.calls.progress import CallProgress
from firn.api.calls.running import RunningRequest
from firn.api.http.auth import Caller
from firn.api.services import Services
from firn.core.errors import FirnError, InvalidValue, ShuttingDown
from firn.core.events import (
    Ended,
    EngineEvent,
    Event,
    Failed,
    JobDone,
    JobFailed,
    PromptLogprobs,
    Started,
    TextDelta,
    Token,
)
from firn.core.values import GenerateRequest, RequestId
from firn.text.reply.echo import EchoSlice, echoed

MAX_LOGPROBS = 1 << 18
"""Most logprobs in one reply, for the tokens of its prompts and their likeliest alternatives."""
MANY_LOGPROBS = 1 << 12
"""More logprobs than this are rendered in the pool, not on the asyncio thread."""


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
        self._caller = caller
        self._preparer = RequestPreparer(services, caller, new_tool_id)
        ids = (RequestId(f"{id}-{i}" if i else id) for i in range(len(requests)))
        self._requests = dict(zip(ids, requests, strict=True))
        self._runs: dict[RequestId, RunningRequest] = {}
        self._queue: EventQueue | None = None
        self._pending: list[Event] = []
        self.progress = CallProgress(len(requests))
        self._observers: list[Observer] = [self.progress]

    def watch(self, *observers: Observer) -> None:
        """Have them watch it, from now until it is closed."""
        self._observers += observers

    # --- submitting ----------------------------------------------------------------------

    async def start(self) -> None:
        services = self._services
        for request in self._requests.values():
            self._preparer.check(request)
        limit = services.limits.max_requests
        if len(self._requests) > limit:  # not a 429: trying again would not help
            raise InvalidValue(
                "prompt",
                f"{len(self._requests)} prompts in one request exceed the limit of {limit} "
                "(--max-queue)",
            )
        router = services.event_router
        self._queue = router.open(
            self._requests,
            self._caller.client,
            silence_s=services.limits.keep_alive_s,
            cancel=self._cancel,
        )
        prepared = [await self._preparer.prepare(*each) for each in self._requests.items()]
        n_prompt = sum(each.replies.n_prompt for each in prepared)
        if sum(each.replies.n_logprobs(0) for each in prepared) > MAX_LOGPROBS:
            raise InvalidValue(
                "logprobs",
                f"for {n_prompt} prompt tokens are too many for one "
                "reply: ask for fewer alternatives, with fewer prompts, or without echo",
            )
        if router.draining:
            raise ShuttingDown()
        plans = [each.replies for each in prepared]
        self.watch(*observers_of_requests(plans, services, self._caller.key_id))
        for each in prepared:
            self._submit(each)
        self._pending.append(Started(n_prompt))
        for run in self._runs.values():
            self._pending.extend(await self._echo(run))

    def _submit(self, prepared: PreparedRequest) -> None:
        first_choice = sum(run.plan.n for run in self._runs.values())
        run = RunningRequest(prepared.replies, first_choice=first_choice)
        self._services.engine.submit(prepared.job)
        self._runs[run.id] = run
        for observer in self._observers:
            observer.submitted(run, prepared.job)

    async def _echo(self, run: RunningRequest) -> list[Event]:
        """The prompt as the beginning of each reply, as soon as all its logprobs are known."""
        echo = run.plan.echo
        if echo is None or not run.may_echo:
            return []
        slices = [EchoSlice(echo.text)]
        if echo.ids is not None:
            work = partial(
                echoed, self._services.tokenizer, echo.text, echo.ids, run.prompt_logprobs
            )
            slices = await self._services.offload(
                self._caller.key_id, work, when=self.progress.n_logprobs > MANY_LOGPROBS
            )
        run.echoed, run.prompt_logprobs = True, []
        return [TextDelta(i, piece.text, piece.logprobs) for i in run.choices for piece in slices]

    # --- events --------------------------------------------------------------------------

    def __aiter__(self) -> Session:
        return self

    async def __anext__(self) -> list[Event]:
        events, self._pending = self._pending, []
        progress = self.progress
        if progress.ended or self._queue is None:
            raise StopAsyncIteration
        while not events:
            deliveries = await self._queue.take()
            for request, event in deliveries:
                run = self._runs[request]
                events += self._receive(run, event)
                if type(event) is PromptLogprobs:
                    events += await self._echo(run)
                if progress.ended:
                    break
            if not deliveries:
                return []
        return events

    async def events(self) -> AsyncIterator[Event]:
        """All of them, one at a time. Raises the error of a call that failed."""
        async for batch in self:
            for event in batch:
                if type(event) is Failed:
                    raise event.error
                yield event

    def _receive(self, run: RunningRequest, event: EngineEvent) -> list[Event]:
        """What comes of the event for the client."""
        shown = run.feed(event)
        if shown is None:
            return []
        if type(event) is Token:
            if event.choice in run.finished:
                self._services.engine.stop_choice(run.id, event.choice)
        elif type(event) is JobDone and all(each.done for each in self._runs.values()):
            progress = self.progress
            shown.append(Ended(progress.usage, progress.first_token_at, time.time()))
        for observer in self._observers:
            observer.observe(run, event, shown)
        return shown

    def fail(self, error: FirnError) -> list[Event]:
        """End it with an error from outside the engine, after `start`. Returns the last event."""
        return self._receive(next(iter(self._runs.values())), JobFailed(error))

    def close(self) -> None:
        """Cancel whatever is still running. Idempotent."""
        if self._queue is not None:
            self._cancel()
            self._services.event_router.close(self._requests, self._queue)
            self._queue = None
        while self._observers:
            self._observers.pop().close()

    def sent(self) -> None:
        """Everything that this has returned so far is on its way to the client."""
        if self._queue is not None:
            n_held = sum(run.n_held_logprobs for run in self._runs.values())
            self._queue.sent(n_held_logprobs=n_held)

    def _cancel(self) -> None:
        for run in self._runs.values():
            if not run.done:
                self._services.engine.cancel(run.id)
