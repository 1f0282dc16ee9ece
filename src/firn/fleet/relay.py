"""A request at the front: find the model it names, wait until it is loaded, relay the reply."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from starlette.types import Receive, Scope, Send

from firn.api.calls.quotas import FixedMeter, Quotas
from firn.api.dialects import ApiCall, Dialect, Encoder, ReplyHead
from firn.api.http import sse
from firn.api.http.auth import Caller, Keys
from firn.api.http.body import INLINE_NBYTES, ClientGone, decoded, while_connected
from firn.api.http.body_reader import BodyReader
from firn.api.http.exchange import Exchange, exchange_of, send_json, send_raw_json
from firn.api.http.fields import Fields, keep_alive_s
from firn.core.errors import (
    FirnError,
    Forbidden,
    InvalidValue,
    ModelDied,
    ModelNotFound,
    NotFound,
    ShuttingDown,
)
from firn.core.events import Ended, Failed
from firn.core.fair_pool import FairPool
from firn.core.values import Namespace, Usage
from firn.fleet import merging, proxy
from firn.fleet.fleet import Fleet
from firn.fleet.model import Model, ModelLease
from firn.fleet.vouching import vouch

T = TypeVar("T")

log = logging.getLogger("firn.fleet")

RESPONSES = "/v1/responses"
EXIT_S = 5.0
"""How long the system may take to report that a process has ended whose socket is closed."""


@dataclass(frozen=True, slots=True)
class WaitLimits:
    """wait_s: for a model to be loaded. silence_s: between comment lines on a waiting stream."""

    wait_s: float = 300.0
    silence_s: float = 5.0


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """What the front reads from a request's body."""

    model: str
    stream: object
    """As sent, unchecked; None: not sent."""
    keep_alive_s: float | None
    body: Mapping[str, Any]


class RemoteFault(FirnError):
    """An error rendered by the model's process, to be sent in a stream that has already begun."""

    def __init__(self, status: int, raw: bytes) -> None:
        self.status = status
        message: object = f"The model's process answered with status {status}."
        try:
            error = json.loads(raw)["error"]
            if isinstance(error, dict):
                message = error["message"]
                self.code = str(error.get("code") or self.code)
                self.kind = str(error.get("type") or self.kind)
            elif isinstance(error, str):  # Ollama's shape
                message = error
        except (ValueError, KeyError, TypeError):
            pass  # not one of firn's errors: only the status is known
        super().__init__(str(message))


