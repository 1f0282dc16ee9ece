"""/v1/activity: what the server is doing, as a stream of events for the dashboard.

    event: hello     once: the server's version and clock
    event: calls     calls that have changed since the last event; the first has all known calls
    event: state     engine, cache and memory, when they have changed

Nothing of this waits for the engine: what the cache says comes between two steps, and a state without
it is sent meanwhile. Calls are inspected only while somebody watches, and once at their end, so that
serving pays nothing. The operator sees all calls, a key only its own. Text of prompts is shown only with
--show-text.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import ChainMap, Counter, defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import takewhile
from operator import itemgetter
from typing import Any, Literal

from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from firn import __version__
from firn.api.calls.observer import Observer
from firn.api.calls.progress import CallProgress
from firn.api.calls.running import RunningRequest
from firn.api.http import sse
from firn.api.http.auth import Caller
from firn.api.http.exchange import Exchange, client_of, exchange_of
from firn.api.services import Services
from firn.core.errors import TryLater
from firn.core.events import Admitted, reasons_in_words
from firn.core.ports import CacheAdmin
from firn.core.shares import Shares
from firn.core.values import Job, Namespace, Prompt, RequestId, Usage

N_ENDED = 1000
"""Ended calls of each key that are still known, and the most that a watcher is sent at once."""
TICK_S = 0.25
"""Seconds between two updates to a watcher."""
STATE_TICKS = 4
"""Ticks between two checks of the state."""
ANSWER_S = 0.1
"""How long a state waits for what the cache says, before it is sent without."""
QUIET_TICKS = 40
"""Ticks without news after which a comment line keeps the connection alive."""
MAX_WATCHERS = 32
MAX_ERROR_CHARS = 300
EXCERPT_TOKENS = 48
"""How much of a prompt is shown from where it differs from everything stored."""

Phase = Literal["queued", "reading", "decoding", "done", "failed", "gone"]


@dataclass(frozen=True, slots=True)
class CallTimes:
    """In seconds from the call's arrival. None: not yet."""

    arrived_at: float
    """A Unix time."""
    lookup_s: float | None
    """When the lookup in the cache began."""
    looked_up_s: float | None
    """When that lookup ended."""
    row_s: float | None
    """When it left the queue."""
    loads: bool
    """Whether records were read from a tier below memory between lookup and admission."""
    admitted_s: float | None
    """When it was known what the cache had for it."""
    first_token_s: float | None
    ended_s: float | None


@dataclass(frozen=True, slots=True)
class CallReuse:
    """What the cache had for its prompts."""

    cached_tokens: int
    tiers: dict[str, int]
    reason: str
    """Why no more was reused."""
    approximate: bool
    """Whether part of the prompt is skipped."""
    skipped_tokens: int
    cause: str | None
    """The first of the reasons as a label, as in `misses` of the statistics; None: there is none."""
    differs_at: int | None
    """The token from which on nothing stored goes on with the prompt."""
    differs: str | None
    """The prompt's text from where it differs from everything stored; None: it does not differ, or
    must not be shown."""


@dataclass(frozen=True, slots=True)
class CallCounts:
    """Tokens so far."""

    prompt_tokens: int
    read_tokens: int
    """Prompt tokens read, reused ones included."""
    reply_tokens: int
    drafted_tokens: int
    accepted_tokens: int


@dataclass(frozen=True, slots=True)
class CallView:
    """One call, as the dashboard shows it: as one object, with the fields of all these values."""

    id: str
    model: str
    key: str
    """The first digits of its key's digest."""
    phase: Phase
    error: str | None
    """Why it failed, as its client was told."""
    times: CallTimes
    counts: CallCounts
    reuse: CallReuse

    def shown(self) -> dict[str, Any]:
        own = asdict(self)
        parts = [own.pop(name) for name in ("times", "counts", "reuse")]
        return dict(ChainMap(own, *parts))


