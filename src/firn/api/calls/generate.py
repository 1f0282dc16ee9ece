"""A dialect's POST as a plain ASGI app, from the body to the last byte of the reply."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from typing import TypeVar

from starlette.types import Receive, Scope, Send

from firn.api.calls.session import MANY_LOGPROBS, Session
from firn.api.dialects import ApiCall, Dialect, KeepingCall, LoadCall, ReplyHead
from firn.api.http import large_json
from firn.api.http.affinity import conversation_of
from firn.api.http.body import ClientGone, decoded
from firn.api.http.body_reader import BodyReader
from firn.api.http.errors import Headers, InternalFault
from firn.api.http.exchange import Exchange, exchange_of, send_json, send_raw_json
from firn.api.observe.activity import Activity
from firn.api.observe.metrics import Metrics
from firn.api.services import Services
from firn.core.errors import Cancelled, ShuttingDown, TimedOut
from firn.core.events import (
    Admitted,
    ChoiceFinished,
    Ended,
    Event,
    Failed,
    Started,
    TextDelta,
    reasons_in_words,
)
from firn.core.measure import writing_speed
from firn.core.ports import Recorder
from firn.core.values import Usage

T = TypeVar("T")

logger = logging.getLogger("firn.api")

MAX_HEADER_NBYTES = 1000
"""Names in a schema can be long, and clients limit headers."""


class Generate:
    """One per dialect and app. Owner of the background tasks; everything else about a call belongs
    to its session."""

    def __init__(
        self,
        dialect: Dialect,
        services: Services,
        metrics: Metrics,
        bodies: BodyReader,
        activity: Activity,
    ) -> None:
        self._activity = activity
        self._dialect = dialect
        self._services = services
        self._bodies = bodies
        self._metrics = metrics
        self._tasks: set[asyncio.Task[None]] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = exchange_of(scope)
        call = await self._decode(scope, receive, exchange)
        if call.requests:
            key_id = exchange.caller.key_id
            exchange.conversation = conversation_of(scope["headers"], call.requests[0], key_id)
        await while_connected(receive, lambda: self._answer(call, exchange, send))

    async def _decode(self, scope: Scope, receive: Receive, exchange: Exchange) -> ApiCall:
        services = self._services
        if services.event_router.draining:
            raise ShuttingDown()
        raw = await self._bodies.read(scope, receive)
        key_id = exchange.caller.key_id
        call = await decoded(
            raw,
            services.pool.of(key_id),
            lambda body: self._dialect.decode(body, namespace=key_id),
            inline_nbytes=self._dialect.inline_nbytes,
        )
        if call.ignored:
            logger.debug("%s ignored fields: %a", exchange.id, ", ".join(call.ignored)[:500])
        return call

    async def _answer(self, call: ApiCall, exchange: Exchange, send: Send) -> None:
        head = ReplyHead(
            id=exchange.id.removeprefix("req_"),
            model=self._services.engine.model.name,
            created=int(time.time()),
        )
        if isinstance(call, LoadCall) and call.loads is not None:
            self._services.check_model(call.loads)
            await _send_loaded(call, head, send, self._dialect.stream_headers)
            return
        session = Session(
            self._services,
            call.requests,
            id=head.request,
            caller=exchange.caller,
            new_tool_id=lambda: f"{self._dialect.tool_id_prefix}{uuid.uuid4().hex[:24]}",
        )
        tally = _Tally(exchange, session, self._metrics, self._services.recorder)
        with ExitStack() as stack:
            quota = self._services.quotas.call(
                exchange.caller.key_id, session, n_requests=len(call.requests)
            )
            stack.enter_context(quota)
            stack.enter_context(contextlib.closing(session))
            stack.enter_context(contextlib.closing(tally))
            stack.enter_context(self._activity.follow(exchange, session))
            stack.enter_context(self._deadline(head))
            await session.start()
            if call.background:
                begun = call.fold(head, ())
                task = asyncio.create_task(
                    _run_in_background(call, head, session, tally, stack.pop_all())
                )
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                await send_json(send, begun, headers=_early_headers(call, session))
            elif call.stream:
                await self._stream(call, head, session, send, tally)
            else:
                await self._reply(call, head, session, send, tally)

    @contextlib.contextmanager
    def _deadline(self, head: ReplyHead) -> Iterator[None]:
        """Fail the call with TimedOut when its time is up."""
        limit_s = self._services.limits.timeout_s
        if limit_s is None:
            yield
            return
        fail = self._services.event_router.fail
        timer = asyncio.get_running_loop().call_later(
            limit_s, fail, head.request, TimedOut(limit_s)
        )
        try:
            yield
        finally:
            timer.cancel()

    async def _reply(
        self, call: ApiCall, head: ReplyHead, session: Session, send: Send, tally: _Tally
    ) -> None:
        events: list[Event] = []
        async for batch in session:
            events.extend(batch)
        tally.observe(events)
        if isinstance(events[-1], Failed):
            raise events[-1].error
        raw = await self._services.offload(
            tally.exchange.caller.key_id,
            lambda: large_json.dumps(call.fold(head, events)),
            when=session.n_logprobs > MANY_LOGPROBS,
        )
        await send_raw_json(send, raw, headers=_early_headers(call, session))

    async def _stream(
        self, call: ApiCall, head: ReplyHead, session: Session, send: Send, tally: _Tally
    ) -> None:
        """One write per batch. From here on, a fault becomes the stream's last event."""
        encoder = call.encoder(head)
        has_ended = False
        try:
            early = await _until_admitted(session)
            headers = [*self._dialect.stream_headers, *_early_headers(call, session)]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            async for batch in _with_early(early, session):
                has_ended = bool(batch) and isinstance(batch[-1], Ended | Failed)
                # At the end, some APIs repeat all that was streamed.
                n_logprobs = session.n_logprobs if has_ended else _n_logprobs(batch)
                frames = await self._services.offload(
                    tally.exchange.caller.key_id,
                    partial(encoder.feed, batch),
                    when=n_logprobs > MANY_LOGPROBS,
                )
                tally.observe(batch)
                if frames:
                    await send({"type": "http.response.body", "body": frames, "more_body": True})
                if not isinstance(call, KeepingCall):
                    session.sent()
        except OSError:  # newer ASGI servers raise it when the client is gone
            raise ClientGone() from None
        except Exception:
            logger.exception("%s failed while its reply was streamed", tally.exchange.id)
            failed = Failed(InternalFault(tally.exchange.id))
            tally.observe([failed])
            has_ended = True
            frames = encoder.feed([failed])
            await send({"type": "http.response.body", "body": frames, "more_body": True})
        finally:
            if not has_ended:
                encoder.feed([Failed(Cancelled())])
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _with_early(early: list[Event], session: Session) -> AsyncIterator[list[Event]]:
    if early:
        yield early
    async for batch in session:
        yield batch


