"""Sends a call's reply as its dialect renders it: as a stream, as one body, or to be kept."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack
from functools import partial

from starlette.types import Send

from firn.api.calls.session import MANY_LOGPROBS, Session
from firn.api.dialects import ApiCall, KeepingCall, ReplyHead
from firn.api.http import large_json
from firn.api.http.body import ClientGone
from firn.api.http.errors import Headers, InternalFault
from firn.api.http.exchange import Exchange, send_json, send_raw_json
from firn.api.services import Services
from firn.core.errors import Cancelled
from firn.core.events import Ended, Event, Failed, Started, TextDelta
from firn.core.values import Usage

logger = logging.getLogger("firn.api")

MAX_HEADER_NBYTES = 1000
"""Names in a schema can be long, and clients limit headers."""


class Answer:
    """One call's, whose session has started. Owner: the task that answers the call."""

    def __init__(
        self,
        call: ApiCall,
        head: ReplyHead,
        session: Session,
        exchange: Exchange,
        services: Services,
    ) -> None:
        self._call = call
        self._head = head
        self._session = session
        self._exchange = exchange
        self._services = services

    async def whole(self, send: Send) -> None:
        """Raises the error of a call that failed."""
        events = [event async for event in self._session.events()]
        raw = await self._services.offload(
            self._exchange.caller.key_id,
            lambda: large_json.dumps(self._call.fold(self._head, events)),
            when=self._session.progress.n_logprobs > MANY_LOGPROBS,
        )
        await send_raw_json(send, raw, headers=self._early_headers())

    async def begun(self, send: Send) -> None:
        """That a reply which is kept has begun."""
        begun = self._call.fold(self._head, ())
        await send_json(send, begun, headers=self._early_headers())

    async def keep(self, stack: ExitStack) -> None:
        """The outermost frame of a background task: faults are logged, since nobody waits for it."""
        events: list[Event] = []
        request = self._head.request
        try:
            with stack:
                async for batch in self._session:
                    events.extend(batch)
        except Exception:
            logger.exception("%s failed in the background", request)
            events.append(Failed(InternalFault(request)))
        self._call.fold(self._head, events)
        logger.info("%s ended in the background%s", request, self._exchange.summary)

    # --- streams -------------------------------------------------------------------------

    async def stream(self, send: Send, own_headers: Headers) -> None:
        """One write per batch. From here on, a fault becomes the stream's last event."""
        encoder, session = self._call.encoder(self._head), self._session
        has_ended = False
        try:
            early = await self._until_admitted()
            headers = [*own_headers, *self._early_headers()]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            async for batch in self._batches(early):
                has_ended = bool(batch) and isinstance(batch[-1], Ended | Failed)
                # At the end, some APIs repeat all that was streamed.
                n_logprobs = session.progress.n_logprobs if has_ended else _n_logprobs(batch)
                frames = await self._services.offload(
                    self._exchange.caller.key_id,
                    partial(encoder.feed, batch),
                    when=n_logprobs > MANY_LOGPROBS,
                )
                if frames:
                    await send({"type": "http.response.body", "body": frames, "more_body": True})
                if not isinstance(self._call, KeepingCall):
                    session.sent()
        except OSError:  # newer ASGI servers raise it when the client is gone
            raise ClientGone() from None
        except Exception:
            logger.exception("%s failed while its reply was streamed", self._exchange.id)
            has_ended = True
            frames = encoder.feed(session.fail(InternalFault(self._exchange.id)))
            await send({"type": "http.response.body", "body": frames, "more_body": True})
        finally:
            if not has_ended:
                encoder.feed([Failed(Cancelled())])
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _until_admitted(self) -> list[Event]:
        """If part of a prompt may be skipped, the events until it is known whether it is.

        Stops at the first silence: the client must learn that its request is being answered.
        """
        events: list[Event] = []
        progress = self._session.progress
        while progress.awaits_skips and not progress.ended:
            batch = await anext(self._session)
            events += batch
            if not batch:
                break
        return events

    async def _batches(self, early: list[Event]) -> AsyncIterator[list[Event]]:
        if early:
            yield early
        async for batch in self._session:
            yield batch

    def _early_headers(self) -> Headers:
        """What a client should know before it reads a reply: what is ignored, not enforced,
        approximate."""
        progress = self._session.progress
        names = (
            (b"x-firn-ignored", self._call.ignored),
            (b"x-firn-unenforced", progress.unenforced),
        )
        listed = [(name, _listed(parts)) for name, parts in names if parts]
        return [*listed, *self._services.preparations.headers(progress.admitted)]


def _n_logprobs(events: Sequence[Event]) -> int:
    """Roughly how many logprobs these events have, judging by the last token of each."""
    texts = [event.logprobs for event in events if type(event) is TextDelta and event.logprobs]
    return sum(len(logprobs) * (1 + len(logprobs[-1].top)) for logprobs in texts)


def _listed(names: Sequence[str]) -> bytes:
    """Names that a client made up, as the value of a header."""
    text = b" ".join(", ".join(names).encode("unicode_escape").split())
    return text[:MAX_HEADER_NBYTES]


async def send_loaded(call: ApiCall, head: ReplyHead, send: Send, own_headers: Headers) -> None:
    """The reply to a call that only asks to load or unload the model, which is there anyway."""
    events: list[Event] = [Started(0), Ended(Usage(0, 0))]
    if not call.stream:
        await send_json(send, call.fold(head, events))
        return
    await send({"type": "http.response.start", "status": 200, "headers": list(own_headers)})
    await send({"type": "http.response.body", "body": call.encoder(head).feed(events)})