class WatchedCall(Observer):
    """A running call. Owner: its session; the activity looks at it."""

    def __init__(self, activity: Activity, exchange: Exchange, progress: CallProgress) -> None:
        self.exchange = exchange
        self._activity = activity
        self._progress = progress
        self._arrived_at = time.time() - (time.perf_counter() - exchange.began_at)
        self._prompts: dict[RequestId, Prompt] = {}
        """Empty if their text must not be shown."""
        self._reason = ""
        self._differs: str | None = None
        """Recomputed when the reason changes."""
        self._last: CallView | None = None
        self._looked_at = -TICK_S

    def submitted(self, run: RunningRequest, job: Job) -> None:
        if self._activity.excerpt is not None:
            self._prompts[run.id] = job.prompt

    def close(self) -> None:
        self._activity.ended(self)

    def current(self, now: float) -> CallView:
        """As it is, or was less than half a tick ago: however many watch, it is inspected once. The same
        object as long as nothing has changed."""
        if self._last is None or now - self._looked_at >= TICK_S / 2:
            view, self._looked_at = self.view(), now
            self._last = self._last if view == self._last else view
        assert self._last is not None
        return self._last

    def view(self, *, ended: bool = False) -> CallView:
        progress, fault = self._progress, self.exchange.fault
        usage, admitted = progress.usage, progress.admitted
        return CallView(
            id=self.exchange.id,
            model=self._activity.model,
            key=self.exchange.caller.key_id[:8],
            phase=self._phase(ended),
            error=fault.message[:MAX_ERROR_CHARS] if fault else None,
            times=self._times(ended),
            counts=CallCounts(
                prompt_tokens=usage.n_prompt,
                read_tokens=progress.n_read,
                reply_tokens=usage.n_completion,
                drafted_tokens=usage.n_drafted,
                accepted_tokens=usage.n_accepted,
            ),
            reuse=self._reuse(usage, admitted),
        )

    def _phase(self, ended: bool) -> Phase:
        progress = self._progress
        if self.exchange.fault is not None:
            return "failed"
        if ended:
            return "done" if progress.ended else "gone"
        if progress.first_token_at is not None:
            return "decoding"
        waiting = progress.admitted_at is None and not progress.n_read
        return "queued" if waiting else "reading"

    def _times(self, ended: bool) -> CallTimes:
        progress, waits = self._progress, self._progress.waits

        def since(then: float | None) -> float | None:
            return None if then is None else round(then - self.exchange.began_at, 4)

        return CallTimes(
            arrived_at=round(self._arrived_at, 3),
            lookup_s=since(waits.lookup_at if waits else None),
            looked_up_s=since(waits.looked_up_at if waits else None),
            row_s=since(waits.row_at if waits else progress.admitted_at),
            loads=waits is not None and waits.loads,
            admitted_s=since(progress.admitted_at),
            first_token_s=since(progress.first_token_at),
            ended_s=since(time.perf_counter()) if ended else None,
        )

    def _reuse(self, usage: Usage, admitted: Sequence[Admitted]) -> CallReuse:
        tiers: Counter[str] = Counter()
        for admission in admitted:
            tiers.update(dict(admission.tiers))
        reason = reasons_in_words(admitted)
        if reason != self._reason:
            self._reason, self._differs = reason, self._difference()
        first = next((a.reason for a in admitted if a.reason), None)
        return CallReuse(
            cached_tokens=usage.n_cached,
            tiers=dict(tiers),
            reason=reason,
            approximate=any(a.keep is not None for a in admitted),
            skipped_tokens=usage.n_skipped,
            cause=first.cause.value if first else None,
            differs_at=first.at if first else None,
            differs=self._differs,
        )

    def _difference(self) -> str | None:
        """The text of the first prompt that goes on where nothing stored does, from that token on."""
        for run in self._progress.runs:
            prompt, reason = self._prompts.get(run.id), run.admitted.reason
            if self._activity.excerpt and prompt and reason and reason.at is not None:
                ids = prompt.ids[reason.at : reason.at + EXCERPT_TOKENS]
                return self._activity.excerpt(ids.tolist())
        return None


class Activity:
    """Running calls, and the last ones that ended. Owner: the app, on the asyncio thread."""

    def __init__(self, model: str, *, excerpt: Callable[[Iterable[int]], str] | None) -> None:
        """excerpt: the text of a prompt's tokens; None: it must not be shown."""
        self.model = model
        self.excerpt = excerpt
        self._open: dict[str, WatchedCall] = {}
        self._ended: defaultdict[Namespace, deque[tuple[int, CallView]]]
        self._ended = defaultdict(lambda: deque(maxlen=N_ENDED))
        self._n_ended = 0

    def follow(self, exchange: Exchange, progress: CallProgress) -> WatchedCall:
        """Show a call until its observer is closed."""
        call = self._open[exchange.id] = WatchedCall(self, exchange, progress)
        return call

    def ended(self, call: WatchedCall) -> None:
        del self._open[call.exchange.id]
        self._n_ended += 1
        view = call.view(ended=True)
        self._ended[call.exchange.caller.key_id].append((self._n_ended, view))

    def news(self, watcher: _Watcher, caller: Caller) -> list[CallView]:
        """The calls visible to the caller that have changed since this watcher's last update."""
        ended: list[tuple[int, CallView]] = []
        for key_id, known in self._ended.items():
            if _may_see(caller, key_id):
                ended += takewhile(lambda each: each[0] > watcher.n_ended, reversed(known))
        views = [view for _, view in sorted(ended, key=itemgetter(0))[-N_ENDED:]]
        watcher.n_ended = self._n_ended
        watcher.calls = {id: view for id, view in watcher.calls.items() if id in self._open}
        now = time.monotonic()
        for id, call in self._open.items():
            if _may_see(caller, call.exchange.caller.key_id):
                view = call.current(now)
                if watcher.calls.get(id) is not view:
                    watcher.calls[id] = view
                    views.append(view)
        return views


