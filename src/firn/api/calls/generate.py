"""A dialect's POST as a plain ASGI app: reads the body, and runs the call that it asks for."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager

from starlette.types import Receive, Scope, Send

from firn.api.calls.answer import Answer, send_loaded
from firn.api.calls.observer import Observer
from firn.api.calls.progress import CallProgress
from firn.api.calls.session import Session
from firn.api.dialects import ApiCall, Dialect, LoadCall, ReplyHead
from firn.api.http.affinity import conversation_of
from firn.api.http.body import decoded, while_connected
from firn.api.http.body_reader import BodyReader
from firn.api.http.exchange import Exchange, exchange_of
from firn.api.services import Services
from firn.core.errors import FirnError, ShuttingDown, TimedOut

logger = logging.getLogger("firn.api")


class Generate:
    """One per dialect and app. Owner of the background tasks; everything else about a call belongs
    to its session."""

    def __init__(
        self,
        dialect: Dialect,
        services: Services,
        bodies: BodyReader,
        observers: Callable[[Exchange, CallProgress], Iterable[Observer]],
    ) -> None:
        """observers: those of a client's call."""
        self._dialect = dialect
        self._services = services
        self._bodies = bodies
        self._observers = observers
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
        services, own_headers = self._services, self._dialect.stream_headers
        head = ReplyHead(
            id=exchange.id.removeprefix("req_"),
            model=services.engine.model.name,
            created=int(time.time()),
        )
        if isinstance(call, LoadCall) and call.loads is not None:
            services.check_model(call.loads)
            await send_loaded(call, head, send, own_headers)
            return
        session = Session(
            services,
            call.requests,
            id=head.request,
            caller=exchange.caller,
            new_tool_id=lambda: f"{self._dialect.tool_id_prefix}{uuid.uuid4().hex[:24]}",
        )
        with ExitStack() as stack:
            key_id, n_requests = exchange.caller.key_id, len(call.requests)
            stack.enter_context(
                services.access.quotas.call(key_id, session.progress, n_requests=n_requests)
            )
            stack.enter_context(closing(session))
            session.watch(*self._observers(exchange, session.progress))
            stack.enter_context(_noting_fault(exchange))
            stack.enter_context(self._deadline(head))
            await session.start()
            answer = Answer(call, head, session, exchange, services)
            if call.background:
                task = asyncio.create_task(answer.keep(stack.pop_all()))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                await answer.begun(send)
            elif call.stream:
                await answer.stream(send, own_headers)
            else:
                await answer.whole(send)

    @contextmanager
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


@contextmanager
def _noting_fault(exchange: Exchange) -> Iterator[None]:
    """For those who watch the call, and learn at its end why it failed."""
    try:
        yield
    except FirnError as error:
        exchange.fault = error
        raise
