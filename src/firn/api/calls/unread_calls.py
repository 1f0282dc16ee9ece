"""Warns of replies with a call that the parser did not find, since it is in another format."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial

from firn.api.calls.observer import Observer
from firn.api.calls.running import RunningRequest
from firn.api.services import Services
from firn.core.events import ChoiceDone, EngineEvent, Event, Token
from firn.core.values import Job, Namespace, RequestId
from firn.text.reply.unread_calls import UnreadCalls

logger = logging.getLogger("firn.api")

LONG_REPLY = 4096
"""In characters: a longer reply is searched in the pool."""


class UnreadCallWarnings(Observer):
    """Of a call's replies to which tools were offered."""

    def __init__(self, services: Services, key_id: Namespace) -> None:
        self._services = services
        self._key_id = key_id
        self._replies: dict[RequestId, list[UnreadCalls]] = {}

    def submitted(self, run: RunningRequest, job: Job) -> None:
        if run.plan.tools:
            self._replies[run.id] = [UnreadCalls(run.plan.tools) for _ in run.choices]

    def observe(self, run: RunningRequest, event: EngineEvent, shown: Sequence[Event]) -> None:
        if run.id not in self._replies or not isinstance(event, Token | ChoiceDone):
            return
        reply = self._replies[run.id][event.choice]
        text = reply.observe(shown)
        if text is not None and len(text) > LONG_REPLY:
            self._services.pool.submit(self._key_id, partial(self._warn, run.id, reply, text))
        elif text is not None:
            self._warn(run.id, reply, text)

    def _warn(self, id: RequestId, reply: UnreadCalls, text: str) -> None:
        mark = reply.mark(text)
        if mark is not None:
            logger.warning(
                "%s offered tools; the reply has %a, but the parser %s found no call: "
                "see --tool-call-parser",
                id,
                mark,
                self._services.reply_format.tool or "none",
            )