class LastStats:
    """What the cache said last, by what the caller may see. Owner: the app, on the asyncio thread.

    The engine answers between two steps, which may take many seconds, and is asked once at a time.
    """

    def __init__(self, admin: CacheAdmin) -> None:
        self._admin = admin
        self._last: dict[Namespace | None, dict[str, Any]] = {}
        self._asked: dict[Namespace | None, asyncio.Future[dict[str, Any]]] = {}

    async def get(self, visible: Namespace | None, *, wait_s: float) -> dict[str, Any] | None:
        """What it says now, if the answer comes in this time, or else what it said last. None: it has
        not said anything yet."""
        asked = self._asked.get(visible)
        if asked is None:
            asked = self._asked[visible] = asyncio.wrap_future(self._admin.stats(visible))
        await asyncio.wait([asked], timeout=wait_s)
        if asked.done():
            self._asked.pop(visible, None)
            self._last[visible] = asked.result()
        return self._last.get(visible)


@dataclass(eq=False, slots=True)
class _Watcher:
    """What one client of /v1/activity has been sent."""

    n_ended: int
    calls: dict[str, CallView]


def _may_see(caller: Caller, key_id: Namespace) -> bool:
    return caller.operator or caller.key_id == key_id


class TooManyWatchers(TryLater):
    code = "too_many_watchers"

    def __init__(self) -> None:
        super().__init__(
            "You have too many dashboards connected to this server; close one of them."
        )


class ActivityResponse(StreamingResponse):
    """Counts as a watcher as long as it is being sent, from before its head."""

    def __init__(self, frames: AsyncIterator[str] | AsyncIterator[bytes], watchers: Shares) -> None:
        """watchers: MAX_WATCHERS, of which each client gets its share."""
        headers = {name.decode(): value.decode() for name, value in sse.HEADERS}
        super().__init__(frames, headers=headers)
        self._watchers = watchers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._watchers.open(client_of(scope)) as place:
            if not place.grow():
                raise TooManyWatchers()
            await super().__call__(scope, receive, send)


def add_activity(app: FastAPI, services: Services, activity: Activity) -> None:
    watchers = Shares(MAX_WATCHERS)
    states = States(services)

    async def watch(request: Request) -> ActivityResponse:
        caller = exchange_of(request.scope).caller
        return ActivityResponse(_frames(states, activity, caller), watchers)

    app.add_api_route(
        "/v1/activity",
        watch,
        methods=["GET"],
        summary="What the server is doing, as events",
        response_class=ActivityResponse,
        include_in_schema=False,  # an endless stream: tools that try every route would hang
    )


async def _frames(states: States, activity: Activity, caller: Caller) -> AsyncIterator[str]:
    watcher, shown, quiet, tick = _Watcher(0, {}), "", 0, 0
    yield hello() + _calls(activity.news(watcher, caller))
    while not states.draining:
        calls = activity.news(watcher, caller)
        frames = _calls(calls) if calls else ""
        if tick % STATE_TICKS == 0:
            state = _frame("state", await states.get(caller))
            frames += state if state != shown else ""
            shown = state
        quiet = 0 if frames else quiet + 1
        if quiet >= QUIET_TICKS:
            frames, quiet = sse.KEEP_ALIVE, 0
        if frames:
            yield frames
        tick += 1
        await asyncio.sleep(TICK_S)


def hello() -> str:
    """The server's clock and version, so that a page from another version can tell its user."""
    return _frame("hello", {"version": __version__, "now": round(time.time(), 3)})


def _calls(views: list[CallView]) -> str:
    return _frame("calls", [view.shown() for view in views])


def _frame(event: str, value: object) -> str:
    return sse.named(event, json.dumps(value))


class States:
    """The state that a caller may see: a key must not learn what others do. Owner: the app, on the
    asyncio thread."""

    def __init__(self, services: Services) -> None:
        self._services = services
        admin = services.cache_admin
        self._stats = None if admin is None else LastStats(admin)

    @property
    def draining(self) -> bool:
        return self._services.event_router.draining

    async def get(self, caller: Caller) -> dict[str, Any]:
        """Without `cache` while the engine has not said anything about it yet."""
        services = self._services
        model = services.engine.model
        state: dict[str, Any] = {
            "model": model.name,
            "context_length": model.context_length,
            "operator": caller.operator,
            "show_text": services.page.show_text,
        }
        if self._stats is not None:
            visible = None if caller.operator else caller.namespace
            stats = await self._stats.get(visible, wait_s=ANSWER_S)
            if stats is not None:
                hidden = () if caller.operator else ("admission",)
                state["cache"] = {name: x for name, x in stats.items() if name not in hidden}
        if caller.operator:
            health = services.engine.health()
            state["engine"] = {
                "alive": health.alive,
                "waiting": health.n_waiting,
                "prefilling": health.n_prefilling,
                "decoding": health.n_decoding,
            }
            state["weights_bytes"] = model.weights_nbytes
            state["mlx_bytes"] = dict(services.telemetry.allocated())
            state["speculation"] = services.telemetry.health().get("speculation", {})
        return state