async def _send_loaded(call: ApiCall, head: ReplyHead, send: Send, own_headers: Headers) -> None:
    """The reply to a call that only asks to load or unload the model, which is there anyway."""
    events: list[Event] = [Started(0), Ended(Usage(0, 0))]
    if not call.stream:
        await send_json(send, call.fold(head, events))
        return
    await send({"type": "http.response.start", "status": 200, "headers": list(own_headers)})
    await send({"type": "http.response.body", "body": call.encoder(head).feed(events)})


async def _run_in_background(
    call: ApiCall, head: ReplyHead, session: Session, tally: _Tally, stack: ExitStack
) -> None:
    """The outermost frame of a background task: faults are logged, since nobody waits for it."""
    events: list[Event] = []
    try:
        with stack:
            async for batch in session:
                events.extend(batch)
            tally.observe(events)
    except Exception:
        logger.exception("%s failed in the background", head.request)
        events.append(Failed(InternalFault(head.request)))
    call.fold(head, events)
    logger.info("%s ended in the background%s", head.request, tally.exchange.summary)


def _n_logprobs(events: Sequence[Event]) -> int:
    """Roughly how many logprobs these events have, judging by the last token of each."""
    texts = [event.logprobs for event in events if type(event) is TextDelta and event.logprobs]
    return sum(len(logprobs) * (1 + len(logprobs[-1].top)) for logprobs in texts)


