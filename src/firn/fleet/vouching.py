"""What the front tells a model's process about a caller: its identity, and the request's id.

The front has checked keys, hosts and rates; models' processes do not check them again. Clients cannot
forge these headers: the front drops any that they send, and only the front can reach the processes.
"""

from __future__ import annotations

from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from firn.api.http.auth import Caller, Keys
from firn.api.http.exchange import SCOPE_KEY, Exchange
from firn.core.errors import Unauthorized
from firn.core.values import Namespace

CALLER, REQUEST, PAGE = b"x-firn-caller", b"x-firn-request", b"x-firn-page"

RawHeaders = Iterable[tuple[bytes, bytes]]


def vouch(exchange: Exchange) -> list[tuple[bytes, bytes]]:
    """Headers that identify the caller and the request, and mark those sent by the dashboard."""
    caller = exchange.caller
    text = f"{caller.key_id} {caller.namespace} {int(caller.operator)} {caller.address}"
    headers = [(CALLER, text.encode("ascii")), (REQUEST, exchange.id.encode("ascii"))]
    return [*headers, (PAGE, b"1")] if exchange.own_page else headers


class VouchedKeys(Keys):
    """Trusts the front about who the caller is. The keys only determine which namespaces exist."""

    def admit(self, headers: RawHeaders, *, local: bool = False) -> Caller:
        for name, value in headers:
            if name == CALLER:
                key_id, namespace, operator, address = value.decode("ascii").split(" ", 3)
                return Caller(Namespace(key_id), Namespace(namespace), operator == "1", address)
        raise Unauthorized("This is the private socket of a firn server.")


def vouched(app: ASGIApp) -> ASGIApp:
    """Wraps the app so that it uses the front's request ids, which both logs then show."""

    async def inner(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            ids = [value.decode("ascii") for name, value in scope["headers"] if name == REQUEST]
            if ids:
                page = any(name == PAGE for name, _ in scope["headers"])
                scope[SCOPE_KEY] = Exchange(id=ids[0], own_page=page)
        await app(scope, receive, send)

    return inner