class Relay:
    """One per front, on the asyncio thread."""

    def __init__(
        self,
        fleet: Fleet,
        dialects: list[Dialect],
        bodies: BodyReader,
        pool: FairPool,
        *,
        keys: Keys,
        quotas: Quotas,
        limits: WaitLimits,
    ) -> None:
        self._fleet = fleet
        self._keys = keys
        self._dialects = {dialect.path: dialect for dialect in dialects}
        self._bodies = bodies
        self._pool = pool
        self._quotas = quotas
        self._limits = limits
        self.draining = False
        self.n_calls = 0

    # --- which model it is for -------------------------------------------------------------

    def find(self, name: str) -> Model:
        """Raises ModelNotFound."""
        spec = self._fleet.catalogue.find(name)
        if spec is None:
            served = ", ".join(spec.name for spec in self._fleet.catalogue)
            raise ModelNotFound(name[:200], served[:500])
        return self._fleet.model(spec)

    async def by_body(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI app: a POST whose body names its model."""
        caller = exchange_of(scope).caller
        if self.draining:
            raise ShuttingDown()
        request, raw = await self.body(scope, receive, _parse)
        model = self.find(request.model)
        call = _RelayedCall(self, model, scope, raw, request)
        if await call.asks_to_unload():
            await self.unload(model, caller)
            await call.answer_unloaded(send)
            return
        # The model's process counts the tokens and reports them.
        with self._quotas.call(caller.key_id, FixedMeter()):
            await while_connected(receive, lambda: call.answer(send))

    async def by_id(self, scope: Scope, receive: Receive, send: Send) -> None:
        """An ASGI app: a request about a stored response, for the model whose process has it.

        Responses are lost with that process, so no model is loaded for this.
        """
        target = proxy.target_of(scope)
        answers = await merging.ask_loaded(self._fleet, scope, target)
        found = next((answer for answer in answers if answer.status != NotFound.status), None)
        if found is not None:
            await send_raw_json(send, found.body, status=found.status)
            return
        id = str(scope["path_params"]["response_id"])
        raise NotFound(f"You have no response {id[:64]!r}.", param="response_id")

    async def body(
        self, scope: Scope, receive: Receive, decode: Callable[[dict[str, Any]], T]
    ) -> tuple[T, bytes]:
        """The decoded body, and the body. Raises BadRequest and what `decode` raises."""
        raw = await self._bodies.read(scope, receive)
        pool = self._pool.of(exchange_of(scope).caller.key_id)
        return await decoded(raw, pool, decode), raw

    async def unload(self, model: Model, caller: Caller) -> None:
        """Unload it. For a key that is not the operator's, it stays as long as other keys want.

        Raises Forbidden.
        """
        check_may_load(caller, self._keys)
        if not caller.operator:
            model.note_use(caller.key_id, 0.0)
            if model.expires_at > time.monotonic():
                return
        await self._fleet.unload(model)

    # --- for calls -------------------------------------------------------------------------

    @property
    def fleet(self) -> Fleet:
        return self._fleet

    @property
    def limits(self) -> WaitLimits:
        return self._limits

    async def offload(self, key_id: Namespace, work: Callable[[], T], *, when: bool) -> T:
        """Do this key's work in the pool if `when` is set, else on this thread."""
        if not when:
            return work()
        return await asyncio.wrap_future(self._pool.submit(key_id, work))

    def dialect(self, path: str) -> Dialect | None:
        return self._dialects.get(path)


def check_may_load(caller: Caller, keys: Keys) -> None:
    """For explicit loading and unloading, not for requests that use a model. Raises Forbidden."""
    if not (caller.operator or (caller.has_key and not keys.has_admin)):
        raise Forbidden(
            "Only the operator of this server may load and unload models (--admin-key)."
        )


def _parse(body: dict[str, Any]) -> ModelRequest:
    model, stream = body.get("model"), body.get("stream")
    if model is not None and not isinstance(model, str):
        raise InvalidValue("model", "must be a string")
    return ModelRequest(model or "", stream, keep_alive_s(Fields(body)), body)


class _RelayedCall:
    """One request to a model's process, and its reply. Owned by its task."""

    def __init__(
        self, relay: Relay, model: Model, scope: Scope, raw: bytes, request: ModelRequest
    ) -> None:
        self._relay = relay
        self._model = model
        self._scope = scope
        self._raw = raw
        self._request = request
        self._exchange: Exchange = exchange_of(scope)
        self._dialect = relay.dialect(scope["path"])
        self._begun = False
        """Whether status and headers have been sent to the client."""
        self._is_stream = False
        """Whether the reply to the client is a stream."""
        self._wants_stream = False
        """Whether the client asked for a stream."""
        self._until = math.inf
        """When it has waited long enough for the model."""
        self._has_arrived = False
        """Whether a process has received it."""
        self._was_asked_again = False

    async def asks_to_unload(self) -> bool:
        """Whether to unload the model: Ollama's clients then send keep_alive 0 and no prompt."""
        prompt_field = {"/api/chat": "messages", "/api/generate": "prompt"}.get(self._scope["path"])
        if prompt_field is None or self._request.body.get(prompt_field):
            return False
        if self._request.keep_alive_s != 0:
            return False
        call = await self._decode()
        return not call.requests  # a picture or a suffix counts as a prompt too

    async def answer_unloaded(self, send: Send) -> None:
        call = await self._decode()
        head = _head_of(self._exchange, self._model.spec.name)
        await send_json(send, call.fold(head, [Ended(Usage(0, 0))]))

    async def _decode(self) -> ApiCall:
        assert self._dialect is not None
        dialect, key_id = self._dialect, self._exchange.caller.key_id
        return await self._relay.offload(
            key_id,
            lambda: dialect.decode(self._request.body, namespace=key_id),
            when=len(self._raw) > INLINE_NBYTES,
        )

    async def answer(self, send: Send) -> None:
        """Raises FirnError if nothing was sent yet; later, an error is the stream's last event."""
        self._relay.n_calls += 1
        try:
            while not await self._try_to_answer(send):
                log.info("%s is asked again: its process has ended", self._model.spec.name)
        except OSError:  # newer ASGI servers raise it when the client is gone
            raise ClientGone() from None
        except FirnError as error:
            if not self._begun:
                raise
            self._exchange.fault = error
            await self._end_stream(error, send)
        finally:
            self._relay.n_calls -= 1

    async def _try_to_answer(self, send: Send) -> bool:
        """False: the process ended before it had answered anything, and the next one may.

        A request that has reached a process is asked again once, and only if the process was killed
        from outside: otherwise the request itself may be what ended it.
        """
        lease = self._relay.fleet.try_enter(self._model) or await self._wait(send)
        try:
            await self._forward(lease, send)
            return True
        except ModelDied:
            await asyncio.wait({lease.child.exited}, timeout=EXIT_S)
            if self._exchange.passed_on or not lease.child.exited.done():
                raise
            if self._has_arrived:
                was_killed = lease.child.exited.result() == -signal.SIGKILL
                if not was_killed or self._was_asked_again:
                    raise
                self._was_asked_again, self._has_arrived = True, False
            return False
        finally:
            key_id = self._exchange.caller.key_id
            lease.release(key_id, keep_alive_s=self._request.keep_alive_s)

    # --- waiting ---------------------------------------------------------------------------

    async def _wait(self, send: Send) -> ModelLease:
        await self._check()
        fleet, limits, model = self._relay.fleet, self._relay.limits, self._model
        waiter = fleet.wait_for(model, self._exchange.caller.key_id)
        self._until = min(self._until, waiter.since + limits.wait_s)
        try:
            while True:
                left_s = self._until - time.monotonic()
                if left_s <= 0:
                    raise fleet.not_ready(model, f"it took longer than {limits.wait_s:g} s")
                timeout = min(limits.silence_s, left_s)
                done, _ = await asyncio.wait({waiter.lease}, timeout=timeout)
                if done:
                    return waiter.lease.result()
                await self._send_keep_alive(send, waited_s=time.monotonic() - waiter.since)
        except BaseException:
            fleet.leave(model, waiter)
            raise

    async def _check(self) -> None:
        """Check the body before a model is loaded for it.

        Bodies of the Responses API refer to what only the model's process has, and are checked
        there.
        """
        self._wants_stream = self._request.stream is True
        if self._dialect is not None and self._scope["path"] != RESPONSES:
            self._wants_stream = (await self._decode()).stream

    async def _send_keep_alive(self, send: Send, *, waited_s: float) -> None:
        """Send a comment line on a waiting stream, so that clients and proxies keep it open."""
        if self._dialect is None or not self._wants_stream:
            return
        dialect, model = self._dialect, self._model
        if not self._begun:
            self._begun = self._is_stream = True
            headers = list(dialect.stream_headers)
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        if dialect.stream_headers is sse.HEADERS:
            progress = model.run.progress if model.run else ""
            text = f": {model.spec.name!a} is {model.state.value} {progress}".rstrip()
            frame = f"{text} ({waited_s:.0f} s)\n\n".encode("ascii", "replace")
        else:
            frame = _fresh_encoder(dialect, self._exchange, model.spec.name).feed([])
        await send({"type": "http.response.body", "body": frame, "more_body": True})

    # --- the reply -------------------------------------------------------------------------

    async def _forward(self, lease: ModelLease, send: Send) -> None:
        scope = self._scope
        target = proxy.target_of(scope)
        request = proxy.ForwardedRequest(scope["method"], target, scope["headers"], self._raw)
        extra = vouch(self._exchange)
        try:
            reply = await proxy.send(lease.child.socket, request, extra)
        except proxy.ProcessLost:
            raise ModelDied(self._model.spec.name) from None
        self._has_arrived = True
        try:
            await reply.head()
            self._exchange.passed_on = True
            await self._head(reply, send)
            while piece := await reply.piece():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except proxy.ProcessLost:
            if self._begun and not self._is_stream:
                raise ConnectionResetError("the model's process ended during its reply") from None
            raise ModelDied(self._model.spec.name) from None
        finally:
            reply.close()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _head(self, reply: proxy.ForwardedReply, send: Send) -> None:
        if self._begun:  # a keep-alive has sent the head, with status 200
            if reply.status != 200:
                raise RemoteFault(reply.status, await reply.body())
            return
        headers = reply.client_headers
        kinds = (value for name, value in headers if name == b"content-type")
        self._is_stream = any(kind.startswith(_STREAMS) for kind in kinds)
        self._begun = True
        start = {"type": "http.response.start", "status": reply.status, "headers": headers}
        await send(start)

    async def _end_stream(self, error: FirnError, send: Send) -> None:
        frames = b""
        if self._dialect is not None:
            encoder = _fresh_encoder(self._dialect, self._exchange, self._model.spec.name)
            frames = encoder.feed([Failed(error)])
        await send({"type": "http.response.body", "body": frames, "more_body": False})


_STREAMS = (b"text/event-stream", b"application/x-ndjson")


def _fresh_encoder(dialect: Dialect, exchange: Exchange, model: str) -> Encoder:
    """An encoder for what the front itself adds to a stream: keep-alives, and a final error."""
    example = {**dialect.schema()["example"], "stream": True}
    call = dialect.decode(example, namespace=exchange.caller.key_id)
    return call.encoder(_head_of(exchange, model))


def _head_of(exchange: Exchange, model: str) -> ReplyHead:
    return ReplyHead(exchange.id.removeprefix("req_"), model, int(time.time()))