def _early_headers(call: ApiCall, session: Session) -> Headers:
    """What a client should know before it reads a reply: what is ignored, not enforced, approximate."""
    names = ((b"x-firn-ignored", call.ignored), (b"x-firn-unenforced", session.unenforced))
    listed = [(name, _listed(parts)) for name, parts in names if parts]
    return [*listed, *session.preparation_headers]


def _listed(names: Sequence[str]) -> bytes:
    """Names that a client made up, as the value of a header."""
    text = b" ".join(", ".join(names).encode("unicode_escape").split())
    return text[:MAX_HEADER_NBYTES]


async def _until_admitted(session: Session) -> list[Event]:
    """If part of a prompt may be skipped, the events until it is known whether it is.

    Stops at the first silence: the client must learn that its request is being answered.
    """
    events: list[Event] = []
    while session.may_skip and session.n_waiting and not session.ended:
        batch = await anext(session)
        events += batch
        if not batch:
            break
    return events


async def while_connected(receive: Receive, work: Callable[[], Awaitable[T]]) -> T:
    """Do the work. If the client hangs up, cancel it immediately and raise ClientGone."""

    async def hung_up() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    working = asyncio.ensure_future(work())
    watching = asyncio.ensure_future(hung_up())
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone()
        return working.result()
    finally:
        watching.cancel()
        working.cancel()
        await asyncio.wait({working, watching})


class _Tally:
    """What log line, counters and trace report about one call. Owner: the task that answers it."""

    def __init__(
        self, exchange: Exchange, session: Session, metrics: Metrics, recorder: Recorder | None
    ) -> None:
        self.exchange = exchange
        self._session = session
        self._metrics = metrics
        self._recorder = recorder
        self._reasons: list[str] = []

    def observe(self, events: list[Event]) -> None:
        for event in events:
            if type(event) is ChoiceFinished:
                self._reasons.append(event.reason)
            elif type(event) is Failed:
                self._reasons.append(event.error.code)
                self.exchange.fault = event.error

    def close(self) -> None:
        now = time.perf_counter()
        first_at = self._session.first_token_at
        first_s = None if first_at is None else first_at - self.exchange.began_at
        usage = self._session.usage
        text = f" prompt={usage.n_prompt} cached={usage.n_cached}{_origins(self._session.admitted)}"
        text += f" reply={usage.n_completion}"
        if usage.n_skipped:
            text += f" skipped={usage.n_skipped} (approximate)"
        if usage.n_drafted:
            text += f" drafted={usage.n_drafted} accepted={usage.n_accepted}"
        if first_at is not None and first_s is not None:
            rate = writing_speed(usage.n_completion, now - first_at)
            text += f" first={first_s:.3f}s" + ("" if rate is None else f" rate={rate:.1f}/s")
        if self._reasons:
            text += f" finish={','.join(dict.fromkeys(self._reasons))}"
        self.exchange.summary = text
        self._metrics.count_call(self.exchange.caller.key_id, usage, first_token_s=first_s)
        if self._recorder is not None:
            at_s = time.time() - (now - self.exchange.began_at)
            for served in self._session.served(at_s=at_s, first_s=first_s):
                self._recorder.record(served)


def _origins(admitted: Sequence[Admitted]) -> str:
    """How many cached tokens came from each tier, and why not more."""
    tiers: Counter[str] = Counter()
    for admission in admitted:
        tiers.update(dict(admission.tiers))
    text = f" ({', '.join(f'{name} {n}' for name, n in tiers.items())})" if tiers else ""
    reasons = reasons_in_words(admitted)
    return f'{text} why="{reasons}"' if reasons else text
